"""`tandem doctor`: what a run needs, looked for on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import psutil

from components.experience.redis_server import redis_binary
from configs.failure import BadConfig

FREE_DISK = 2 * 2**30
MEMORY = 4 * 2**30


class Finding(NamedTuple):
    """One thing looked for."""

    what: str
    good: bool
    found: str
    mend: str = ""


def examine() -> list[Finding]:
    """Look for everything a local run needs."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    free = shutil.disk_usage(Path.cwd()).free
    memory = psutil.virtual_memory().available
    findings = [
        Finding("Python", sys.version_info >= (3, 11), python, "install Python 3.11 or newer"),
        Finding("cores", True, f"{os.cpu_count()} (each process of a run uses one thread)"),
        Finding("memory", memory > MEMORY, f"{memory / 2**30:.1f} GiB available", "a run needs 4 GiB; close something"),
        Finding("disk", free > FREE_DISK, f"{free / 2**30:.1f} GiB free here", "a run needs 2 GiB; free some space"),
        Finding("folder", os.access(Path.cwd(), os.W_OK), str(Path.cwd()), "change to a folder you may write"),
    ]
    for package in ("torch", "transformers", "kfp", "mlflow", "redis", "pebble"):
        try:
            findings.append(Finding(package, True, version(package)))
        except PackageNotFoundError:
            findings.append(Finding(package, False, "not installed", "run `make setup`"))
    try:
        findings.append(Finding("redis-server", True, redis_binary()))
    except BadConfig as error:
        findings.append(Finding("redis-server", False, "none", error.sentence))
    return findings
