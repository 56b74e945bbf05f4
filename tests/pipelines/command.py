"""The `tandem` command as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TANDEM = [sys.executable, "-m", "pipelines.cli"]


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def environment(**variables: str) -> dict[str, str]:
    """This environment without a tracking server, so that runs start their own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    return {**kept, "PYTHONPATH": str(ROOT), **variables}


def tandem(folder: Path, *arguments: str, limit_s: float = 300, **variables: str) -> Outcome:
    """Run `tandem` in a folder."""
    done = subprocess.run(
        [*TANDEM, *arguments], cwd=folder, capture_output=True, text=True, timeout=limit_s, env=environment(**variables)
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
