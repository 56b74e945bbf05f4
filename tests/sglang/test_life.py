"""A server that this worker starts: what becomes of it when it fails, and when the worker does."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from components.broadcast.session import Session
from components.rollout import sglang_server
from components.rollout.engine import Collective, EngineBroken, Pull, State
from components.rollout.sglang_engine import SGLangEngine
from components.rollout.sglang_server import SGLangServer
from configs.failure import ServiceGone
from tests.rollout.contract import LONG, Running, Subject, spans_cover
from tests.rollout.contract_policy import Version

OPEN_S = 600.0
REQUEST_S = 12.0


@pytest.fixture(scope="module")
def life(make_engine: Callable[..., SGLangEngine], versions: list[Version]) -> Iterator[Subject]:
    """A server of these tests' own, first started on a port that is taken by then."""
    taken = socket.create_server(("127.0.0.1", 0))
    ports = iter([taken.getsockname()[1]])
    free = sglang_server.free_port
    engine = make_engine({"weights": {"transfer": "collective", "transfer_timeout_s": 3}}, request_s=REQUEST_S)
    subject = Subject(engine, versions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_server, "free_port", lambda: next(ports, None) or free())
        subject.run(engine.open(), OPEN_S)
    taken.close()
    yield subject
    subject.stop()


@pytest.fixture(autouse=True)
def serving(life: Subject) -> None:
    """Version 1, going; after a failure, as a worker brings it back."""

    async def ready() -> None:
        if (await life.engine.health()).state == State.BROKEN:
            with pytest.raises(EngineBroken):
                await life.engine.resume()
            await life.engine.open()
            assert (await life.engine.health()).state == State.PAUSED
        await life.reset()

    life.run(ready(), OPEN_S)


def server(life: Subject) -> SGLangServer:
    assert isinstance(life.engine, SGLangEngine) and isinstance(life.engine._server, SGLangServer)
    return life.engine._server


def scheduler(life: Subject) -> psutil.Process:
    """The process that computes."""
    family = psutil.Process(server(life).pid).children(recursive=True)
    return next(one for one in family if "scheduler" in one.name() or "scheduler" in " ".join(one.cmdline()))


async def broken(life: Subject, harm: Callable[[], None]) -> tuple[Running, str]:
    """A group in generation whose server comes to harm, and what is said of it."""
    running = Running(life, life.request(LONG))
    await running.begun()
    harm()
    with pytest.raises(EngineBroken) as failure:
        await asyncio.wait_for(running.task, 60)
    assert (await life.engine.health()).state == State.BROKEN
    assert all(0 < len(one.tokens) < LONG and spans_cover(one) for one in running.seen[-1])
    return running, failure.value.sentence


def test_a_port_that_is_taken_meanwhile_is_given_up(life: Subject) -> None:
    log = server(life).log.read_text(errors="replace")
    assert "address already in use" in log
    assert life.run(life.engine.health()).state == State.READY


def test_it_listens_on_loopback_only_and_keeps_its_keys(life: Subject) -> None:
    process = psutil.Process(server(life).pid)
    addresses = {one.laddr.ip for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    assert addresses == {"127.0.0.1"}
    assert server(life).key not in " ".join(process.cmdline())
    assert stat.S_IMODE(server(life).log.stat().st_mode) == 0o600
    # It has read its keys by now.
    assert not server(life).log.with_suffix(".keys.yaml").exists()


def test_a_scheduler_that_dies_is_told_and_the_server_comes_back(life: Subject) -> None:
    _, sentence = life.run(broken(life, lambda: scheduler(life).kill()))
    assert "died" in sentence or "connection" in sentence


def test_a_server_that_hangs_is_told_and_the_server_comes_back(life: Subject) -> None:
    start = time.monotonic()
    _, sentence = life.run(broken(life, lambda: scheduler(life).suspend()))
    assert f"no token for {REQUEST_S:g} s" in sentence
    assert time.monotonic() - start > REQUEST_S


def test_a_transfer_without_a_sender_is_told_and_the_server_comes_back(life: Subject) -> None:
    async def story() -> None:
        tensor = ("model.norm.weight", "float32", [64])
        session = Session("nobody", "127.0.0.1", sglang_server.free_port(), "gloo", {"rollout-0": 1}, 1 << 20)
        await life.engine.pause("in_place")
        await life.engine.load(life.second.target, Collective(session, [tensor]), "in_place")

    with pytest.raises(EngineBroken, match="version 2 was not loaded"):
        life.run(story())


def test_it_comes_back_proven_to_hold_what_it_is_given(life: Subject) -> None:
    async def story() -> tuple[str, list[int]]:
        await life.engine.pause("abort")
        await life.engine.load(life.second.target, Pull(life.second.folder), "abort")
        held = await life.engine.held()
        await life.engine.resume()
        return held.label, [len(one.tokens) for one in await life.generate(life.request(5))]

    assert life.run(story()) == (life.second.target.label, [5, 5])


def test_a_server_that_cannot_start_says_why(make_engine: Callable[..., SGLangEngine]) -> None:
    engine = make_engine(extra_arguments=("--no-such-argument",), max_restarts=1)
    with pytest.raises(ServiceGone, match="unrecognized arguments: --no-such-argument"):
        asyncio.run(engine.open())
    assert server_log(engine).count("unrecognized arguments") == 2


def server_log(engine: SGLangEngine) -> str:
    assert isinstance(engine._server, SGLangServer)
    return engine._server.log.read_text()


def test_nothing_outlives_a_worker_that_is_killed(versions: list[Version], tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.sglang.orphan", str(versions[0].folder), str(log)],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    main = psutil.Process(pid)
    family = [main, *main.children(recursive=True)]
    assert len(family) >= 3
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    gone, alive = psutil.wait_procs(family, timeout=15)
    alive = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    for one in alive:
        one.kill()
    assert not alive
