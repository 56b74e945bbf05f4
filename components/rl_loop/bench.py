"""`tandem bench loop`: the asynchronous loop beside the synchronous one, from the same start policy and data."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from components.rl_loop.figures import Figures
from components.storage.layout import RunLayout
from components.tracking.run import open_run
from components.tracking.server import start_server
from configs.failure import failure_of
from configs.run import RunConfig, validated

LOOP_LIMIT_S = 1800.0
MODES = ("asynchronous", "synchronous")


def measure(config: RunConfig, seeds: list[int], target: float) -> dict[str, Any]:
    """Run both loops for every seed, in turn, with every role a real process.

    Times count from the first generated group to the last version, so that starting Python is left out; CPU-seconds
    are those of all roles since they started, importing included.

    Args:
        config: The asynchronous run; the synchronous one differs in `loop.max_staleness` 0 alone.
        seeds: Each makes a start policy of its own.
        target: Exact match on held-out prompts to reach.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        server = start_server(Path(folder) / "mlflow")
        try:
            server.wait_ready()
            for seed in seeds:
                rows += _both(config, seed, target, Path(folder), server.uri)
        finally:
            server.stop()
    return _figures(rows, target)


def _both(config: RunConfig, seed: int, target: float, folder: Path, tracking_uri: str) -> list[dict[str, Any]]:
    base = {"seed": seed, "storage": {"root": str(folder), "scratch": str(folder)}, "tracking": {"uri": tracking_uri}}
    start = _changed(config, **base, name=f"start-{seed}")
    run = {"tracking_run": open_run(start)}
    data = _step("stage_data", start, run)["data"]
    checkpoint = _step("warm_start", start, run | {"data": data})["checkpoint"]
    rows = []
    for mode in MODES:
        loop = {} if mode == "asynchronous" else {"loop": {"max_staleness": 0}}
        one = _changed(config, **base, **loop, name=f"{mode[:5]}-{seed}")
        _step("rl_loop", one, {"tracking_run": open_run(one), "data": data, "checkpoint": checkpoint})
        row = {"mode": mode, "seed": seed, **_row(RunLayout(one), target)}
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def _changed(config: RunConfig, **changes: Any) -> RunConfig:
    values = config.model_dump(mode="json")
    for key, change in changes.items():
        values[key] = {**values[key], **change} if isinstance(change, dict) else change
    return validated(RunConfig, values, "bench loop")


def _step(name: str, config: RunConfig, parameters: dict[str, str]) -> dict[str, str]:
    """Run a pipeline step as KFP would; its output parameters."""
    layout = RunLayout(config)
    folder = layout.scratch / "kfp"
    folder.mkdir(parents=True, exist_ok=True)
    artifacts = {key: {"artifacts": [{"name": key, "uri": str(folder / key)}]} for key in ("metrics", "report")}
    executor_input = {
        "inputs": {"parameterValues": {"config": config.to_json(), **parameters}},
        "outputs": {"artifacts": artifacts, "outputFile": str(folder / f"{name}.json")},
    }
    done = subprocess.run(
        [sys.executable, "-m", f"components.{name}.main", json.dumps(executor_input)],
        capture_output=True,
        text=True,
        timeout=LOOP_LIMIT_S,
    )
    if done.returncode:
        raise failure_of(done.returncode, (done.stderr.strip().splitlines() or [f"{name} failed"])[-1])
    return json.loads((folder / f"{name}.json").read_text())["parameterValues"]


def _row(layout: RunLayout, target: float) -> dict[str, Any]:
    """One loop's figures, from its events."""
    events = [msgspec.json.decode(line) for line in layout.events.read_bytes().splitlines()]
    figures = Figures()
    cpu: dict[str, float] = {}
    reached: dict[str, float | None] = {"wall_s_to_target": None, "cpu_s_to_target": None}
    last, exact_match = 0.0, 0.0
    for event in sorted(events, key=lambda event: event["time"]):
        figures.add(event)
        if "cpu_s" in event:
            cpu[event["role"]] = event["cpu_s"]
        if event["event"] == "step":
            last = event["time"]
        elif event["event"] == "evaluation":
            exact_match = event["exact_match"]
            if exact_match >= target and reached["wall_s_to_target"] is None:
                reached["wall_s_to_target"] = event["time"] - figures.generating_from
                reached["cpu_s_to_target"] = sum(cpu.values())
    totals = figures.metrics(layout.config.train.steps)
    return {
        "wall_s": last - figures.generating_from,
        "cpu_s": sum(cpu.values()),
        **reached,
        "exact_match": exact_match,
        "train_wait_fraction": totals["train_wait_fraction"],
        "rollout_tokens_per_s": totals["rollout_tokens_per_s"],
        "staleness_max": int(totals["staleness_max"]),
    }


def _figures(rows: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """Medians over the seeds, and their ratios."""

    def median(mode: str, key: str) -> float | None:
        values = [row[key] for row in rows if row["mode"] == mode]
        return None if None in values else statistics.median(values)

    keys = ("wall_s", "cpu_s", "wall_s_to_target", "cpu_s_to_target", "exact_match", "train_wait_fraction")
    figures: dict[str, Any] = {"target": target}
    for mode in MODES:
        figures |= {f"{mode}_{key}": median(mode, key) for key in keys}
    for key in ("wall_s", "wall_s_to_target", "cpu_s_to_target"):
        ours, theirs = figures[f"asynchronous_{key}"], figures[f"synchronous_{key}"]
        figures[f"ratio_{key}"] = ours / theirs if ours and theirs else None
    return figures | {"runs": rows}
