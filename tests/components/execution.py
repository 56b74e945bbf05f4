"""A step started as KFP starts it: one process, the executor input as its argument."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from configs.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]


class Execution(NamedTuple):
    """What a step left."""

    code: int
    out: str
    sentence: str
    parameters: dict[str, str]
    folder: Path


def execute(
    step: str,
    config: RunConfig,
    parameters: dict[str, str],
    folder: Path,
    outputs: tuple[str, ...] = (),
    artifacts: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Execution:
    """Run a step; `folder` takes its output files."""
    given = executor_input(config, parameters, folder, outputs, artifacts)
    done = subprocess.run(
        [sys.executable, "-m", f"components.{step}.main", json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
    )
    written = folder / "executor_output.json"
    values = json.loads(written.read_text())["parameterValues"] if written.exists() else {}
    return Execution(done.returncode, done.stdout, done.stderr.strip(), values, folder)


def executor_input(
    config: RunConfig,
    parameters: dict[str, str],
    folder: Path,
    outputs: tuple[str, ...] = (),
    artifacts: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What KFP tells a step, as `Step` takes it."""
    return {
        "inputs": {"parameterValues": {"config": config.to_json(), **parameters}},
        "outputs": {
            "parameters": {name: {"outputFile": str(folder / name)} for name in outputs},
            "artifacts": {name: {"artifacts": [{"name": name, "uri": str(folder / name)}]} for name in artifacts},
            "outputFile": str(folder / "executor_output.json"),
        },
    }


def config_in(folder: Path, **sections: Any) -> RunConfig:
    """A configuration whose run lies in `folder`."""
    storage = {"root": str(folder), "scratch": str(folder / "scratch"), **sections.pop("storage", {})}
    return RunConfig.model_validate({"name": "tested", **sections, "storage": storage})
