import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from components.tracking.server import Server, start_server
from configs.failure import BadConfig, ServiceGone

ROOT = Path(__file__).resolve().parents[2]


def test_the_server_is_one_process_on_the_loopback_interface(mlflow_server: Server) -> None:
    process = psutil.Process(mlflow_server.process.pid)
    assert process.children(recursive=True) == []
    listening = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_the_server_answers_its_own_address_and_refuses_a_foreign_host(mlflow_server: Server) -> None:
    url = f"{mlflow_server.uri}/api/2.0/mlflow/experiments/search"
    own = {"Origin": mlflow_server.uri}
    assert httpx.post(url, json={"max_results": 1}, headers=own, trust_env=False).status_code == 200
    foreign = httpx.post(url, json={"max_results": 1}, headers={"Host": "evil.example"}, trust_env=False)
    assert foreign.status_code == 403


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadConfig, match=f"tracking.port {port} is in use"):
            start_server(tmp_path / "mlflow", port)
    assert not (tmp_path / "mlflow").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig, match="cannot keep its database there"):
        start_server(tmp_path / "file" / "mlflow")


def test_a_server_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is no database, but it is long enough to be read as a header" * 20)
    server = start_server(tmp_path)
    with pytest.raises(ServiceGone, match="before it was ready.*not a database"):
        server.wait_ready(60)
    server.stop()


def test_a_server_that_is_not_ready_in_time(tmp_path: Path) -> None:
    server = start_server(tmp_path)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServiceGone, match="did not answer .* within 0.2 s"):
            server.wait_ready(0.2)
    finally:
        server.process.kill()
        server.stop()


def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal, pathlib; from components.tracking.server import start_server;"
        "server = start_server(pathlib.Path(sys.argv[1]));"
        "print(server.process.pid, flush=True); sys.stdin.read(1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    parent = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin and parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    parent.communicate(b"x")
    end = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
