"""An SGLang server that this process starts: its port, its log, its last words, and its end.

It listens on the loopback interface only and asks a random key of every caller, since its admin endpoints can replace
its weights. It dies with this process by the kernel's doing, and SGLang's own processes die with it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil

from components.experience.redis_server import free_port
from components.role import die_with_parent
from components.rollout.sglang_client import SGLangClient
from components.rollout.sglang_flags import Launch
from configs.failure import BadConfig, ServiceGone
from configs.sglang import SGLangConfig

LOOPBACK = "127.0.0.1"
PYTHON = "TANDEM_SGLANG_PYTHON"
"""Variable with the Python interpreter of SGLang's environment."""
PORTS = 3
"""Ports that are tried when another process takes the chosen one meanwhile."""
STOP_S = 10.0
"""Seconds a server has to end by itself."""
LOOK_S = 0.25
PAUSE_S = 1.0
"""Seconds before the first restart; doubled for each that follows."""
LONGEST_PAUSE_S = 60.0
DYING_S = 3.0
"""Seconds in which SGLang's processes end after one of them failed."""
LONGEST_WORDS = 300
"""Characters of a line of the log that are quoted."""
TAIL_BYTES = 200_000
PORT_TAKEN = re.compile(r"address already in use|port at \d+ is not available|port \d+ is in use", re.IGNORECASE)
# An exception's last line in a traceback; SGLang puts a timestamp before some.
EXCEPTION = re.compile(r"^(?:\[[^]]*\] )?((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*)$")
# What follows from a failure elsewhere.
CONSEQUENCES = ("KeyboardInterrupt", "SystemExit", "EOFError", "BrokenPipeError", "ConnectionResetError", "asyncio.")
KILL_WORDS = re.compile(r"^.*(?:out of memory|Killed|No module named|error: .*)$", re.IGNORECASE)


def find_python(config: SGLangConfig) -> str:
    """Interpreter of the environment that holds SGLang.

    Raises:
        BadConfig: what is named does not exist.
    """
    named = config.python or os.environ.get(PYTHON, "")
    source = "sglang.python" if config.python else PYTHON
    if named:
        if not Path(named).is_file():
            raise BadConfig(f"{source} is {named}, which does not exist; name a Python interpreter that has SGLang")
        return named
    beside = Path(".venv-sglang/bin/python")
    return str(beside.absolute()) if beside.exists() else sys.executable


