"""Several ranks train as one process does, on real process groups; all cases in one tree of processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from components.train.ranks import Ranks
from components.train.trainer import Trainer
from components.weights.policy import save_policy
from configs.failure import BadConfig
from configs.run import RunConfig
from tests.ranks.rank_cases import Case, run_case
from tests.train.test_checkpoint import TOKENIZER
from tests.train.test_trainer import policy, sampled

LIMIT_S = 240
BASE: dict[str, Any] = {"batch_groups": 4, "minibatches": 2, "steps": 6, "warmup_steps": 0}
CLIPPED = {"clip_norm": 0.05}
"""Far below the gradients' norm."""
SPREAD = [("two", 2, 1, 1), ("two-experts", 2, 2, 1), ("four-experts", 4, 4, 2), ("three", 3, 1, 1)]
"""Name, ranks, expert parallelism, nodes."""
SMALL_MESSAGE = 44
"""Bytes of the largest share of a norm's 32 weights among three ranks, which the smallest share is below."""
REREAD = [("reread-two", 2, 2, 1), ("reread-four", 4, 4, 2)]
HARD: dict[str, Any] = {"off_policy": "decoupled", "router_replay": "step"}

Results = dict[str, list[dict[str, Any]]]


def case(
    name: str, ranks: int, experts: int, nodes: int, batches: list[str], run: str = "", save: bool = False, **train: Any
) -> Case:
    together = {**BASE, **CLIPPED, "ranks": ranks, "expert_parallel": experts, **train}
    return Case(name, {"name": run or name, "train": together}, batches, nodes, save)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batches of one sampler; of the last, only four completions are worth anything."""
    made = tmp_path_factory.mktemp("ranks")
    save_policy(policy(), TOKENIZER, made / "start")
    sampler = Trainer(policy(), RunConfig.model_validate({"train": BASE}))
    for number in range(3):
        groups = sampled(sampler, 6, seed=number)
        (made / f"batch-{number}").write_bytes(msgspec.msgpack.encode(groups))
    one = next(group for group in groups if len(set(group.rewards)) > 1)
    (made / "few").write_bytes(msgspec.msgpack.encode([one]))
    return made


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    first, then = ["batch-0", "batch-1"], ["batch-2"]
    alone = [
        case("one", 1, 1, 1, first, save=True),
        case("undisturbed", 1, 1, 1, first + then),
        case("hard-one", 1, 1, 1, ["batch-0", "few"], **HARD),
    ]
    together = [
        *(case(name, ranks, experts, nodes, first) for name, ranks, experts, nodes in SPREAD),
        msgspec.structs.replace(case("three-parts", 3, 1, 1, first), message_bytes=SMALL_MESSAGE),
        case("saved", 4, 2, 2, first, save=True),
        *(case(name, ranks, experts, nodes, then, run="saved") for name, ranks, experts, nodes in REREAD),
        case("four-from-one", 4, 2, 2, then, run="one"),
        case("hard-four", 4, 2, 2, ["batch-0", "few"], **HARD),
    ]
    found = {each.name: run_case(each, Ranks(), folder) for each in alone}
    (folder / "cases.json").write_bytes(msgspec.json.encode(together))
    run_ranks(folder, 4)
    found["reread-one"] = run_case(case("reread-one", 1, 1, 1, then, run="saved"), Ranks(), folder)
    return found | {each.name: torch.load(folder / f"{each.name}.pt") for each in together}


def run_ranks(folder: Path, size: int) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-m", "tests.ranks.rank_cases", str(folder), str(rank)])
        for rank in range(size)
    ]
    end = time.monotonic() + LIMIT_S
    # A rank that fails leaves the others waiting.
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        assert time.monotonic() < end, "the ranks did not end"
        time.sleep(0.05)
    for process in processes:
        process.kill()
    assert [process.wait() for process in processes] == [0] * size


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, gradients and metrics to 1e-5, gradients also relative to the largest."""
    largest = max(float(each.abs().max()) for each in expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        assert float((found["gradients"][name] - gradient).abs().max()) < 1e-5 * largest, name
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert float((found["weights"][name] - weight).abs().max()) < 1e-5, name
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)


@pytest.mark.parametrize("name", [*(each[0] for each in SPREAD), "three-parts", "saved"])
def test_any_number_of_ranks_comes_to_what_one_process_comes_to(results: Results, name: str) -> None:
    for found, expected in zip(results[name], results["one"], strict=True):
        assert expected["metrics"]["train/grad_norm"] > 2 * CLIPPED["clip_norm"]
        check_equal(found, expected)


@pytest.mark.parametrize("name", ["reread-one", *(each[0] for each in REREAD), "four-from-one"])
def test_a_checkpoint_goes_on_with_any_other_number_of_ranks(results: Results, name: str) -> None:
    """Moments included: without them the next update would be another."""
    check_equal(results[name][0], results["undisturbed"][2])


def test_ranks_without_rows_and_replayed_routing_of_stale_groups(results: Results) -> None:
    few = results["hard-one"][1]["metrics"]
    assert few["async/staleness_mean"] == 1 and few["train/loss"] != 0
    for found, expected in zip(results["hard-four"], results["hard-one"], strict=True):
        check_equal(found, expected)


def test_all_ranks_write_one_checkpoint_anyone_can_load(results: Results, folder: Path) -> None:
    made = folder / "store" / "saved" / "checkpoints" / "step-000002"
    written = load_file(made / "model.safetensors")
    expected = results["saved"][-1]["weights"]
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert len(list((made / "trainer" / "optimizer").glob("*.safetensors"))) == 4
    assert not [path for path in made.rglob("*") if path.suffix not in (".safetensors", ".json", "")]
    # Every file is accounted for.
    names = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert names == {*msgspec.json.decode((made / "_digests.json").read_bytes()), "_digests.json"}


def test_experts_that_cannot_be_divided_are_refused() -> None:
    from components.train.parallel import check_divisible

    with pytest.raises(BadConfig, match="choose train.ranks and train.expert_parallel"):
        check_divisible("gate_up_proj", 64, 3)
