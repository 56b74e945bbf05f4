"""Watches an execution until it ends: a live table in a terminal, one line a change elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

from rich.console import Console
from rich.live import Live
from rich.table import Table

from configs.failure import BadConfig, ServiceGone
from pipelines.targets.target import ExecutionState, StepState, Target

POLL_S = 2.0
GONE_S = 120.0
"""Seconds the server may fail to answer before the watch ends; the execution goes on without it."""
PICKUP_S = 60.0
"""Seconds after which an execution that nobody has started is remarked upon."""
LASTING_S = 20.0
"""Seconds a pod may be in a trouble that waiting does not mend, such as an image that is not there."""


class Watch:
    """Shows the states of one execution as they come."""

    def __init__(self, target: Target, quiet: bool = False, console: Console | None = None) -> None:
        """Watch through `target`; `quiet` shows nothing."""
        self.target = target
        self.console = console or Console(file=sys.stdout, highlight=False, quiet=quiet)
        self.live = Live(console=self.console, refresh_per_second=4) if self.console.is_terminal and not quiet else None
        self._told: dict[str, tuple[str, str]] = {}
        self._lasting: dict[str, float] = {}
        self._warned = False

    def follow(self, name: str) -> ExecutionState:
        """Show an execution until it ends.

        Raises:
            BadConfig: a pod cannot start, and waiting mends nothing.
            ServiceGone: the server has not answered for two minutes.
        """
        last = time.monotonic()
        if self.live:
            self.live.start()
        try:
            while True:
                try:
                    state = self.target.status(name)
                    last = time.monotonic()
                    self.show(state)
                    if state.over:
                        return state
                    self._refuse_lasting(state)
                except ServiceGone as gone:
                    if time.monotonic() - last > GONE_S:
                        raise ServiceGone(f"{gone.sentence}; execution {name} goes on without this command") from None
                time.sleep(POLL_S)
        finally:
            if self.live:
                self.live.stop()

    def show(self, state: ExecutionState) -> None:
        """Show one state."""
        if self.live:
            self.live.update(table(state))
        else:
            for step in state.steps:
                seen = (step.state, step.words)
                if self._told.get(step.name) != seen:
                    self._told[step.name] = seen
                    self._note(_line(step))
        waited = (datetime.now(UTC) - state.created).total_seconds()
        if state.state == "pending" and not state.steps and waited > PICKUP_S and not self._warned:
            self._warned = True
            self._note(
                f"nobody has started {state.name} for {PICKUP_S:.0f} s: check that the workflow controller runs and watches"
                " this namespace"
            )

    def _note(self, text: str) -> None:
        (self.live.console if self.live else self.console).print(text, soft_wrap=True, markup=False)

    def _refuse_lasting(self, state: ExecutionState) -> None:
        stuck = {step.name: step for step in state.steps if step.lasting and step.state == "pending"}
        now = time.monotonic()
        self._lasting = {name: self._lasting.get(name, now) for name in stuck}
        for name, since in self._lasting.items():
            # A pod of the loop is rl_loop's to judge; it ends the run with its own sentence.
            if now - since > LASTING_S and not stuck[name].role:
                raise BadConfig(
                    f"{name}: {stuck[name].words}; mend it and submit anew, after `tandem cancel {state.name}`"
                )


def lines(state: ExecutionState) -> list[str]:
    """The steps of an execution, one line each."""
    told = [state.sentence] if state.sentence else []
    return [f"{state.name}: {state.state}", *(f"  {_line(step)}" for step in state.steps), *told]


def table(state: ExecutionState) -> Table:
    """The steps of an execution."""
    shown = Table(title=f"{state.name}: {state.state}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("step", "state", "time"):
        shown.add_column(column, no_wrap=True)
    shown.add_column("")
    for step in state.steps:
        shown.add_row(step.name, step.state, duration(step.started, step.ended), step.words)
    return shown


def duration(started: datetime | None, ended: datetime | None) -> str:
    """Time taken so far, as `1m05s`; empty for what has not started."""
    if started is None:
        return ""
    seconds = int(((ended or datetime.now(UTC)) - started).total_seconds())
    minutes, seconds = divmod(max(seconds, 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def _line(step: StepState) -> str:
    took = f" ({duration(step.started, step.ended)})" if step.ended else ""
    return f"{step.name:<20} {step.state}{took}" + (f"  {step.words}" if step.words else "")