class SGLangServer:
    """A server process.

    Attributes:
        url: Its address (`http://127.0.0.1:<port>`), once started.
        key: Bearer token that it asks of every caller.
        log: File with what it printed, over all its starts.
    """

    def __init__(self, config: SGLangConfig, launch: Launch, python: str, log: Path) -> None:
        self.url = ""
        self.key = secrets.token_hex(24)
        self.log = log
        self._launch = launch
        self._python = python
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._from = 0
        self._starts = 0

    @property
    def alive(self) -> bool:
        """Whether its main process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of its main process; 0 before the first start."""
        return self._process.pid if self._process else 0

    async def connect(self) -> SGLangClient:
        """Start it; again and with growing pauses if it fails or was started before.

        Raises:
            ServiceGone: it has been started as often as `sglang.max_restarts` allows.
        """
        most = self._config.max_restarts + 1
        failure = ServiceGone(f"the SGLang server was started {most} times and failed every time; see {self.log}")
        while self._starts < most:
            await self.stop(at_once=True)
            if self._starts:
                await asyncio.sleep(min(PAUSE_S * 2 ** (self._starts - 1), LONGEST_PAUSE_S))
            self._starts += 1
            try:
                await self._start(self._config.ready_s)
                return SGLangClient(self.url, self.key)
            except ServiceGone as gone:
                failure = gone
        raise failure

    def settled(self) -> None:
        """It works: from here on failures are counted anew."""
        self._starts = 1

    async def explain(self, reason: str) -> str:
        """`reason`, or the server's last words where it died of it; a server that broke needs a moment to end."""
        end = time.monotonic() + DYING_S
        while self.alive and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return reason if self.alive else f"the SGLang server died: {self.last_words()}; see {self.log}"

    async def _start(self, limit_s: float) -> None:
        """Start it and wait until it answers.

        Raises:
            ServiceGone: it ended, or did not get ready within `limit_s` seconds; the sentence holds its last words.
        """
        end = time.monotonic() + limit_s
        for attempt in range(PORTS):
            self._spawn(free_port())
            if await self._ready(end):
                return
            if not PORT_TAKEN.search(self._text()) or attempt == PORTS - 1:
                break
            await self.stop(at_once=True)
        code = self._process.poll() if self._process else None
        what = f"did not get ready within {limit_s:g} s" if code is None else f"ended with exit code {code} at start"
        reason = self.last_words()
        await self.stop(at_once=True)
        mend = "; `make sglang-env` makes its environment" if "No module named" in reason else ""
        raise ServiceGone(f"the SGLang server {what}: {reason}{mend}; see {self.log}")

    def _spawn(self, port: int) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.url = f"http://{LOOPBACK}:{port}"
        # Keys in a file, since every user of the machine may read a command line.
        secret = self.log.with_suffix(".keys.yaml")
        secret.unlink(missing_ok=True)
        with os.fdopen(os.open(secret, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(f"api-key: {self.key}\nadmin-api-key: {self.key}\n")
        # SGLang writes its arguments into its log, the keys with them.
        with os.fdopen(os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "ab") as log:
            self._from = log.tell()
            self._process = subprocess.Popen(
                [self._python, "-m", "sglang.launch_server", "--config", str(secret.absolute()), "--host", LOOPBACK,
                 "--port", str(port), *self._launch.arguments],
                env=_environment() | self._launch.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
                # SIGKILL: told to stop, SGLang would first wait for requests that nobody reads any more.
                preexec_fn=functools.partial(die_with_parent, signal.SIGKILL),
            )  # fmt: skip

    async def _ready(self, end: float) -> bool:
        headers = {"Authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(2), headers=headers) as client:
            # SGLang goes on running when it cannot have its port.
            while self.alive and time.monotonic() < end and not PORT_TAKEN.search(self._text()):
                try:
                    async with client.get("/health") as reply:
                        # Whoever else answers at this port does not know the key.
                        if reply.status == 200 and self.alive and await self._is_ours(client):
                            self.log.with_suffix(".keys.yaml").unlink(missing_ok=True)
                            return True
                except (aiohttp.ClientError, TimeoutError, OSError, psutil.Error):
                    pass
                await asyncio.sleep(LOOK_S)
        return False

    async def _is_ours(self, client: aiohttp.ClientSession) -> bool:
        async with client.get("/model_info") as reply:
            if reply.status != 200:
                return False
        ports = {c.laddr.port for c in psutil.Process(self.pid).net_connections("tcp") if c.status == "LISTEN"}
        return int(self.url.rpartition(":")[2]) in ports

    async def stop(self, at_once: bool = False) -> None:
        """End it and everything it started; `at_once` when it may hang."""
        process = self._process
        if process is None:
            return
        family = _family(process.pid)
        if process.poll() is None and not at_once:
            process.terminate()
            end = time.monotonic() + STOP_S
            while process.poll() is None and time.monotonic() < end:
                await asyncio.sleep(0.05)
        for member in family:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                pass
        if process.poll() is None:
            process.kill()
        await asyncio.to_thread(process.wait)
        self._process = None
        self.log.with_suffix(".keys.yaml").unlink(missing_ok=True)

    def last_words(self) -> str:
        """Why it failed, as far as its log says: the first cause of the last traceback, else its last lines."""
        lines = [line.rstrip() for line in self._text().splitlines() if line.strip()]
        starts = [number for number, line in enumerate(lines) if "hit an exception" in line]
        tail = lines[starts[-1] :] if starts else lines
        causes = [found[1] for line in tail if (found := EXCEPTION.match(line))]
        causes = [cause for cause in causes if not cause.startswith(CONSEQUENCES)]
        if not causes:
            causes = [line for line in lines if KILL_WORDS.match(line)][-1:]
        if causes:
            return causes[0] if starts else causes[-1]
        return " | ".join(line[:LONGEST_WORDS] for line in lines[-3:]) or "it left no log"

    def _text(self) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._from, size - TAIL_BYTES))
            # SGLang logs its arguments, and what is quoted of the log goes into sentences.
            return file.read().decode(errors="replace").replace(self.key, "(key)")


def _environment() -> dict[str, str]:
    """What a server inherits: it may keep its compiled modules, without which a start takes three times as long."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "REDIS_PASSWORD")
    return {key: value for key, value in os.environ.items() if key not in left_out}


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
