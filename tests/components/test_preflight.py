"""preflight: a run that can work gets a record and a manifest; one that cannot gets one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from components.preflight.main import preflight
from components.step import Step
from components.tracking.client import open_client
from components.tracking.server import Server
from configs.failure import Failure
from configs.run import RunConfig
from tests.components.execution import Execution, config_in, execute, executor_input
from tests.tracking.mlflow_server import mlflow_server  # noqa: F401 - a fixture


def check(config: RunConfig, folder: Path, checkpoint: str = "", uri: str = "") -> Execution:
    return execute(
        "preflight",
        config,
        {"checkpoint": checkpoint, "job": "1"},
        folder / "out",
        outputs=("tracking_run",),
        artifacts=("manifest",),
        env={"MLFLOW_TRACKING_URI": uri or "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"},
    )


def test_a_good_machine_gets_a_record_and_a_manifest(mlflow_server: Server, tmp_path: Path) -> None:  # noqa: F811
    config = config_in(tmp_path)
    done = check(config, tmp_path, uri=mlflow_server.uri)
    assert done.code == 0, done.sentence
    stored = (tmp_path / "tested" / "manifest.json").read_bytes()
    assert (done.folder / "manifest").read_bytes() == stored
    manifest = json.loads(stored)
    assert manifest["stack"]["name"] == "cpu" and manifest["images"]["train"]
    assert RunConfig.from_json((tmp_path / "tested" / "config.json").read_text()) == config
    run = open_client(mlflow_server.uri).get_run(done.parameters["tracking_run"])
    assert run.info.status == "RUNNING"
    assert run.data.params["train.steps"] == "300" and run.data.tags["stack"] == "cpu"
    assert not [name for name in os.listdir(tmp_path / "tested") if "probe" in name]


CASES: dict[str, tuple[dict[str, Any], str, int, str]] = {
    "unknown stack": (
        {"stack": "gpu"},
        "",
        64,
        "stack 'gpu' is unknown; choose one of cpu, deepep-efa, slime-baseline",
    ),
    "unknown hardware": (
        {"hardware": "h100"},
        "",
        64,
        "hardware 'h100' is unknown; choose one of laptop, p5, p5en, p6-b200",
    ),
    "clash": ({"stack": "deepep-efa", "hardware": "p5"}, "", 64, "gin efa-gda does not work on p5.48xlarge"),
    "too large for the disk": (
        {"model": {"hidden_size": 2**17, "moe_intermediate_size": 2**17, "num_experts": 1024}},
        "",
        64,
        "GB are free, but the run may need",
    ),
    "no such checkpoint": ({}, "/nowhere/model", 64, "/nowhere/model: holds no config.json"),
    "checkpoint in one place only": (
        {"model": {"checkpoint": "/nowhere/model"}},
        "",
        64,
        "parameter checkpoint is empty",
    ),
    "unknown scheme": ({}, "ftp://host/model", 64, "scheme 'ftp' is not known"),
    "redis address": ({"loop": {"redis_url": "host:6379"}}, "", 64, "loop.redis_url: "),
    "redis gone": (
        {"loop": {"redis_url": "redis://127.0.0.1:9/0"}},
        "",
        69,
        "Redis at redis://127.0.0.1:9/0 does not answer",
    ),
    "tracking server gone": ({}, "", 69, "the tracking server at http://127.0.0.1:9 does not answer"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_told_in_one_sentence(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sections, checkpoint, code, words = CASES[case]
    parameters = {"checkpoint": checkpoint, "job": "1"}
    given = executor_input(config_in(tmp_path, **sections), parameters, tmp_path, artifacts=("manifest",))
    with pytest.raises(Failure) as caught:
        preflight(Step("preflight", given))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == code


def test_a_store_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = check(config_in(tmp_path, storage={"root": str(tmp_path / "file")}), tmp_path)
    assert done.code == 64 and str(tmp_path / "file") in done.sentence and "\n" not in done.sentence
