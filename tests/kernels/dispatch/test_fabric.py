"""The emulated fabric: real namespaces, bytes counted at their wires, nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.failure import BadConfig
from kernels.fabric import INTERFACE, EmulatedFabric

root = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces, for which it must be root")

SERVE = """
import socket
with socket.create_server(("0.0.0.0", 4000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    while peer.recv(1 << 16):
        pass
"""
SEND = """
import pathlib, socket, sys
counter = pathlib.Path("/sys/class/net") / sys.argv[2] / "statistics/tx_bytes"
before = int(counter.read_text())
with socket.create_connection((sys.argv[1], 4000), timeout=10) as peer:
    peer.sendall(bytes(int(sys.argv[3])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
print(int(counter.read_text()) - before)
"""


def _left(pid: int) -> list[str]:
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    spaces = [path.name for path in Path("/run/netns").iterdir()] if Path("/run/netns").is_dir() else []
    return [name for name in links + spaces if name.startswith(f"td{pid}")]


@root
def test_bytes_between_nodes_are_counted_at_the_wire() -> None:
    size = 1 << 20
    with EmulatedFabric(2, 400) as fabric:
        assert _left(os.getpid())
        server = subprocess.Popen([*fabric.command(1), sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "listening\n"
        send = [*fabric.command(0), sys.executable, "-c", SEND, fabric.address(1), INTERFACE, str(size)]
        sent = int(subprocess.run(send, capture_output=True, text=True, timeout=30, check=True).stdout)
        server.wait(10)
    # Headers add a few per cent.
    assert size < sent < 1.1 * size
    assert not _left(os.getpid())


@root
def test_nothing_is_left_when_the_work_fails() -> None:
    with pytest.raises(RuntimeError), EmulatedFabric(3, 400):
        raise RuntimeError
    assert not _left(os.getpid())


@root
def test_nothing_is_left_when_it_cannot_be_made() -> None:
    with pytest.raises(BadConfig, match="failed"), EmulatedFabric(2, 0):
        raise AssertionError
    assert not _left(os.getpid())


def test_another_user_is_told_to_be_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BadConfig, match="must be root"), EmulatedFabric(2, 400):
        raise AssertionError
