"""Owns the asynchronous loop: starts Redis and the roles, watches progress, and leaves a durable, audited result."""

from __future__ import annotations

import fcntl
import signal
import time
from typing import IO, Any

import msgspec
import psutil

from components.experience.audit import Audit, audit
from components.experience.experience import Experience, wait_until_loaded
from components.experience.redis_server import RedisServer
from components.report.page import build_report
from components.rl_loop.journal import Journal
from components.rl_loop.supervisor import STOP_LIMIT_S, Supervisor
from components.step import Step, run_step
from components.storage.store import open_store, split_uri
from components.tracking.run import Tracker, tracking_uri
from components.train.catalogue import latest_checkpoint
from configs.failure import BadConfig, Failure, ServiceGone, ToldToLeave

TICK_S = 0.1


class Loop:
    """One execution of the loop on this machine."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.config = step.config
        self.layout = step.layout
        self.leaving = False
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, self._leave)
        self._lock = self._claim()
        self._prepare()
        self.redis = None
        url = self.config.loop.redis_url
        if not url:
            self.redis = RedisServer(self.layout.redis, self.config.loop.redis_port, self.layout.logs / "redis.log")
            url = self.redis.url
            started = psutil.Process(self.redis.process.pid).create_time()
            (self.layout.scratch / "redis_url").write_text(f"{url} {self.redis.process.pid} {started}")
        self.url = url
        self.experience = Experience(url, self.config)
        wait_until_loaded(self.experience, 60.0)
        self.experience.open()
        self.journal = Journal(
            self.layout, self.experience, Tracker(tracking_uri(self.config), step.parameters["tracking_run"])
        )

    def _leave(self, number: int, frame: Any) -> None:
        self.leaving = True

    def _claim(self) -> IO[str]:
        """Wait until an earlier loop of this run, told to stop a moment ago, is gone.

        Raises:
            BadConfig: it is still there after the time that stopping may take.
        """
        self.layout.scratch.mkdir(parents=True, exist_ok=True)
        lock = open(self.layout.scratch / "loop.lock", "w")
        end = time.monotonic() + 2 * STOP_LIMIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > end or self.leaving:
                    raise BadConfig(f"another loop of run {self.config.name} is alive; stop it, then resume") from None
                time.sleep(0.2)

    def _prepare(self) -> None:
        """Bring the start policy to the scratch folder, where every role of this machine reads it."""
        scratch = self.layout.scratch
        self.layout.logs.mkdir(parents=True, exist_ok=True)
        (scratch / "data_uri").write_text(self.step.parameters["data"])
        start = scratch / "start"
        if not (start / "config.json").exists():
            parent, key = split_uri(self.step.parameters["checkpoint"])
            store = open_store(parent, self.config.storage)
            # A checkpoint from elsewhere carries no digests; adopt_checkpoint has looked at it.
            store.download(key, start, verify=store.exists(f"{key}/_digests.json"))

    def run(self) -> Audit:
        """Run to the last durable update.

        Raises:
            Failure: a role failed for good, nothing moved, or a signal asked to leave; what is durable stays so.
        """
        started = time.time()
        self.journal.write("started", version=0)
        supervisor = Supervisor(self.config, self.layout, self.experience, self.url)
        try:
            self._watch(supervisor)
        except Failure as failure:
            self.journal.write("failure", exit_code=failure.exit_code, sentence=failure.sentence)
            raise
        finally:
            supervisor.stop()
        self.journal.collect()
        self.experience.close()
        self._queue()
        self.journal.write("ended", version=self.journal.version, seconds=time.time() - started)
        return audit(self.experience, self.layout)

    def _watch(self, supervisor: Supervisor) -> None:
        looked = 0.0
        while not supervisor.finished():
            if self.leaving:
                raise ToldToLeave(
                    f"the run was told to stop; `tandem run --resume {self.config.name}` goes on from its last checkpoint"
                )
            if self.redis is not None and self.redis.process.poll() is not None:
                raise ServiceGone(f"redis-server ended: {self.redis.last_words()}; resume the run, nothing is lost")
            for restart in supervisor.check():
                self.journal.write("restart", **restart)
            self.journal.collect()
            if time.monotonic() - looked >= 1.0:
                looked = time.monotonic()
                supervisor.watch(self._queue())
            time.sleep(TICK_S)

    def _queue(self) -> tuple[int, ...]:
        """Write where the groups stand; returns what counts as progress."""
        counters, stages = self.experience.counters(), self.experience.stages()
        counts = {name: counters.get(name, 0) for name in ("issued", "durable", "dropped")}
        self.journal.write("queue", version=self.journal.version, **counts, **stages)
        moved = (counters.get(name, 0) for name in ("generated", "scored", "trained", "durable"))
        return (*moved, self.journal.version)

    def close(self) -> None:
        """End what the loop started, the journal first."""
        try:
            self.journal.close()
        except ServiceGone as error:
            print(f"note: the last events were not collected: {error.sentence}", flush=True)
        if self.redis is not None:
            self.redis.stop()
        self._lock.close()


def rl_loop(step: Step) -> None:
    """Run the loop, audit it, and name the final checkpoint."""
    loop = Loop(step)
    try:
        result = loop.run()
        step.store.write("audit.json", msgspec.json.encode(result))
    finally:
        loop.close()
    if not result.balanced:
        raise Failure(f"the run's groups do not balance: {result.findings[0]}; see `tandem audit {step.config.name}`")
    name = latest_checkpoint(step.layout)
    step.finish(
        parameters={"policy": f"{step.layout.uri}/checkpoints/{name}"},
        metrics={
            "groups_issued": float(result.groups_issued),
            "groups_durable": float(result.groups_durable),
            "groups_dropped": float(result.groups_dropped),
            **loop.journal.figures.metrics(result.durable_updates),
        },
    )
    step.write_artifact("report", build_report(step.layout, "rl_loop"))


if __name__ == "__main__":
    run_step("rl_loop", rl_loop)
