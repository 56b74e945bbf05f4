"""A role of the loop as a process: its signals, its events, its exit code.

A role is started as `python3 -m components.<role>.main --config FILE --redis URL --worker NAME`. SIGTERM and SIGINT ask
it to leave: it ends what it is at, hands its work back and exits with 75. It dies with the process that started it, so
that a killed loop leaves nothing behind.
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
from pathlib import Path
from typing import Any, NoReturn

from configs.failure import DEFECT, Failure, ToldToLeave
from configs.run import RunConfig

PR_SET_PDEATHSIG = 1
PARENT = "TANDEM_PARENT"
"""Variable with the process id of the loop that starts a role."""


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends (Linux); for use between fork and exec, or at start."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)


class Role:
    """What a role's code is given.

    Attributes:
        name: Kind of role: rollout, reward, train or broadcast.
        worker: Unique name of this process, such as `rollout-0`.
        config: The run's configuration.
        experience: The run's groups.
        leaving: Whether a signal asked the role to leave.
    """

    def __init__(self, name: str, worker: str, config: RunConfig, redis_url: str) -> None:
        from components.experience.experience import Experience
        from components.storage.layout import RunLayout

        self.name = name
        self.worker = worker
        self.config = config
        self.layout = RunLayout(config)
        self.experience = Experience(redis_url, config)
        self.leaving = False
        self._parent = int(os.environ.get(PARENT, os.getppid()))
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, self._leave)

    def _leave(self, number: int, frame: Any) -> None:
        self.leaving = True

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
        """Raise ToldToLeave once a signal asked for it, or the parent is gone."""
        if self.leaving or os.getppid() != self._parent:
            raise ToldToLeave(f"{self.worker} was told to leave; its work was handed back")


def run_role(name: str, body: Callable[[Role], None]) -> NoReturn:
    """Entry point of a role's process: run `body`, exit with the project's exit codes.

    The last line on standard error is the failure's sentence; the loop repeats it to the user.
    """
    die_with_parent()
    parser = argparse.ArgumentParser(prog=f"components.{name}.main")
    parser.add_argument("--config", type=Path, required=True, help="the run's configuration as JSON")
    parser.add_argument("--redis", required=True, help="address of the experience streams")
    parser.add_argument("--worker", default=f"{name}-0", help="unique name of this process")
    arguments = parser.parse_args()
    try:
        config = RunConfig.from_json(arguments.config.read_text(), str(arguments.config))
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
            raise ToldToLeave(f"{arguments.worker}: the loop that started it is gone")
        body(Role(name, arguments.worker, config, arguments.redis))
    except Failure as failure:
        print(failure.sentence, file=sys.stderr, flush=True)
        sys.exit(failure.exit_code)
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(DEFECT)
    sys.exit(0)
