"""Programs that outlive the command that started them: started apart, found again by their pid and start time."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time

import psutil

from configs.failure import ServiceGone
from tests.cluster import layout

STOP_LIMIT_S = 10
LAST_WORDS = 1500


@dataclasses.dataclass(frozen=True)
class Program:
    """A component: its name, which is also its log's, its command line and what its environment adds to ours."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def running(self) -> psutil.Process | None:
        """Its process, or None."""
        return running(self.name)

    def start(self) -> None:
        """Start it unless it runs; its log is written anew."""
        if self.running():
            return
        log = layout.log(self.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        record = {"pid": process.pid, "started": psutil.Process(process.pid).create_time()}
        (layout.SOCKETS / f"{self.name}.json").write_text(json.dumps(record))

    def check(self) -> None:
        """Raise ServiceGone with its last words if it has ended."""
        if not self.running():
            words = layout.log(self.name).read_text(errors="replace")[-LAST_WORDS:]
            raise ServiceGone(f"{self.name} has ended; the end of {layout.log(self.name)}: {words}")


def running(name: str) -> psutil.Process | None:
    """The process that was started under this name, or None when it has ended."""
    try:
        record = json.loads((layout.SOCKETS / f"{name}.json").read_text())
        process = psutil.Process(record["pid"])
        alive = process.create_time() == record["started"] and process.status() != psutil.STATUS_ZOMBIE
        return process if alive else None
    except (OSError, ValueError, KeyError, psutil.Error):
        return None


def stop(*names: str, limit_s: float = STOP_LIMIT_S) -> None:
    """End processes together; kill what is still there after the limit."""
    processes = [process for name in names if (process := running(name))]
    for process in processes:
        process.terminate()
    for process in _left(processes, limit_s):
        process.kill()
    _left(processes, STOP_LIMIT_S)
    for name in names:
        (layout.SOCKETS / f"{name}.json").unlink(missing_ok=True)


def stop_shims() -> None:
    """End the containers' guardians that containerd leaves behind; they run in sessions of their own."""
    shims = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words and words[0].endswith("containerd-shim-runc-v2") and str(layout.CONTAINERD_SOCKET) in words:
            shims.append(process)
            process.kill()
    _left(shims, STOP_LIMIT_S)


def _left(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Wait for processes to end; those that have not. An ended one may stay a zombie until init sees to it."""
    limit = time.monotonic() + limit_s
    while True:
        left = [process for process in processes if not _ended(process)]
        if not left or time.monotonic() > limit:
            return left
        time.sleep(0.02)


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
