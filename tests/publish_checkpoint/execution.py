"""Runs a step as its container does, up to the exit code: executor input in, outputs back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.step import Step, _execute
from configs.run import RunConfig


def execute(
    name: str, body: Callable[[Step], None], config: RunConfig, work: Path, **parameters: str
) -> dict[str, Any]:
    """Execute a step's body and return its marker's outputs.

    Args:
        name: The step.
        body: Its body.
        config: The run.
        work: Folder for the artifacts.
        parameters: Input parameters.
    """
    artifacts = {
        artifact: {"artifacts": [{"name": artifact, "uri": str(work / artifact), "metadata": {}}]}
        for artifact in ("metrics", "report")
    }
    step = Step(
        name,
        {
            "inputs": {"parameterValues": {"config": config.to_json(), **parameters}},
            "outputs": {"outputFile": str(work / "executor_output.json"), "artifacts": artifacts},
        },
    )
    if not step.repeat():
        _execute(step, body)
    step.write_executor_output()
    return json.loads((work / "executor_output.json").read_text())
