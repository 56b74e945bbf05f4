"""A run that never was: the events an asynchronous loop of the quickstart's size writes, from a seed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec

from components.step import Marker
from components.storage.layout import RunLayout
from configs.run import RunConfig

START = 1_790_000_000.0


def layout_at(folder: Path, **fields: Any) -> RunLayout:
    storage = {"root": str(folder), "scratch": str(folder)}
    return RunLayout(RunConfig.model_validate({"name": "quickstart", "storage": storage, **fields}))


def events(steps: int = 300, workers: int = 1, seed: int = 0) -> list[dict[str, Any]]:
    """Events of a whole loop in order of time."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []

    def emit(time: float, role: str, event: str, version: int | None = None, **fields: Any) -> None:
        found.append({"time": time, "run": "quickstart", "role": role, "event": event, "version": version, **fields})

    def span(role: str, kind: str, start: float, took: float, version: int, **fields: Any) -> float:
        emit(start + took, role, "span", version, kind=kind, start=start, end=start + took, **fields)
        return start + took

    clock, busy, issued, dropped = START, [START] * workers, 0, 0
    emit(START - 0.5, "rl_loop", "started", 0)
    emit(START, "rollout-0", "evaluation", 0, exact_match=0.27, rows=512)
    rows = [{"prompt": "12+34=", "completion": "<b>64</b>", "answer": "64", "reward": 0.0}]
    emit(START, "rl_loop", "samples", 0, stage="before", rows=rows)
    for version in range(1, steps + 1):
        skill = 0.25 + 0.73 / (1 + math.exp(-(version - steps * 0.35) / (steps * 0.09)))
        for worker in range(workers):
            role = f"rollout-{worker}"
            while issued < version * 32 + 32 or (busy[worker] < clock + 0.4 and issued < version * 32 + 64):
                end = span(
                    role,
                    "generate",
                    busy[worker],
                    draw.uniform(0.4, 0.52),
                    version,
                    groups=32,
                    tokens=draw.randint(950, 1020),
                )
                span("reward", "reward", end + 0.01, draw.uniform(0.05, 0.09), version, groups=32)
                busy[worker] = end + 0.02
                issued += 32
        waited = draw.uniform(0.0, 0.06)
        clock = span("train", "wait", clock, waited, version)
        took = draw.uniform(0.48, 0.6)
        clock = span("train", "train", clock, took, version, groups=32)
        clock = span("train", "publish", clock, 0.03, version)
        if version % 25 == 0:
            clock = span("train", "checkpoint", clock, 0.4, version)
        proven = span("broadcast", "verify", clock + 0.01, 0.05, version)
        emit(proven, "broadcast", "verified", version, worker="rollout-0", digest="ab" * 16, seconds=0.05)
        busy = [span(f"rollout-{n}", "load", max(time, clock), 0.04, version) for n, time in enumerate(busy)]
        old = draw.randint(0, 6)
        metrics = {
            "train/loss": 0.02 * draw.random(),
            "rollout/raw_reward": min(1.0, max(0.0, skill - 0.05 + draw.gauss(0, 0.035))),
            "perf/step_time": took + waited,
        }
        emit(
            clock, "train", "step", version, step=version, metrics=metrics, staleness={"0": old, "1": 30 - old, "2": 2}
        )
        if version % 90 == 0:
            dropped += 1
        if version % 25 == 0:
            busy[0] = span("rollout-0", "evaluate", busy[0], 0.7, version)
            emit(clock, "rollout-0", "evaluation", version, exact_match=round(skill, 3), rows=512)
        depth = {"running": draw.choice((32, 32, 64)), "generated": draw.randint(0, 8), "scored": draw.randint(10, 46)}
        durable = version // 25 * 25 * 32
        emit(clock, "rl_loop", "queue", version, issued=issued, **depth, trained=version * 32 - durable,
             durable=durable, dropped=dropped)  # fmt: skip
    return sorted(found, key=lambda event: event["time"])


def write_run(layout: RunLayout, found: list[dict[str, Any]]) -> None:
    """Leave what a whole run leaves."""
    layout.scratch.mkdir(parents=True, exist_ok=True)
    layout.events.write_text("".join(json.dumps(event) + "\n" for event in found))
    for step, took in (
        ("preflight", 2.0),
        ("stage_data", 1.4),
        ("warm_start", 61.0),
        ("rl_loop", 190.0),
        ("publish_checkpoint", 7.0),
    ):
        write_marker(layout, step, took)
    layout.store.write("evaluation.json", json.dumps(evaluation()).encode())
    layout.store.write("audit.json", json.dumps(audit(found)).encode())
    layout.store.write(
        "manifest.json", json.dumps({"git": {"commit": "0" * 40, "dirty": False}, "python": "3.11"}).encode()
    )


def write_marker(layout: RunLayout, step: str, took: float, **fields: Any) -> None:
    marker = Marker(step=step, status="done", pid=1, host="here", started=START, ended=START + took)
    layout.store.write(f"steps/{step}.json", msgspec.json.encode(msgspec.structs.replace(marker, **fields)))


def audit(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the loop writes when it ends: the last look at the queue, the rest dropped."""
    last = [event for event in found if event["event"] == "queue"][-1]
    rest = last["issued"] - last["durable"] - last["dropped"]
    return {
        "run": "quickstart", "groups_issued": last["issued"], "groups_durable": last["durable"], "groups_in_flight": 0,
        "groups_dropped": last["dropped"] + rest, "dropped_by_reason": {"run_ended": rest, "stale": last["dropped"]},
        "groups_reclaimed": 2, "duplicates_refused": 1, "durable_updates": last["durable"] // 32,
        "in_flight_by_stage": {}, "findings": [],
    }  # fmt: skip


def evaluation() -> dict[str, Any]:
    """What the step `evaluate` writes, for prompts of the task add2r."""
    draw = random.Random(1)
    rows = []
    for _ in range(200):
        a, b = draw.randint(0, 99), draw.randint(0, 99)
        answer = str(a + b)[::-1]
        wrong = str(a + b + draw.choice((1, 10, 9)))[::-1]
        before, after = (answer if draw.random() < 0.27 else wrong), (answer if draw.random() < 0.96 else wrong)
        rows.append({
            "prompt": f"{a}+{b}=", "answer": answer, "before": before, "after": after,
            "before_reward": float(before == answer), "after_reward": float(after == answer),
        })  # fmt: skip
    return {
        "confidence": 0.95, "margin": 0.0, "champion_version": None, "version": "1", "model": "file:///runs/export",
        "promoted": True, "reason": "the candidate is better by +0.6914 (95% interval +0.6504 to +0.7324)", "rows": rows,
        "metrics": {
            "eval/exact_match": 0.9629, "eval/exact_match_low": 0.9453, "eval/exact_match_high": 0.9785,
            "eval/exact_match_before": 0.2715, "eval/champion_exact_match": 0.2715, "eval/rows": 512.0,
        },
    }  # fmt: skip
