"""Owns the asynchronous loop: has Redis and the roles run, watches progress, and leaves a durable, audited result."""

from __future__ import annotations

import signal
import time
from typing import Any, Protocol

import msgspec

from components.experience.audit import Audit, audit
from components.experience.connection import wait_until_loaded
from components.experience.experience import Experience
from components.report.page import build_report
from components.rl_loop.journal import Journal
from components.rl_loop.processes import RoleProcesses
from components.rl_loop.progress import ProgressWatch
from components.step import Step, run_step
from components.tracking.run import Tracker, tracking_uri
from components.train.catalogue import latest_checkpoint
from configs.failure import Failure, ToldToLeave

TICK_S = 0.1
BEAT_S = 10.0
"""Seconds a heartbeat lasts; one is sent every second."""
REDIS_READY_S = 60.0
TELL_S = 15.0
"""Seconds between lines that tell how far training is."""


class Roles(Protocol):
    """The roles of a run, as processes or as pods."""

    redis_url: str

    def open(self, each: Any) -> None:
        """Claim the run and have a Redis on the way; `each` is called while waiting, and raises to end it."""

    def start(self) -> None:
        """Have the roles run."""

    def check(self) -> list[dict[str, object]]:
        """Restarts since the last look, as events; raises for what a restart cannot mend."""
        ...

    def waiting(self) -> bool:
        """Whether a role waits for something to run on."""
        ...

    def finished(self) -> bool:
        """Whether training has made its last step durable."""
        ...

    def last_words(self, worker: str) -> str:
        """The last line a worker wrote."""
        ...

    def cancel(self) -> None:
        """First act at a signal; must be safe in its handler."""

    def stop(self) -> None:
        """Let the roles hand back their work and leave, while Redis stays."""

    def remove(self, finished: bool) -> None:
        """End the rest."""


def roles_of(step: Step) -> Roles:
    """The roles as the configuration wants them."""
    config, given = step.config, step.parameters
    if config.loop.roles == "processes":
        return RoleProcesses(config, step.layout, given["data"], given["checkpoint"])
    from components.rl_loop.cluster import LoopCluster
    from components.rl_loop.kubernetes import CANCEL_S, LoopPods, redis_url
    from components.role import Inputs

    inputs = Inputs(redis_url(config), given["data"], given["checkpoint"])
    # The second connection is for the signal handler, which may interrupt a request on the first.
    return LoopPods(config, step.layout, inputs, given["tracking_run"], LoopCluster(), LoopCluster(CANCEL_S))


class Loop:
    """One execution of the loop."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.config = step.config
        self.layout = step.layout
        self.leaving = False
        self.finished = False
        self.layout.scratch.mkdir(parents=True, exist_ok=True)
        self.roles = roles_of(step)
        self.journal: Journal | None = None
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, self._leave)

    def open(self) -> None:
        """Claim the run, reach its Redis, take up its journal."""
        self.roles.open(self.check_leaving)
        self.experience = Experience(self.roles.redis_url, self.config)
        self._wait_for_redis()
        self.experience.open()
        tracker = Tracker(tracking_uri(self.config), self.step.parameters["tracking_run"])
        self.journal = Journal(self.layout, self.experience, tracker)

    def _leave(self, number: int, frame: Any) -> None:
        self.leaving = True
        self.roles.cancel()

    def check_leaving(self) -> None:
        """Raise ToldToLeave once a signal asked for it."""
        if self.leaving:
            raise ToldToLeave(
                f"the run was told to stop; `tandem run --resume {self.config.name}` (on a cluster `tandem retry"
                f" {self.config.name}`) goes on from its last checkpoint"
            )

    def _wait_for_redis(self) -> None:
        """A Redis of this machine answers in a minute or never; one in a pod as long as its pod may take to start."""
        if self.layout.scratch_is_shared:
            wait_until_loaded(self.experience, REDIS_READY_S, self.check_leaving)
        else:
            wait_until_loaded(self.experience, self.config.kubernetes.ready_s, self._look)

    def _look(self) -> None:
        self.check_leaving()
        self.roles.check()

    def run(self) -> Audit:
        """Run to the last durable update.

        Raises:
            Failure: a role failed for good, nothing moved, or a signal asked to leave; what is durable stays so.
        """
        assert self.journal is not None
        started = time.time()
        self.journal.write("started", version=0)
        self.roles.start()
        try:
            self._watch(self.journal)
        except Failure as failure:
            self.journal.write("failure", exit_code=failure.exit_code, sentence=failure.sentence)
            raise
        finally:
            self._stop()
        self.journal.collect()
        self.experience.close()
        self._queue(self.journal)
        self.journal.write("ended", version=self.journal.version, seconds=time.time() - started)
        self.finished = True
        return audit(self.experience, self.layout)

    def _stop(self) -> None:
        """Let the roles leave; a failure of that is noted and hides no other."""
        try:
            self.roles.stop()
        except Failure as failure:
            print(f"note: the roles were not stopped: {failure.sentence}", flush=True)

    def _watch(self, journal: Journal) -> None:
        watch = ProgressWatch(self.config, self.experience, self.roles.last_words)
        looked = told = 0.0
        while not self.roles.finished():
            self.check_leaving()
            for restart in self.roles.check():
                journal.write("restart", **restart)
                print(f"restarted: {restart['sentence']}", flush=True)
            journal.collect()
            if time.monotonic() - looked >= 1.0:
                looked = time.monotonic()
                self.experience.beat(BEAT_S)
                watch.note(self._queue(journal), self.roles.waiting())
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                print(f"version {journal.version} of {self.config.train.steps}", flush=True)
            time.sleep(TICK_S)

    def _queue(self, journal: Journal) -> tuple[int, ...]:
        """Write where the groups stand; returns what counts as progress."""
        counters, stages = self.experience.counters(), self.experience.stages()
        counts = {name: counters.get(name, 0) for name in ("issued", "durable", "dropped")}
        journal.write("queue", version=journal.version, **counts, **stages)
        moved = (counters.get(name, 0) for name in ("generated", "scored", "trained", "durable"))
        return (*moved, journal.version)

    def close(self) -> None:
        """End what the loop started, the journal first."""
        try:
            if self.journal is not None:
                self.journal.close()
        except Failure as failure:
            print(f"note: the last events were not collected: {failure.sentence}", flush=True)
        finally:
            self.roles.remove(self.finished)


def rl_loop(step: Step) -> None:
    """Run the loop, audit it, and name the final checkpoint."""
    loop = Loop(step)
    try:
        loop.open()
        result = loop.run()
        step.store.write("audit.json", msgspec.json.encode(result))
    except Failure:
        # What a cancel takes away on its way is no failure of its own.
        loop.check_leaving()
        raise
    finally:
        loop.close()
    assert loop.journal is not None
    figures = loop.journal.figures
    if not result.balanced:
        raise Failure(f"the run's groups do not balance: {result.findings[0]}; see `tandem audit {step.config.name}`")
    name = latest_checkpoint(step.layout)
    step.finish(
        parameters={"policy": f"{step.layout.uri}/checkpoints/{name}"},
        metrics={
            "groups_issued": float(result.groups_issued),
            "groups_durable": float(result.groups_durable),
            "groups_dropped": float(result.groups_dropped),
            **figures.metrics(result.durable_updates),
        },
    )
    step.write_artifact("report", build_report(step.layout, "rl_loop"))


if __name__ == "__main__":
    run_step("rl_loop", rl_loop)
