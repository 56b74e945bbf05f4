"""What every target tells and does: executions, their steps, schedules, and the protocol they are reached by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

from configs.failure import Failure, ToldToLeave, failure_of

if TYPE_CHECKING:
    from pipelines.submission import Submission

State = Literal["pending", "running", "succeeded", "failed", "canceled"]
ENDED: tuple[State, ...] = ("succeeded", "failed", "canceled")


@dataclass(frozen=True)
class StepState:
    """One step of an execution."""

    name: str
    state: State
    started: datetime | None = None
    ended: datetime | None = None
    words: str = ""
    """Why it waits or failed, in the cluster's words, or its last line."""
    lasting: bool = False
    """Whether waiting mends nothing."""
    role: bool = False
    """Whether it is a pod of the loop and no step of the pipeline."""


@dataclass(frozen=True)
class ExecutionState:
    """One execution as the cluster sees it."""

    name: str
    run: str
    state: State
    created: datetime
    started: datetime | None = None
    ended: datetime | None = None
    digest: str = ""
    config: str = ""
    """The configuration it was given, as JSON."""
    steps: tuple[StepState, ...] = ()
    sentence: str = ""
    """Why it failed, in one sentence."""
    exit_code: int = 0
    """Exit code of the step that failed."""
    schedule: str = ""
    link: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ENDED

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        times = {key: value.isoformat() if value else None for key, value in self._times().items()}
        steps = [
            {
                "name": step.name,
                "state": step.state,
                "words": step.words,
                "started": _iso(step.started),
                "ended": _iso(step.ended),
            }
            for step in self.steps
        ]
        return {
            "name": self.name, "run": self.run, "state": self.state, **times, "steps": steps, "sentence": self.sentence,
            "exit_code": self.exit_code, "schedule": self.schedule, "link": self.link,
        }  # fmt: skip

    def _times(self) -> dict[str, datetime | None]:
        return {"created": self.created, "started": self.started, "ended": self.ended}

    def failure(self) -> Failure | None:
        """The failure this execution ended with, or None."""
        if self.state == "failed":
            return failure_of(
                self.exit_code, self.sentence or f"execution {self.name} failed; see `tandem logs {self.name}`"
            )
        if self.state == "canceled":
            return ToldToLeave(f"execution {self.name} was canceled; `tandem retry {self.run}` goes on with the run")
        return None


@dataclass(frozen=True)
class Schedule:
    """A pipeline started by the clock."""

    name: str
    cron: str
    timezone: str
    enabled: bool
    last: datetime | None = None
    executions: tuple[str, ...] = ()
    words: str = ""
    """Why its controller starts nothing, in its own words."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "name": self.name, "cron": self.cron, "timezone": self.timezone, "enabled": self.enabled,
            "last": _iso(self.last), "executions": list(self.executions), "words": self.words,
        }  # fmt: skip


class Target(Protocol):
    """Where pipelines run on a cluster. Every method tells what stands in its way in one sentence (a Failure)."""

    name: str

    def check(self, submission: Submission) -> list[str]:
        """Look for everything a run needs; returns notes on what could not be looked at."""
        ...

    def submit(self, submission: Submission) -> ExecutionState:
        """Start the run, or find the execution that has its name and configuration."""
        ...

    def schedule(self, submission: Submission, cron: str, timezone: str) -> Schedule:
        """Start a run of this configuration at every time of `cron`; the same name again replaces the schedule."""
        ...

    def schedules(self) -> list[Schedule]:
        """The schedules there are."""
        ...

    def unschedule(self, name: str) -> None:
        """Remove a schedule; what it started goes on."""
        ...

    def executions(self) -> list[ExecutionState]:
        """All executions, the newest first, without their steps."""
        ...

    def status(self, name: str) -> ExecutionState:
        """One execution with its steps; a run's name means its newest execution."""
        ...

    def logs(self, name: str, part: str, follow: bool) -> Iterator[str]:
        """Lines of the steps and role pods of an execution; `part` names one step or role, empty all."""
        ...

    def cancel(self, name: str, now: bool) -> ExecutionState:
        """End an execution and everything its run has on the cluster."""
        ...

    def retry(self, name: str) -> ExecutionState:
        """Go on with a run that failed or was canceled: finished steps repeat their outputs."""
        ...


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None
