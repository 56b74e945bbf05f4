"""A role of the loop as a process: its signals, its events, its exit code.

A role is started as `python3 -m components.<role>.main --config FILE --redis URL --worker NAME --data URI --checkpoint
URI`. SIGTERM and SIGINT ask it to leave: it ends what it is at, hands its work back and exits with 75. It ends with the
loop that started it, so that a killed loop leaves nothing behind: a process dies with its parent, a pod when the
loop's heartbeat in Redis has been away too long.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from configs.failure import DEFECT, Failure, ToldToLeave
from configs.run import RunConfig

if TYPE_CHECKING:
    from components.storage.layout import RunLayout

PR_SET_PDEATHSIG = 1
PARENT = "TANDEM_PARENT"
"""Variable with the process id of the loop that starts a role."""
LOOK_S = 2.0
"""Seconds between a pod's looks at the loop's heartbeat."""


class Orphaned(ToldToLeave):
    """The loop that owns this role is gone for good."""


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends (Linux); for use between fork and exec, or at start."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)


class Inputs(NamedTuple):
    """What every role of a loop is started with, beside the configuration."""

    redis_url: str
    """Address of the experience streams."""
    data: str
    """URI of the staged data's manifest."""
    checkpoint: str
    """URI of the policy the run starts from."""

    def arguments(self) -> list[str]:
        """As a role's command line takes them."""
        return ["--redis", self.redis_url, "--data", self.data, "--checkpoint", self.checkpoint]


class Role:
    """What a role's code is given.

    Attributes:
        name: Kind of role: rollout, reward, train or broadcast.
        worker: Unique name of this process, such as `rollout-0`.
        config: The run's configuration.
        experience: The run's groups.
        data: URI of the staged data's manifest.
        checkpoint: URI of the policy the run starts from.
        leaving: Whether a signal asked the role to leave.
    """

    def __init__(self, name: str, worker: str, config: RunConfig, inputs: Inputs) -> None:
        from components.experience.experience import Experience
        from components.storage.layout import RunLayout

        self.name = name
        self.worker = worker
        self.config = config
        self.layout = RunLayout(config)
        self.experience = Experience(inputs.redis_url, config)
        self.data = inputs.data
        self.checkpoint = inputs.checkpoint
        self.leaving = False
        self._heard = self._looked = time.monotonic()
        self._parent = int(os.environ.get(PARENT, os.getppid()))
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, self._leave)

    def _leave(self, number: int, frame: Any) -> None:
        self.leaving = True
        self.experience.hurry()

    @cached_property
    def start(self) -> Path:
        """Folder of the policy the run starts from, fetched once a machine."""
        return start_policy(self.layout, self.checkpoint)

    def emit(self, event: str, version: int | None = None, **fields: Any) -> None:
        """Send an event to the loop, and write it to this process's log; `cpu_s` is what this process has used so far."""
        common = {"time": time.time(), "run": self.config.name, "role": self.worker, "event": event, "version": version}
        line = json.dumps(common | {"cpu_s": round(time.process_time(), 3)} | fields)
        with contextlib.suppress(OSError):  # a full disk must not cost the event, which goes to the loop anyway
            print(line, flush=True)
        self.experience.emit([line.encode()])

    @contextmanager
    def span(self, kind: str, version: int | None = None, **fields: Any) -> Iterator[dict[str, Any]]:
        """Time a piece of work; fields put into the yielded dict are sent along."""
        start = time.time()
        yield fields
        self.emit("span", version, kind=kind, start=start, end=time.time(), **fields)

    def pause(self, seconds: float) -> None:
        """Sleep, unless asked to leave."""
        if not self.leaving:
            time.sleep(seconds)

    def check_leaving(self) -> None:
        """Raise ToldToLeave once a signal asked for it, or Orphaned when the loop is gone."""
        if self.leaving or os.getppid() != self._parent:
            raise ToldToLeave(f"{self.worker} was told to leave; its work was handed back")
        if not self.layout.scratch_is_shared:
            self._listen()

    def wait_for_redis(self) -> None:
        """Pods start in any order, so Redis may come after them.

        Raises:
            ServiceGone: it did not come in the time a pod may take to start.
        """
        from components.experience.connection import wait_until_loaded

        wait_until_loaded(self.experience, self.config.kubernetes.ready_s, self._stay)
        self.experience.open()

    def _stay(self) -> None:
        if self.leaving:
            raise ToldToLeave(f"{self.worker} was told to leave before Redis answered")

    def _listen(self) -> None:
        now, limit = time.monotonic(), self.config.kubernetes.orphan_s
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if self.experience.heartbeat():
            self._heard = now
        elif now - self._heard > limit:
            raise Orphaned(f"{self.worker}: no sign of rl_loop for {limit:.0f} s, so its work was handed back")


def start_policy(layout: RunLayout, checkpoint: str) -> Path:
    """Folder of a run's start policy in the scratch folder, fetched if it is not there."""
    from components.storage.store import open_store, split_uri

    start = layout.scratch / "start"
    if not (start / "config.json").exists():
        layout.scratch.mkdir(parents=True, exist_ok=True)
        parent, key = split_uri(checkpoint)
        store = open_store(parent, layout.config.storage)
        # A checkpoint from elsewhere carries no digests; adopt_checkpoint has looked at it.
        store.download(key, start, verify=store.exists(f"{key}/_digests.json"))
    return start


def run_role(name: str, body: Callable[[Role], None]) -> NoReturn:
    """Entry point of a role's process: run `body`, exit with the project's exit codes.

    The last line on standard error is the failure's sentence; the loop repeats it to the user.
    """

    def started() -> None:
        arguments = role_arguments(name)
        config = RunConfig.from_json(arguments.config.read_text(), str(arguments.config))
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
            raise ToldToLeave(f"{arguments.worker}: the loop that started it is gone")
        role = Role(name, arguments.worker, config, Inputs(arguments.redis, arguments.data, arguments.checkpoint))
        if not role.layout.scratch_is_shared:
            role.wait_for_redis()
        body(role)

    die_with_parent()
    ended_by(started)


def role_arguments(name: str) -> argparse.Namespace:
    """What the command line of a role's process says."""
    parser = argparse.ArgumentParser(prog=f"components.{name}.main")
    parser.add_argument("--config", type=Path, required=True, help="the run's configuration as JSON")
    parser.add_argument("--redis", required=True, help="address of the experience streams")
    parser.add_argument("--worker", default=f"{name}-0", help="unique name of this process")
    parser.add_argument("--data", required=True, help="URI of the staged data's manifest")
    parser.add_argument("--checkpoint", required=True, help="URI of the policy the run starts from")
    return parser.parse_args()


def ended_by(body: Callable[[], None]) -> NoReturn:
    """Run `body`, then exit with 0, or with the code of its failure, whose sentence is then the last line on standard
    error."""
    try:
        body()
    except Failure as failure:
        print(failure.sentence, file=sys.stderr, flush=True)
        sys.exit(failure.exit_code)
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(DEFECT)
    sys.exit(0)
