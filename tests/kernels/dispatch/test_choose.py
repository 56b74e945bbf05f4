"""The choice of a dispatcher, and `tandem bench dispatch`, on real processes and, as root, on real wires."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

from configs.failure import BadConfig
from kernels.bench import Layout, measure, measure_joined
from kernels.bench_rank import Plan
from kernels.bench_routing import ROUTINGS, routing
from pipelines.cli import tandem

root = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces, for which it must be root")
PLAN = Plan(
    hidden=128, experts=16, tops=[4], tokens=[200], routings=["uniform"],
    backends=["all_to_all", "hierarchical", "hierarchical_fp8", "auto"],
)  # fmt: skip


def _local(nodes: int, ranks: int) -> Layout:
    return Layout("local", nodes, ranks, 0.0)


def _by_backend(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {case["backend"]: case for case in figures["cases"]}


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What a measurement told as it went."""
    return []


@pytest.fixture(scope="module")
def figures(told: list[dict[str, Any]]) -> dict[str, Any]:
    return measure(PLAN, _local(2, 2), told.append)


def test_backends_are_measured_in_turn_and_compared_with_the_first(
    figures: dict[str, Any], told: list[dict[str, Any]]
) -> None:
    cases = _by_backend(figures)
    assert list(cases) == PLAN.backends
    plain = cases["all_to_all"]
    assert plain["ratio_bytes"] == plain["ratio_time"] == 1
    for case in cases.values():
        assert case["ratio_time"] == plain["seconds"] / case["seconds"]
        assert case["ratio_bytes"] == plain["inter_node_bytes"] / case["inter_node_bytes"]
    # Two of four experts lie on the other node; both levels send the token there once.
    assert 1.8 < cases["hierarchical"]["ratio_bytes"] < 2.1 < cases["hierarchical_fp8"]["ratio_bytes"]
    assert len(told) == len(figures["cases"]) + len(figures["choices"]) == 5


def test_the_choice_tells_its_numbers_and_its_reason(figures: dict[str, Any]) -> None:
    (choice,) = figures["choices"]
    measured = {key: value for key, value in choice.items() if key.startswith("measured_s/")}
    assert "measured_s/all_to_all" in measured
    assert choice["reason"].startswith(choice["backend"])
    fastest = min(measured, key=measured.__getitem__).removeprefix("measured_s/")
    plain = measured["measured_s/all_to_all"]
    kept = plain * 0.97 <= min(measured.values())
    assert choice["backend"] == ("all_to_all" if kept else fastest)


def test_one_node_leaves_only_the_plain_path() -> None:
    plan = msgspec.structs.replace(PLAN, backends=["all_to_all", "auto"])
    figures = measure(plan, _local(1, 2), lambda line: None)
    (choice,) = figures["choices"]
    assert choice["backend"] == "all_to_all" and "nothing else is possible" in choice["reason"]
    assert all(case["inter_node_bytes"] == 0 and case["ratio_bytes"] is None for case in figures["cases"])


def test_the_failure_of_a_rank_is_told_in_its_own_words() -> None:
    # DeepEP has no path without GPUs.
    with pytest.raises(BadConfig, match=r"rank \d of the measurement: .*deep_ep"):
        measure(msgspec.structs.replace(PLAN, backends=["deep_ep"]), _local(1, 2), lambda line: None)


def test_experts_that_cannot_be_shared_are_refused_before_anything_starts() -> None:
    with pytest.raises(BadConfig, match="cannot be shared evenly by 6 ranks"):
        measure(PLAN, _local(3, 2), lambda line: None)


def test_a_process_that_is_no_rank_is_told_how_to_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BadConfig, match="torchrun"):
        measure_joined(PLAN, lambda line: None)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings_are_what_they_are_named(kind: str) -> None:
    experts, weights = routing(kind, 4000, 64, 8, 4, torch.Generator().manual_seed(0))
    assert all(len(row.unique()) == 8 for row in experts[:100])
    torch.testing.assert_close(weights.sum(1), torch.ones(4000))
    load = torch.bincount(experts.reshape(-1), minlength=64) / (4000 * 8 / 64)
    nodes = max(len(row.unique()) for row in experts // 16)
    assert (load.max() > 3) == (kind == "skewed")
    assert nodes == (2 if kind == "node_limited" else 4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["dispatch", "--topk", "0"], "--topk 0: is no list of numbers of at least 1"),
        (["dispatch", "--topk", "65"], "--topk: must lie between 1 and --experts 64"),
        (["dispatch", "--backend", "fastest"], "--backend fastest: is unknown"),
        (["dispatch", "--topk", "16", "--experts", "16"], "--routing node_limited leaves a token 8 experts"),
        (["dispatch", "--run", "checkpoint.yaml"], "its model comes from"),
        (["experts", "--ranks", "0"], "--ranks 0: is no list of numbers of at least 1"),
        (["experts", "--ranks", "3"], "--ranks 3 does not divide the 8 experts"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.yaml").write_text("model: {checkpoint: somewhere}")
    arguments = [str(tmp_path / each) if each.endswith(".yaml") else each for each in arguments]
    failure = CliRunner().invoke(tandem, ["bench", *arguments]).exception
    assert isinstance(failure, BadConfig) and told in failure.sentence


@root
def test_the_command_line_measures_on_shaped_wires(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = CliRunner().invoke(
        tandem,
        ["bench", "dispatch", "--fabric", "emulated", "--nodes", "2", "--topk", "8", "--tokens", "256", "--routing",
         "uniform", "--json", str(file)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    figures = json.loads(file.read_text())
    keys = {"backend", "nodes", "topk", "tokens", "hidden", "routing", "inter_node_bytes", "seconds"}
    cases = _by_backend(figures)
    for name, case in cases.items():
        assert keys | {"ratio_bytes", "ratio_time"} <= case.keys()
        # The wire carries the payload, and a few per cent of headers and acknowledgements.
        assert case["payload_bytes"] < case["inter_node_bytes"] < 1.12 * case["payload_bytes"], name
        # Nothing is faster than its wire, but for what the bucket lets pass at once.
        assert case["over_wire"] > 0.8
    assert cases["hierarchical"]["ratio_bytes"] >= 3.9
    assert cases["hierarchical_fp8"]["ratio_bytes"] >= 5
    (choice,) = figures["choices"]
    assert choice["backend"] == "hierarchical"
    assert f"{'hierarchical':<17}    8    256 uniform" in done.output
