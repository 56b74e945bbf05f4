"""The loop's roles as processes of this machine: started, watched, restarted when they die."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
import psutil

from components.experience.redis_server import RedisServer
from components.role import PARENT, Inputs, die_with_parent, start_policy
from components.storage.layout import RunLayout
from configs.failure import BAD_CONFIG, BAD_DATA, BadConfig, ServiceGone, failure_of
from configs.run import RunConfig

STOP_LIMIT_S = 30.0
"""Seconds a role has to hand back its work after SIGTERM; training writes a checkpoint in that time."""


class Process(msgspec.Struct):
    """A role's process."""

    role: str
    worker: str
    child: subprocess.Popen[bytes]
    restarts: int = 0


class RoleProcesses:
    """The roles of one run on this machine, with the Redis they share.

    Attributes:
        redis_url: Address of Redis, once `open` has returned.
    """

    def __init__(self, config: RunConfig, layout: RunLayout, data: str, checkpoint: str) -> None:
        self.config = config
        self.layout = layout
        self.redis_url = config.loop.redis_url
        self.processes: list[Process] = []
        self._data, self._checkpoint = data, checkpoint
        self._config_file = layout.scratch / "config.json"
        self._redis: RedisServer | None = None
        self._lock: IO[str] | None = None

    def open(self, each: Callable[[], None]) -> None:
        """Claim the run, fetch its start policy, have a Redis.

        Args:
            each: Called while waiting; raises to end the wait.

        Raises:
            Failure: another loop of the run is alive, or Redis does not start.
        """
        self.layout.logs.mkdir(parents=True, exist_ok=True)
        self._claim(each)
        start_policy(self.layout, self._checkpoint)
        if not self.redis_url:
            redis = self._redis = RedisServer(
                self.layout.redis, self.config.loop.redis_port, self.layout.logs / "redis.log"
            )
            self.redis_url = redis.url
            started = psutil.Process(redis.process.pid).create_time()
            (self.layout.scratch / "redis_url").write_text(f"{redis.url} {redis.process.pid} {started}")

    def start(self) -> None:
        """Start every role."""
        self._config_file.write_text(self.config.to_json())
        workers = [("train", "train"), ("broadcast", "broadcast"), ("reward", "reward")]
        workers += [("rollout", f"rollout-{number}") for number in range(self.config.rollout.workers)]
        for role, worker in workers:
            self.processes.append(Process(role, worker, self._start(role, worker)))
        self._record()

    def check(self) -> list[dict[str, object]]:
        """Look at every process once; returns the restarts made, as events.

        Raises:
            Failure: a role ended in a way that a restart cannot mend, or too often.
        """
        if self._redis is not None and self._redis.process.poll() is not None:
            raise ServiceGone(f"redis-server ended: {self._redis.last_words()}; resume the run, nothing is lost")
        restarts = []
        for process in self.processes:
            code = process.child.poll()
            if code is None or (process.role == "train" and code == 0):
                continue
            sentence = self.last_words(process.worker)
            if code in (BAD_CONFIG, BAD_DATA):
                raise failure_of(code, f"{process.worker}: {sentence}")
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            if process.restarts >= self.config.loop.max_restarts:
                raise failure_of(
                    max(code, 0),
                    f"{process.worker} {how} once more after {process.restarts} restarts; its last words: {sentence}",
                )
            process.restarts += 1
            time.sleep(min(0.2 * 2**process.restarts, 5.0))
            process.child = self._start(process.role, process.worker)
            restarts.append(
                {"restarted": process.worker, "exit_code": code, "sentence": f"{process.worker} {how}: {sentence}"}
            )
        if restarts:
            self._record()
        return restarts

    def waiting(self) -> bool:
        """Processes start at once."""
        return False

    def finished(self) -> bool:
        """Whether training has made its last step durable."""
        return any(process.role == "train" and process.child.poll() == 0 for process in self.processes)

    def stop(self) -> None:
        """Ask every role to leave, training first; kill what does not in time."""
        order = sorted(self.processes, key=lambda process: process.role != "train")
        for process in order:
            if process.child.poll() is None:
                process.child.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_LIMIT_S
        for process in order:
            try:
                process.child.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.child.kill()
                process.child.wait()

    def cancel(self) -> None:
        """Nothing is done ahead of `stop`: the roles die with this process."""

    def remove(self, finished: bool) -> None:
        """End Redis, whose data stays in the append-only file, and give up the claim."""
        if self._redis is not None:
            self._redis.stop()
        if self._lock is not None:
            self._lock.close()

    def _claim(self, each: Callable[[], None]) -> None:
        """Wait until an earlier loop of this run, told to stop a moment ago, is gone."""
        self._lock = open(self.layout.scratch / "loop.lock", "w")
        end = time.monotonic() + 2 * STOP_LIMIT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                each()
                if time.monotonic() > end:
                    raise BadConfig(f"another loop of run {self.config.name} is alive; stop it, then resume") from None
                time.sleep(0.2)

    def _start(self, role: str, worker: str) -> subprocess.Popen[bytes]:
        inputs = Inputs(self.redis_url, self._data, self._checkpoint)
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        environment = {**os.environ, "OMP_NUM_THREADS": threads, PARENT: str(os.getpid())}
        with open(self._log(worker, "log"), "ab") as out, open(self._log(worker, "err"), "ab") as err:
            return subprocess.Popen(
                [sys.executable, "-m", f"components.{role}.main", "--config", str(self._config_file),
                 "--worker", worker, *inputs.arguments()],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def _log(self, worker: str, kind: str) -> Path:
        return self.layout.logs / f"{worker}.{kind}"

    def last_words(self, worker: str) -> str:
        """The last line a role left on standard error."""
        file = self._log(worker, "err")
        lines = (
            [line for line in file.read_text(errors="replace").splitlines() if line.strip()] if file.exists() else []
        )
        return lines[-1] if lines else f"it left none; see {self._log(worker, 'log')}"

    def _record(self) -> None:
        """Leave the processes' ids for the exit handler."""
        rows = []
        for process in self.processes:
            try:
                started = psutil.Process(process.child.pid).create_time()
            except psutil.NoSuchProcess:
                continue
            rows.append({"role": process.worker, "pid": process.child.pid, "started": started})
        (self.layout.scratch / "roles.json").write_text(json.dumps(rows))
