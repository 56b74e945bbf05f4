"""A run as it would be submitted, with images that nobody pulls."""

from __future__ import annotations

from pathlib import Path

from configs.run import RUNS
from pipelines.submission import Submission, prepare

QUICKSTART = RUNS / "quickstart.yaml"
IMAGES = '{"control": "localhost/tandem/control:1", "train": "localhost/tandem/train:1", "rollout": "localhost/tandem/rollout:1"}'
BUCKET = "storage.root=s3://bucket/runs"


def images_file(folder: Path) -> Path:
    """A list of images as the build writes it."""
    file = folder / "built.json"
    file.write_text(IMAGES)
    return file


def submission(folder: Path, *overrides: str, name: str = "first") -> Submission:
    """The quickstart, prepared for a cluster."""
    return prepare(QUICKSTART, (BUCKET, *overrides), name, images_file(folder))
