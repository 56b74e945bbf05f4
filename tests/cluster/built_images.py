"""The project's own images on the node: built by `images.build`, unchanged ones at once, and imported when missing."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from configs.failure import ServiceGone
from configs.stack import Images
from tests.cluster import image, layout

ROOT = Path(__file__).parents[2]
BUILD_LIMIT_S = 1800


def load() -> Images:
    """Build what is not built, import what the node lacks; returns their references.

    Raises:
        ServiceGone: The build failed; its last words are told.
    """
    _build()
    references: dict[str, str] = json.loads((ROOT / "images" / "built.json").read_text())
    if set(references.values()) - image.present():
        # The archive is as large as the images and of no use once containerd holds them.
        with tempfile.TemporaryDirectory(dir=layout.CACHE) as folder:
            image.import_archive(Path(_build("--archive", folder).splitlines()[-1]))
    return Images.model_validate(references)


def _build(*options: str) -> str:
    command = [sys.executable, "-m", "images.build", "--stack", "cpu", "--bootstrap-base", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=BUILD_LIMIT_S, check=False)
    if done.returncode:
        raise ServiceGone(f"`{' '.join(command[1:])}` failed with exit code {done.returncode}; its messages are above")
    return done.stdout.strip()
