"""The step as KFP starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.stage_data.split import read_manifest, read_split
from configs.failure import BAD_CONFIG, BAD_DATA
from configs.run import RunConfig


def config(folder: Path, **sections: Any) -> RunConfig:
    storage = {"root": str(folder / "runs"), "scratch": str(folder / "scratch")} | sections.pop("storage", {})
    return RunConfig.model_validate({"name": "one", "storage": storage, **sections})


def start(run: RunConfig, folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    output = folder / "executor_output.json"
    output.unlink(missing_ok=True)
    executor_input = {
        "inputs": {"parameterValues": {"config": run.to_json(), "tracking_run": "none"}},
        "outputs": {
            "parameters": {"data": {"outputFile": str(folder / "data")}},
            "artifacts": {
                "metrics": {"artifacts": [{"name": "metrics", "uri": str(folder / "metrics"), "metadata": {}}]}
            },
            "outputFile": str(output),
        },
    }
    done = subprocess.run(
        [sys.executable, "-m", "components.stage_data.main", json.dumps(executor_input)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    return done, json.loads(output.read_text()) if output.exists() else {}


def refusal(run: RunConfig, folder: Path, code: int) -> str:
    done, output = start(run, folder)
    assert done.returncode == code, done.stderr
    assert output == {}
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def dataset(folder: Path, *rows: tuple[str, str]) -> str:
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))
    return str(path)


@pytest.mark.parametrize("backend", ["file", "s3"])
def test_example_is_staged(request: pytest.FixtureRequest, tmp_path: Path, backend: str) -> None:
    storage = {"root": request.getfixturevalue("s3_uri")} if backend == "s3" else {}
    run = config(tmp_path, storage=storage)
    done, output = start(run, tmp_path)
    assert done.returncode == 0, done.stderr
    uri = output["parameterValues"]["data"]
    assert uri.endswith("/one/data/manifest.json")
    manifest = read_manifest(uri, run.storage)
    assert manifest["train_rows"] + manifest["eval_rows"] == 10_000
    assert len(read_split(uri, "eval", run.storage)) == manifest["eval_rows"]
    metrics = output["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    assert metrics["train_rows"] == manifest["train_rows"]
    assert metrics["duplicates"] == 0


def test_bad_data_ends_with_one_sentence(tmp_path: Path) -> None:
    run = config(tmp_path, data={"uri": dataset(tmp_path, ("1+1=", "2"), (" ", "2"))})
    assert "line 2: field 'prompt' is empty" in refusal(run, tmp_path, BAD_DATA)
    assert not (tmp_path / "runs/one/data").exists()


def test_unknown_example_ends_with_one_sentence(tmp_path: Path) -> None:
    assert "no such example task" in refusal(config(tmp_path, data={"uri": "example:add9"}), tmp_path, BAD_CONFIG)
