"""What a build tells of its images, with a double of buildah that keeps names and labels."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from images import build, recipe


class Storage:
    """buildah's storage, without layers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images: dict[str, dict[str, str]] = {}

    def has(self, name: str) -> bool:
        return name in self.images

    def build(self, containerfile: Path, context: Path, *, name: str, arguments: dict[str, str], **_: Any) -> None:
        self.images[name] = {
            "org.opencontainers.image.version": arguments["VERSION"],
            "org.opencontainers.image.revision": arguments["REVISION"],
        }

    def run(self, command: str, name: str, *others: str) -> str:
        if command == "tag":
            self.images |= dict.fromkeys(others, self.images[name])
        else:
            assert command == "rmi"
            del self.images[name]
        return ""

    def image_id(self, name: str) -> str:
        return "0123456789abcdef"

    def labels(self, name: str) -> dict[str, str]:
        return self.images[name]

    def size(self, name: str) -> int:
        return 1

    @contextmanager
    def mounted(self, name: str) -> Iterator[Path]:
        yield self.folder


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    storage = Storage(tmp_path)
    monkeypatch.setattr(build, "Buildah", lambda: storage)
    monkeypatch.setattr(build, "check", lambda *_: None)
    monkeypatch.setattr(build, "packages_in", lambda root: [])
    monkeypatch.setattr(build, "BUILT", tmp_path / "built.json")
    monkeypatch.setattr(build, "RECORDS", tmp_path / "built")

    def run(revision: str, version: str) -> dict[str, dict[str, str]]:
        monkeypatch.setattr(recipe, "revision", lambda: revision)
        monkeypatch.setattr(recipe, "project_version", lambda: version)
        done = CliRunner().invoke(build.main, ["--base", "base@sha256:0"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        manifest: dict[str, dict[str, str]] = json.loads((tmp_path / "built" / "manifest.json").read_text())
        return manifest

    yield run


def test_an_unchanged_image_keeps_its_revision(made: Any, tmp_path: Path) -> None:
    first = made("commit-1", "0.1")
    assert {(one["revision"], one["version"]) for one in first.values()} == {("commit-1", "0.1")}
    (tmp_path / "built" / "train.cdx.json").unlink()
    again = made("commit-2", "0.2")
    assert {(one["revision"], one["version"]) for one in again.values()} == {("commit-1", "0.1")}
    assert '"0.1"' in (tmp_path / "built" / "train.cdx.json").read_text()


def test_the_revision_says_whether_files_were_changed() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=recipe.ROOT, capture_output=True, text=True).stdout.strip()
    assert recipe.revision() in (head, f"{head}-changed")
