"""`tandem bench experts`: the experts block beside transformers' own, and a policy update by several ranks beside one."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from components.train.bench_rank import Setting
from components.weights.policy import new_policy
from configs.failure import Failure
from configs.run import ModelConfig, RunConfig
from kernels.experts import IMPLEMENTATION, experts_of, use_grouped_experts

LIMIT_S = 600.0
REFERENCE = "reference"


def measure(config: RunConfig, ranks: list[int], rounds: int = 9) -> dict[str, Any]:
    """Measure both.

    Args:
        config: Its model, batch and minibatches count; expert parallelism is always over all ranks.
        ranks: How many ranks train together, a case each; one process is measured in any case.
        rounds: Measurements a case, of which the median counts.

    Returns:
        `block`: as `measure_block`. `updates`: a case each with `ranks`, `expert_parallel`, `seconds` a policy update and
        `ratio_time`, how many times faster than one process.

    Raises:
        Failure: a rank failed or took too long.
    """
    cases = [_update(config, size, rounds) for size in dict.fromkeys([1, *ranks])]
    for case in cases:
        case["ratio_time"] = cases[0]["seconds"] / case["seconds"]
    return {"block": measure_block(config.model, _tokens(config), rounds), "updates": cases}


def measure_block(model: ModelConfig, tokens: int, rounds: int = 9) -> dict[str, Any]:
    """One layer's experts forward and backward beside transformers' implementation, in turn in this process.

    Args:
        model: Geometry of the experts.
        tokens: Rows of the block's input.

    Returns:
        The shapes, `implementation` that transformers chooses, `seconds`, `reference_seconds`, and `ratio_time`: how many
        times faster than transformers'.
    """
    policy = new_policy(model.model_copy(update={"num_hidden_layers": 1}), 16, 0)
    own, reference = policy, new_policy(model.model_copy(update={"num_hidden_layers": 1}), 16, 0)
    chosen = reference.config._experts_implementation
    use_grouped_experts(own)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, model.hidden_size, generator=generator)
    logits = torch.randn(tokens, model.num_experts, generator=generator)
    weights, indices = logits.softmax(-1).topk(model.num_experts_per_tok)
    blocks = {IMPLEMENTATION: experts_of(own)[0], REFERENCE: experts_of(reference)[0]}
    taken: dict[str, list[float]] = {name: [] for name in blocks}
    for number in range(rounds + 1):
        for name, block in blocks.items():
            start = time.perf_counter()
            given = x.clone().requires_grad_()
            block(given, indices, weights).square().sum().backward()
            # The first round warms up.
            if number:
                taken[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    return {
        "tokens": tokens,
        "hidden": model.hidden_size,
        "intermediate": model.moe_intermediate_size,
        "experts": model.num_experts,
        "topk": model.num_experts_per_tok,
        "implementation": chosen,
        "seconds": seconds[IMPLEMENTATION],
        "reference_seconds": seconds[REFERENCE],
        "ratio_time": seconds[REFERENCE] / seconds[IMPLEMENTATION],
    }


def _tokens(config: RunConfig) -> int:
    """Tokens of a minibatch, prompts as long as completions."""
    rows = config.train.batch_groups * config.rollout.group_size // config.train.minibatches
    return rows * 2 * config.rollout.max_new_tokens


def _update(config: RunConfig, size: int, rounds: int) -> dict[str, Any]:
    train = config.train.model_copy(update={"ranks": size, "expert_parallel": size})
    setting = Setting(config.model_copy(update={"train": train}).to_json(), rounds)
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as made:
        folder = Path(made)
        setting.write(folder)
        # One rank is a process like the others, with as many threads.
        _run_ranks(folder, size)
        return {"ranks": size, "expert_parallel": size, "seconds": statistics.median(setting.times(folder))}


def _run_ranks(folder: Path, size: int) -> None:
    logs = [folder / f"{rank}.err" for rank in range(size)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("wb") as err:
            command = [sys.executable, "-m", "components.train.bench_rank", str(folder), str(rank), str(size)]
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=err, stderr=err))
    end = time.monotonic() + LIMIT_S
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed or time.monotonic() > end:
                lines = logs[failed[0] if failed else 0].read_text().strip().splitlines() or ["it left no words"]
                raise Failure(f"bench experts: rank {failed or 'all'} of {size} did not end well: {lines[-1]}")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
