"""What happened in a run, read from the files it left: events, step markers, evaluation, manifest."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from components.rl_loop.figures import Figures
from components.step import Marker
from components.storage.layout import RunLayout
from components.storage.store import Store
from configs.failure import BadData

STEPS = (
    "preflight",
    "stage_data",
    "warm_start",
    "adopt_checkpoint",
    "rl_loop",
    "publish_checkpoint",
    "evaluate",
    "release",
)


@dataclass
class History:
    """Everything the report shows, in plain values. Times are seconds since the epoch."""

    run: str
    config: str
    """The configuration as YAML."""
    summary: str
    """Task and sizes in a few words."""
    batch_groups: int
    figures: Figures = field(default_factory=Figures)
    """The loop's totals, as the loop itself adds them up."""
    markers: list[Marker] = field(default_factory=list)
    """Step markers in pipeline order."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics of each training step by the version it made; of a repeated step, the last."""
    lags: dict[int, dict[int, int]] = field(default_factory=dict)
    """Groups of each training step by the versions they lagged behind."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    queue: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    """Exact match in the loop by version."""
    restarts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    step_times: dict[int, float] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    """What the step `evaluate` wrote, or empty."""
    audit: dict[str, Any] = field(default_factory=dict)
    """The accounting of a loop that ended, or empty."""
    manifest: dict[str, Any] = field(default_factory=dict)
    unreadable: int = 0
    """Lines of events.jsonl that could not be read (the last one of a killed run is often cut)."""

    @property
    def staleness(self) -> Counter[int]:
        """Groups trained on in all, by the versions they lagged behind."""
        total: Counter[int] = Counter()
        for lags in self.lags.values():
            total.update(lags)
        return total


def read_history(layout: RunLayout) -> History:
    """Read a run; whatever is missing stays empty."""
    config = layout.config
    summary = (
        f"{config.data.uri} · {config.train.steps} policy updates of {config.train.batch_groups} groups"
        f" × {config.rollout.group_size} completions · staleness ≤ {config.loop.max_staleness} · seed {config.seed}"
    )
    history = History(config.name, config.to_yaml(), summary, config.train.batch_groups)
    store = layout.store
    history.evaluation = _document(store, "evaluation.json")
    history.manifest = _document(store, "manifest.json")
    history.audit = _document(store, "audit.json")
    for step in STEPS:
        if store.exists(f"steps/{step}.json"):
            try:
                history.markers.append(msgspec.json.decode(store.read(f"steps/{step}.json"), type=Marker))
            except msgspec.DecodeError:
                history.unreadable += 1
    layout.fetch_events()
    if layout.events.exists():
        with layout.events.open("rb") as lines:
            for line in lines:
                _add(history, line)
    return history


def _document(store: Store, key: str) -> dict[str, Any]:
    """A JSON object in the store; empty when it is not there."""
    if not store.exists(key):
        return {}
    try:
        found = json.loads(store.read(key))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadData(f"{store.uri}/{key}: is not a JSON object; run the step that wrote it again")
    return found


def _add(history: History, line: bytes) -> None:
    """Take one line of events.jsonl; lines of unknown events are left aside."""
    if not line.strip():
        return
    try:
        event = msgspec.json.decode(line)
        _take(history, event)
        history.figures.add(event)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        history.unreadable += 1


def _take(history: History, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "step":
        version = int(event.get("step", event["version"]))
        history.metrics[version] = {key: float(value) for key, value in event["metrics"].items() if value is not None}
        history.step_times[version] = float(event["time"])
        history.lags[version] = {int(lag): int(groups) for lag, groups in event.get("staleness", {}).items()}
    elif kind == "span":
        history.spans.append(
            {
                "role": str(event["role"]),
                "kind": str(event["kind"]),
                "start": float(event["start"]),
                "end": float(event["end"]),
                "tokens": int(event.get("tokens") or 0),
            }
        )
    elif kind == "queue":
        history.queue.append({**event, "time": float(event["time"])})
    elif kind == "evaluation":
        history.evaluations[int(event["version"])] = float(event["exact_match"])
    elif kind == "restart":
        history.restarts.append(event)
    elif kind == "samples":
        history.samples += [{"stage": event["stage"], **row} for row in event["rows"]]
