"""Starts the loop's roles as processes, watches them, restarts what died, and says who stopped when nothing moves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

from components.experience.experience import Experience
from components.role import PARENT, die_with_parent
from components.storage.layout import RunLayout
from configs.failure import BAD_CONFIG, BAD_DATA, ServiceGone, failure_of
from configs.run import RunConfig

STOP_LIMIT_S = 30.0
"""Seconds a role has to hand back its work after SIGTERM; training writes a checkpoint in that time."""


class Process(msgspec.Struct):
    """A role's process."""

    role: str
    worker: str
    child: subprocess.Popen[bytes]
    restarts: int = 0


class Supervisor:
    """The roles of one run on this machine."""

    def __init__(self, config: RunConfig, layout: RunLayout, experience: Experience, redis_url: str) -> None:
        self.config = config
        self.layout = layout
        self.experience = experience
        self.redis_url = redis_url
        self.config_file = layout.scratch / "config.json"
        self.config_file.write_text(config.to_json())
        layout.logs.mkdir(parents=True, exist_ok=True)
        self._take_back_everything()
        workers = [("train", "train"), ("broadcast", "broadcast"), ("reward", "reward")]
        workers += [("rollout", f"rollout-{number}") for number in range(config.rollout.workers)]
        self.processes = [Process(role, worker, self._start(role, worker)) for role, worker in workers]
        self._progress: tuple[int, ...] = ()
        self._moved = time.monotonic()
        self._record()

    def check(self) -> list[dict[str, object]]:
        """Look at every process once; returns the restarts made, as events.

        Raises:
            Failure: a role ended in a way that a restart cannot mend, or too often.
        """
        restarts = []
        for process in self.processes:
            code = process.child.poll()
            if code is None or (process.role == "train" and code == 0):
                continue
            sentence = self._last_words(process.worker)
            if code in (BAD_CONFIG, BAD_DATA):
                raise failure_of(code, f"{process.worker}: {sentence}")
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            if process.restarts >= self.config.loop.max_restarts:
                raise failure_of(
                    max(code, 0),
                    f"{process.worker} {how} once more after {process.restarts} restarts; its last words: {sentence}",
                )
            self._take_back(process)
            process.restarts += 1
            time.sleep(min(0.2 * 2**process.restarts, 5.0))
            process.child = self._start(process.role, process.worker)
            restarts.append(
                {"restarted": process.worker, "exit_code": code, "sentence": f"{process.worker} {how}: {sentence}"}
            )
        if restarts:
            self._record()
        return restarts

    def finished(self) -> bool:
        """Whether training has made its last step durable."""
        return any(process.role == "train" and process.child.poll() == 0 for process in self.processes)

    def watch(self, progress: tuple[int, ...]) -> None:
        """Note the run's progress (counts of groups and the version).

        Raises:
            ServiceGone: nothing has moved for `loop.no_progress_s` seconds; names the role that stopped.
        """
        if progress != self._progress:
            self._progress, self._moved = progress, time.monotonic()
        elif time.monotonic() - self._moved > self.config.loop.no_progress_s:
            role, why = self._stopped()
            raise ServiceGone(
                f"no progress for {self.config.loop.no_progress_s:.0f} s: {role} stopped ({why}); its last words:"
                f" {self._last_words(role)}"
            )

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

    def _start(self, role: str, worker: str) -> subprocess.Popen[bytes]:
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        environment = {**os.environ, "OMP_NUM_THREADS": threads, PARENT: str(os.getpid())}
        with open(self._log(worker, "log"), "ab") as out, open(self._log(worker, "err"), "ab") as err:
            return subprocess.Popen(
                [sys.executable, "-m", f"components.{role}.main", "--config", str(self.config_file),
                 "--redis", self.redis_url, "--worker", worker],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def _log(self, worker: str, kind: str) -> Path:
        return self.layout.logs / f"{worker}.{kind}"

    def _last_words(self, worker: str) -> str:
        file = self._log(worker, "err")
        lines = (
            [line for line in file.read_text(errors="replace").splitlines() if line.strip()] if file.exists() else []
        )
        return lines[-1] if lines else f"it left none; see {self._log(worker, 'log')}"

    def _take_back_everything(self) -> None:
        """Free what the processes of an earlier execution held: they are gone, and their groups come first now."""
        for number in range(self.config.rollout.workers):
            self.experience.hand_back(f"rollout-{number}")
        self.experience.release_samples("reward")

    def _take_back(self, process: Process) -> None:
        """Free what a dead process held, so that nobody waits for its lease to lapse."""
        if process.role == "rollout":
            self.experience.hand_back(process.worker)
        elif process.role == "reward":
            self.experience.release_samples(process.worker)

    def _stopped(self) -> tuple[str, str]:
        """Which role holds the run up, from where the groups stand."""
        stages, announced, target = self.experience.stages(), self.experience.announced(), self.experience.target()
        if announced is None:
            return "train", "it published no version"
        if target != announced:
            return "broadcast", f"version {announced.version} was published but not offered to the engines"
        taken = self.experience.counters().get("trained", 0) // self.config.train.batch_groups
        if taken > announced.version:
            return "train", f"it has the groups of version {announced.version + 1} and did not make it"
        if stages["scored"] >= self.config.train.batch_groups:
            return "train", f"{stages['scored']} scored groups wait for it"
        if stages["generated"]:
            return "reward", f"{stages['generated']} generated groups wait for it"
        if not self.experience.counters():
            return "rollout-0", "it has not leased a group yet: it starts, loads or evaluates"
        return self.experience.holder() or "rollout-0", f"{stages['running']} groups are leased and none was handed in"

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
