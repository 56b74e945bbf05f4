"""What a person sees while a run works: the steps, and the loop's numbers; plain lines where there is no terminal."""

from __future__ import annotations

import json
import shlex
import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from components.step import Marker, read_marker
from components.storage.layout import RunLayout
from configs.failure import BadConfig, Failure
from configs.run import RunConfig

STEPS = ("preflight", "stage_data", "warm_start", "adopt_checkpoint", "rl_loop", "publish_checkpoint", "evaluate")
PLAIN_EVERY_S = 10.0
REMOTE_EVERY_S = 3.0
WINDOW = 20
"""Updates that the shown rates look back on."""


class Display:
    """Follows a run's markers and events."""

    def __init__(self, config: RunConfig, layout: RunLayout, plain: bool) -> None:
        self.config = config
        self.layout = layout
        self.console = Console(highlight=False)
        plain = plain or not self.console.is_terminal or self.console.is_dumb_terminal
        self.live = None if plain else Live(console=self.console, refresh_per_second=5)
        self.started = time.time()
        self._told: dict[str, str] = {}
        self._line_at = 0.0
        self._offset = layout.events.stat().st_size if layout.events.exists() else 0
        self._markers: dict[str, Marker] = {}
        self._looked = float("-inf")
        self.state: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.tokens: list[tuple[float, int]] = []

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def note(self, text: str) -> None:
        """Show a line of its own."""
        (self.live.console if self.live else self.console).print(text, soft_wrap=True, markup=False)

    def update(self) -> None:
        """Look at the run once and show what is new; what cannot be read now is shown at the next look."""
        try:
            self._read_events()
            markers = self._read_markers()
        except (Failure, OSError, ValueError) as error:
            if isinstance(error, BadConfig):
                raise
            return
        if self.live:
            self.live.update(self._render(markers))
            return
        for step, marker in markers.items():
            if self._told.get(step) != marker.status:
                self._told[step] = marker.status
                self.note(_marker_line(step, marker))
        if time.monotonic() - self._line_at > PLAIN_EVERY_S and (line := self._loop_line(markers)):
            self._line_at = time.monotonic()
            self.note(line)

    def summary(self, figures: dict[str, Any]) -> None:
        """Show how the run ended."""
        self.note("")
        self.note(
            f"exact match (greedy, held out)  {figures['exact_match_before']:.3f} -> {figures['exact_match_after']:.3f}"
            f"   {'promoted to champion' if figures['promoted'] else 'champion unchanged'}"
        )
        self.note(
            f"verified updates                {figures['verified_updates']}, {figures['updates_per_hour']:,.0f} an hour;"
            f" {figures['groups_durable']} groups durable, {figures['groups_dropped']} dropped of {figures['groups_issued']}"
        )
        self.note(
            f"time                            {figures['wall_s']:.0f} s, {figures['cpu_s']:.0f} CPU-s,"
            f" peak memory {figures['peak_rss_bytes'] / 2**30:.1f} GiB, training waited {figures['train_wait_fraction']:.0%}"
        )
        self.note(f"report                          {figures['report']}")
        folder = self.layout.scratch.parent
        where = "" if folder.name == "runs" and not self.config.tracking.uri else f" --runs {shlex.quote(str(folder))}"
        opened = self.config.tracking.uri or f"tandem mlflow{where}  (run {figures['mlflow_run_id']})"
        self.note(f"MLflow                          {opened}")

    def _read_markers(self) -> dict[str, Marker]:
        """The steps' markers; of a remote store every few seconds, since each look is a request."""
        remote = self.layout.store.local("steps") is None
        if not remote or time.monotonic() - self._looked > REMOTE_EVERY_S:
            self._looked = time.monotonic()
            self._markers = {step: marker for step in STEPS if (marker := self._marker(step)) is not None}
        return self._markers

    def _marker(self, step: str) -> Marker | None:
        marker = read_marker(self.layout, step)
        # A marker of an earlier execution says nothing about this one, unless its work is being repeated.
        return marker if marker and (marker.started >= self.started or marker.status == "done") else None

    def _read_events(self) -> None:
        if not self.layout.events.exists():
            return
        with open(self.layout.events, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self.steps.append(event)
        elif kind in ("queue", "evaluation", "warm_start"):
            self.state[kind] = event
        elif kind == "span" and event["kind"] == "generate":
            self.tokens.append((event["end"], event["tokens"]))
        elif kind == "restart":
            self.note(f"restarted {event['restarted']}: {event['sentence']}")

    def _loop_line(self, markers: dict[str, Marker]) -> str:
        running = {step for step, marker in markers.items() if marker.status == "running"}
        if self.steps and "rl_loop" in running:
            return "  ".join(f"{name} {value}" for name, value in self._numbers())
        if "warm_start" in self.state and "warm_start" in running:
            look = self.state["warm_start"]
            return f"warm_start step {look['step']}  exact match {look['exact_match']:.3f} of {look['target']:.2f}"
        return ""

    def _numbers(self) -> list[tuple[str, str]]:
        """The loop's numbers, as they are shown."""
        recent = self.steps[-WINDOW:]
        last, total = recent[-1]["step"], self.config.train.steps
        reward = sum(event["metrics"]["rollout/raw_reward"] for event in recent) / len(recent)
        staleness = sum(event["metrics"]["async/staleness_mean"] for event in recent) / len(recent)
        wait = sum(event["metrics"]["perf/train_wait_time"] for event in recent)
        busy = sum(event["metrics"]["perf/step_time"] for event in recent)
        numbers = [("step", f"{last}/{total}"), ("reward", f"{reward:.3f}")]
        if look := self.state.get("evaluation"):
            numbers.append(("exact match", f"{look['exact_match']:.3f} (version {look['version']})"))
        numbers += [("staleness", f"{staleness:.2f}"), ("train waits", f"{wait / max(busy, 1e-9):.0%}")]
        if queue := self.state.get("queue"):
            numbers.append(
                ("queue", f"{queue['running']} running, {queue['generated']} to score, {queue['scored']} ready")
            )
        window = [item for item in self.tokens if item[0] > time.time() - 10]
        if len(window) > 1:
            rate = sum(count for _, count in window[1:]) / max(window[-1][0] - window[0][0], 1e-9)
            numbers.append(("rollout", f"{rate:,.0f} tokens/s"))
        if len(recent) > 1:
            pace = (recent[-1]["time"] - recent[0]["time"]) / (len(recent) - 1)
            numbers.append(("left", _clock(pace * (total - last))))
        return numbers

    def _render(self, markers: dict[str, Marker]) -> Group:
        steps = Table.grid(padding=(0, 2))
        for step, marker in markers.items():
            style = {"running": "bold cyan", "done": "green", "failed": "bold red"}[marker.status]
            sign = {"running": "▸", "done": "✓", "failed": "✗"}[marker.status]
            taken = (marker.ended or time.time()) - marker.started
            steps.add_row(Text(f"{sign} {step}", style), Text(_clock(taken), "dim"), Text(marker.sentence, "red"))
        parts: list[Any] = [Text(f"{self.config.name}   {_clock(time.time() - self.started)}", "bold"), steps]
        if self.steps:
            last, total = self.steps[-1]["step"], self.config.train.steps
            numbers = Table.grid(padding=(0, 3))
            cells = self._numbers()
            for row in range(0, len(cells), 2):
                numbers.add_row(
                    *(part for name, value in cells[row : row + 2] for part in (Text(name, "dim"), Text(value)))
                )
            parts += [ProgressBar(total=total, completed=last, width=60), numbers]
        elif line := self._loop_line(markers):
            parts.append(Text(line))
        return Group(*parts)


def _marker_line(step: str, marker: Marker) -> str:
    if marker.status == "done":
        return f"{step}: done in {marker.ended - marker.started:.1f} s"
    return f"{step}: failed: {marker.sentence}" if marker.status == "failed" else f"{step}: started"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02d}"
