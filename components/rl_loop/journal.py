"""The loop's journal: every event to a file, every metric to MLflow."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from components.experience.experience import Experience
from components.rl_loop.figures import Figures
from components.storage.layout import RunLayout
from components.tracking.run import Tracker
from configs.failure import BadConfig, ServiceGone

FLUSH_S = 2.0
"""Seconds between batches to MLflow."""
SAVE_S = 20.0
"""Seconds between copies of the events to the run's store, where the scratch folder may be lost with its pod."""

Metric = tuple[str, float, int, float]
"""Name, value, step, time (s since the epoch)."""


class Journal:
    """Collects the roles' events from Redis, and forgets them there once they are written down where they last.

    Attributes:
        version: Newest version trained.
        figures: The loop's totals, those of earlier executions of the same run included.
    """

    def __init__(self, layout: RunLayout, experience: Experience, tracker: Tracker) -> None:
        self.layout = layout
        self.experience = experience
        self.tracker = tracker
        self.run = layout.config.name
        self.sample_rows = layout.config.tracking.sample_rows
        self.version = 0
        self.figures = Figures()
        self._last = ""
        layout.fetch_events()
        if layout.events.exists():
            for line in layout.events.read_bytes().splitlines():
                self._recall(line)
        self._forgotten = self._last
        self._unsaved = False
        self._file = open(layout.events, "a", buffering=1, encoding="utf-8")
        self._metrics: list[Metric] = []
        self._batch: list[Metric] = []
        self._samples: list[dict[str, Any]] = []
        self._flushed = self._saved = time.monotonic()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._sending: Future[None] | None = None

    def collect(self) -> None:
        """Move the events that have arrived into the file, and their metrics towards MLflow."""
        while self._read():
            pass
        if self.layout.scratch_is_shared or time.monotonic() - self._saved > SAVE_S:
            self._save()
        if time.monotonic() - self._flushed > FLUSH_S and (self._sending is None or self._sending.done()):
            self._flush()

    def _read(self) -> bool:
        events, self._last = self.experience.events(self._last)
        for line in events:
            self._write(line.decode())
            self._take(json.loads(line))
        return bool(events)

    def _save(self) -> None:
        """Put the events where they last, and forget them in Redis."""
        self._saved = time.monotonic()
        if not self.layout.scratch_is_shared and not self._copy():
            return
        if self._last != self._forgotten:
            self.experience.forget_events(self._last)
            self._forgotten = self._last

    def _copy(self) -> bool:
        """Copy the events to the run's store; a store that is away is asked again later."""
        if self._last != self._forgotten:
            # So that the loop of another pod, which has only the copy, goes on where the copy ends.
            self._write(json.dumps({"time": time.time(), "event": "read", "last": self._last}))
        if self._unsaved:
            try:
                self.layout.save_events()
            except ServiceGone as error:
                print(f"note: events stay in the pod for now: {error.sentence}", flush=True)
                return False
        self._unsaved = False
        return True

    def _write(self, line: str) -> None:
        self._unsaved = True
        try:
            self._file.write(line + "\n")
        except OSError as error:
            raise BadConfig(
                f"{self._file.name}: cannot be written ({error.strerror}); free space there, then resume the run"
            ) from None

    def write(self, event: str, **fields: Any) -> None:
        """Add an event of the loop itself."""
        record = {"time": time.time(), "run": self.run, "role": "rl_loop", "event": event, **fields}
        self._write(json.dumps(record))
        self._take(record)

    def close(self) -> None:
        """Send what is left, samples included. A tracking server that is gone is noted: the events file has it all."""
        gone = None
        for last in (self.collect, self._save):
            # What the loop itself wrote last needs no Redis to be kept, nor do the metrics.
            try:
                last()
            except ServiceGone as error:
                gone = error
        self._flush(wait=True)
        try:
            if self._samples:
                self.tracker.log_samples(self._samples, self.sample_rows)
        except ServiceGone as error:
            self._note_gone(error)
        self._sender.shutdown()
        self._file.close()
        if gone is not None:
            raise gone

    def _recall(self, line: bytes) -> None:
        """Count an event of an earlier execution; a killed loop's last line may be cut."""
        try:
            event = json.loads(line)
        except ValueError:
            return
        self.figures.add(event)
        if event["event"] == "step":
            self.version = event["step"]
        elif event["event"] == "read":
            self._last = event["last"]

    def _take(self, event: dict[str, Any]) -> None:
        self.figures.add(event)
        at, version = event["time"], event.get("version") or 0
        if event["event"] == "step":
            self.version = event["step"]
            self._metrics += [(name, value, event["step"], at) for name, value in event["metrics"].items()]
        elif event["event"] == "evaluation":
            self._metrics.append(("eval/exact_match", event["exact_match"], version, at))
        elif event["event"] == "span" and event["kind"] == "generate":
            seconds = max(event["end"] - event["start"], 1e-6)
            self._metrics.append(("perf/rollout_tokens_per_s", event["tokens"] / seconds, version, at))
        elif event["event"] == "verified":
            self._metrics.append(("perf/update_weights_time", event["seconds"], version, at))
        elif event["event"] == "queue":
            queue = {name: event[name] for name in ("running", "generated", "scored", "dropped")}
            self._metrics += [
                (f"async/groups_{name}", float(value), event["version"], at) for name, value in queue.items()
            ]
        elif event["event"] == "samples":
            self._samples += [{"version": version, **row} for row in event["rows"]]

    def _flush(self, wait: bool = False) -> None:
        """Start sending the metrics so far; those of a batch that did not arrive are sent again."""
        self._settle(wait)
        self._flushed = time.monotonic()
        if self._metrics:
            self._batch, self._metrics = self._metrics, []
            self._sending = self._sender.submit(self.tracker.log_metrics, self._batch)
            if wait:
                self._settle(wait)

    def _settle(self, wait: bool) -> None:
        """Look how the last batch went; tracking calls end by themselves, so waiting does too."""
        if self._sending is None or not (wait or self._sending.done()):
            return
        error = self._sending.exception()
        self._sending = None
        if isinstance(error, ServiceGone):
            # The run is worth more than its live curves.
            self._metrics = self._batch + self._metrics
            self._note_gone(error)
        elif error is not None:
            raise error

    def _note_gone(self, error: ServiceGone) -> None:
        note = {"time": time.time(), "run": self.run, "role": "rl_loop", "event": "tracking_gone"}
        self._write(json.dumps(note | {"sentence": error.sentence}))
