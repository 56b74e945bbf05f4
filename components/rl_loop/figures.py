"""The loop's totals, added up from its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HOUR_S = 3600.0
TRAINING = ("wait", "train", "publish", "checkpoint")


@dataclass
class Figures:
    """Totals of a loop. Add its events in order; a loop that was resumed has several stretches."""

    wall_s: float = 0.0
    """Seconds the loop ran, the time between stretches left out."""
    tokens: int = 0
    """Tokens generated."""
    staleness_max: int = 0
    """Versions the stalest group trained on lagged behind."""
    restarts: int = 0
    waited_s: float = 0.0
    """Seconds training waited for a batch, its first one (while the engines start) left out."""
    training_s: float = 0.0
    """Seconds of training, waiting included, counted from the same moment."""
    generating_from: float = float("inf")
    generating_to: float = 0.0
    _started: float | None = None
    _last: float = 0.0
    _first_wait: bool = True

    def add(self, event: dict[str, Any]) -> None:
        """Count one event."""
        kind = event["event"]
        if kind == "started":
            self._close()
            self._started, self._first_wait = event["time"], True
        if self._started is not None:
            self._last = max(self._last, event["time"])
        if kind == "span":
            self._span(event)
        elif kind == "step":
            self.staleness_max = max(self.staleness_max, *(int(lag) for lag in event["staleness"]))
        elif kind == "restart":
            self.restarts += 1

    def metrics(self, verified_updates: int) -> dict[str, float]:
        """The figures under their stable names.

        Args:
            verified_updates: Updates that a durable checkpoint covers; each was trained only on groups sampled with
                weights that the sampling engine was proven to hold.
        """
        wall = self.wall_s + (self._last - self._started if self._started is not None else 0.0)
        generating = self.generating_to - self.generating_from
        return {
            "verified_updates": float(verified_updates),
            "updates_per_hour": verified_updates * HOUR_S / wall if wall else 0.0,
            "rollout_tokens_per_s": self.tokens / generating if generating > 0 else 0.0,
            "train_wait_fraction": self.waited_s / self.training_s if self.training_s else 0.0,
            "staleness_max": float(self.staleness_max),
            "restarts": float(self.restarts),
            "wall_s": wall,
        }

    def _close(self) -> None:
        if self._started is not None:
            self.wall_s += self._last - self._started

    def _span(self, event: dict[str, Any]) -> None:
        took = event["end"] - event["start"]
        if event["kind"] == "generate":
            self.tokens += event["tokens"]
            self.generating_from = min(self.generating_from, event["start"])
            self.generating_to = max(self.generating_to, event["end"])
        elif event["role"] == "train" and event["kind"] in TRAINING:
            if self._first_wait:
                self._first_wait = event["kind"] != "wait"
                return
            self.training_s += took
            if event["kind"] == "wait":
                self.waited_s += took
