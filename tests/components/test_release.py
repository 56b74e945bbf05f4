"""release: ends what outlived the loop, closes the record as the steps went, and never fails over what is gone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import pytest

from components.release.main import outcome
from components.step import Marker
from components.storage.layout import RunLayout
from components.tracking.client import open_client
from components.tracking.run import open_run
from components.tracking.server import Server
from tests.components.execution import Execution, config_in, execute
from tests.tracking.mlflow_server import mlflow_server  # noqa: F401 - a fixture

PLAIN = "import time; print('on', flush=True); time.sleep(300)"
NOW = time.time()


def release(folder: Path, uri: str = "http://127.0.0.1:9") -> Execution:
    env = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    return execute("release", config_in(folder), {"job": "1"}, folder / "out", env=env)


def leave_marker(
    folder: Path,
    step: str,
    status: Literal["running", "done", "failed"],
    started: float = NOW,
    code: int = 0,
    **parameters: str,
) -> None:
    marker = Marker(step=step, status=status, pid=1, host="h", started=started, exit_code=code, parameters=parameters)
    steps = folder / "tested" / "steps"
    steps.mkdir(parents=True, exist_ok=True)
    (steps / f"{step}.json").write_bytes(msgspec.json.encode(marker))


@pytest.fixture
def role() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PLAIN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    yield process
    process.kill()
    process.wait()


def record(folder: Path, pid: int, started: float) -> Path:
    file = folder / "scratch" / "tested" / "roles.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([{"role": "rollout-0", "pid": pid, "started": started}]))
    return file


def test_a_role_that_outlived_its_loop_is_ended(role: subprocess.Popen[str], tmp_path: Path) -> None:
    file = record(tmp_path, role.pid, psutil.Process(role.pid).create_time())
    done = release(tmp_path)
    assert done.code == 0, done.sentence
    assert "ended rollout-0" in done.out
    assert role.wait(10) == -15
    assert not file.exists()


def test_another_process_with_the_same_id_is_left_alone(role: subprocess.Popen[str], tmp_path: Path) -> None:
    record(tmp_path, role.pid, psutil.Process(role.pid).create_time() - 60)
    done = release(tmp_path)
    assert done.code == 0 and "ended" not in done.out
    assert role.poll() is None


def test_roles_that_are_gone_are_no_failure(role: subprocess.Popen[str], tmp_path: Path) -> None:
    started = psutil.Process(role.pid).create_time()
    role.kill()
    role.wait()
    record(tmp_path, role.pid, started)
    assert release(tmp_path).code == 0
    record(tmp_path, role.pid, started).write_text('[{"role":')
    assert release(tmp_path / "again").code == 0


def test_a_run_that_never_started_is_no_failure(tmp_path: Path) -> None:
    assert release(tmp_path).code == 0


def test_a_tracking_server_that_is_gone_is_no_failure(tmp_path: Path) -> None:
    leave_marker(tmp_path, "preflight", "done", tracking_run="r")
    done = release(tmp_path)
    assert done.code == 0 and "the record stays open" in done.out


@pytest.mark.parametrize(
    ("markers", "status"),
    [
        ({"rl_loop": ("done", 1.0, 0), "evaluate": ("done", 2.0, 0)}, "FINISHED"),
        # A resumed run repeats the outputs of steps that an earlier execution finished.
        ({"rl_loop": ("done", -9.0, 0), "evaluate": ("done", -8.0, 0)}, "FINISHED"),
        ({"rl_loop": ("failed", 1.0, 70)}, "FAILED"),
        ({"rl_loop": ("failed", 1.0, 75)}, "KILLED"),
        ({"rl_loop": ("running", 1.0, 0)}, "FAILED"),
        ({"rl_loop": ("failed", 1.0, 69), "evaluate": ("failed", -9.0, 75)}, "FAILED"),
        ({}, "FAILED"),
    ],
)
def test_the_outcome_follows_the_markers(
    markers: dict[str, tuple[Literal["done", "failed", "running"], float, int]], status: str, tmp_path: Path
) -> None:
    leave_marker(tmp_path, "preflight", "done", tracking_run="r")
    for step, (state, after, code) in markers.items():
        leave_marker(tmp_path, step, state, NOW + after, code)
    assert outcome(RunLayout(config_in(tmp_path)), NOW) == status


def test_the_record_is_closed(
    mlflow_server: Server,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.uri)
    run_id = open_run(config_in(tmp_path))
    leave_marker(tmp_path, "preflight", "done", tracking_run=run_id)
    leave_marker(tmp_path, "rl_loop", "failed", NOW + 1, 75)
    done = release(tmp_path, mlflow_server.uri)
    assert done.code == 0, done.sentence
    assert open_client(mlflow_server.uri).get_run(run_id).info.status == "KILLED"
