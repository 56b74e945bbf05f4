"""The programs an image build needs from the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from configs.failure import BadConfig

_OWN_UV = Path(__file__).resolve().parents[1] / ".uv" / "bin" / "uv"


def find_uv() -> Path:
    """Path of uv: the one on PATH, else the checkout's own.

    Raises:
        BadConfig: there is none.
    """
    found = shutil.which("uv")
    if found:
        return Path(found).resolve()
    if _OWN_UV.exists():
        return _OWN_UV
    raise BadConfig("uv is neither on PATH nor in .uv; run `make setup`, which installs it")


def uv_cache() -> Path:
    """The folder where uv keeps what it downloaded; made if missing."""
    folder = Path(
        subprocess.run([find_uv(), "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def require(program: str, package: str) -> None:
    """Refuse to go on without `program`.

    Raises:
        BadConfig: it is not installed.
    """
    if shutil.which(program) is None:
        raise BadConfig(f"{program} is not installed; install it (Debian: apt-get install {package})")
