"""URIs and paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.storage.store import as_uri, open_store, split_uri
from configs.failure import BadConfig
from configs.run import StorageConfig

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..")
)


def test_paths_become_absolute_uris(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert as_uri("runs") == (tmp_path / "runs").as_uri()
    assert as_uri("~/runs") == "file:///home/someone/runs"
    assert as_uri("file:///a b") == "file:///a%20b"
    assert as_uri("s3://bucket/prefix") == "s3://bucket/prefix"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("gs://bucket/x", "scheme 'gs' is not known"),
        ("s3://", "names no bucket"),
        ("s3:///key", "names no bucket"),
        ("file://relative/path", "is not absolute"),
        (" ", "is empty"),
    ],
)
def test_other_uris_are_refused(uri: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        as_uri(uri)


def test_split() -> None:
    assert split_uri("s3://bucket/a/b.json") == ("s3://bucket/a", "b.json")
    assert split_uri("s3://bucket/b.json/") == ("s3://bucket", "b.json")
    assert split_uri("/b.json") == ("file:///", "b.json")
    for whole in ("s3://bucket", "s3://bucket/", "/"):
        with pytest.raises(BadConfig, match="names no file or folder"):
            split_uri(whole)


@given(NAMES, NAMES)
def test_split_and_open_give_back_the_path(folder: str, name: str) -> None:
    path = Path("/", folder, name)
    parent, key = split_uri(path.as_uri())
    assert key == name
    assert open_store(parent, StorageConfig()).local(key) == path
