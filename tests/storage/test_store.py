"""Both stores keep the same promises."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from components.storage.digest import DIGESTS
from components.storage.store import Store, open_store
from configs.failure import BadConfig, BadData
from configs.run import StorageConfig

MIB = 1024 * 1024


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    uri = request.getfixturevalue("s3_uri") if request.param == "s3" else (tmp_path / "root with space").as_uri()
    return open_store(uri, StorageConfig(max_concurrency=4))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "empty").write_bytes(b"")
    (source / "deep" / "er" / "weights #1.bin").write_bytes(random.Random(0).randbytes(300_000))
    return source


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_written_content_is_read_back_and_replaced(store: Store) -> None:
    store.write("steps/a.json", b"one")
    store.write("steps/a.json", b"two")
    assert store.read("steps/a.json") == b"two"
    assert store.exists("steps/a.json")
    assert not store.exists("steps/b.json")
    assert not store.exists("steps"), "a folder that upload did not write is not complete"


def test_missing_key_is_bad_data_that_names_the_uri(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="absent/key.*no such"):
        store.read("absent/key")
    with pytest.raises(BadData, match="absent/key.*no such"):
        store.download("absent/key", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_list_takes_a_folder_by_whole_names(store: Store) -> None:
    for key in ("a/1", "a/b/2", "ab/3", "c"):
        store.write(key, b"x")
    assert store.list() == ["a/1", "a/b/2", "ab/3", "c"]
    assert store.list("a") == store.list("a/") == ["a/1", "a/b/2"]
    assert store.list("c") == ["c"]
    assert store.list("absent") == []


def test_delete_takes_a_key_or_all_below_it(store: Store) -> None:
    for key in ("a/1", "a/b/2", "ab/3", "c"):
        store.write(key, b"x")
    store.delete("a")
    store.delete("c")
    store.delete("absent")
    assert store.list() == ["ab/3"]
    with pytest.raises(BadConfig, match="whole store"):
        store.delete("/")


def test_keys_do_not_leave_the_store(store: Store) -> None:
    with pytest.raises(BadConfig, match="leaves its store"):
        store.write("a/../../b", b"x")


def test_child_shares_the_place(store: Store) -> None:
    child = store.child("runs/one")
    child.write("x", b"1")
    assert store.read("runs/one/x") == b"1"
    assert child.list() == ["x"]
    assert open_store(child.uri, StorageConfig()).read("x") == b"1"


def test_large_file_travels_in_parts(store: Store, tmp_path: Path) -> None:
    source, moved, fetched = tmp_path / "large", [], []
    source.write_bytes(random.Random(1).randbytes(20 * MIB + 7))
    digest = store.upload(source, "large", moved.append)
    assert len(digest) == 32
    assert sum(moved) == source.stat().st_size
    assert len(moved) > 1
    store.download("large", tmp_path / "copy", fetched.append)
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert sum(fetched) == source.stat().st_size


def test_folder_travels_whole_and_its_digest_tells_content(store: Store, folder: Path, tmp_path: Path) -> None:
    first = store.upload(folder, "checkpoint")
    assert store.exists("checkpoint")
    store.download("checkpoint", tmp_path / "copy")
    copied = contents(tmp_path / "copy")
    listed = json.loads(copied.pop(DIGESTS))
    assert copied == contents(folder)
    assert {name: entry["size"] for name, entry in listed.items()} == {name: len(data) for name, data in copied.items()}
    assert store.upload(folder, "again") == first
    (folder / "config.json").write_text("[]")
    assert store.upload(folder, "other") != first


def test_folder_replaces_an_earlier_one(store: Store, folder: Path, tmp_path: Path) -> None:
    store.upload(folder, "checkpoint")
    (folder / "empty").unlink()
    (folder / "new").write_text("new")
    store.upload(folder, "checkpoint")
    assert store.list("checkpoint") == [
        f"checkpoint/{name}" for name in (DIGESTS, "config.json", "deep/er/weights #1.bin", "new")
    ]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "stale").write_text("stale")
    store.download("checkpoint", tmp_path / "copy")
    assert not (tmp_path / "copy" / "stale").exists()


def test_folder_without_digests_is_not_complete(store: Store, folder: Path, tmp_path: Path) -> None:
    store.upload(folder, "checkpoint")
    store.delete(f"checkpoint/{DIGESTS}")
    assert not store.exists("checkpoint")
    with pytest.raises(BadData, match="not uploaded to its end"):
        store.download("checkpoint", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    store.download("checkpoint", tmp_path / "copy", verify=False)
    assert contents(tmp_path / "copy") == contents(folder)


def test_flipped_bit_is_found_on_download(store: Store, folder: Path, tmp_path: Path) -> None:
    store.upload(folder, "checkpoint")
    key = "checkpoint/deep/er/weights #1.bin"
    damaged = bytearray(store.read(key))
    damaged[1000] ^= 1
    store.write(key, bytes(damaged))
    with pytest.raises(BadData, match="weights.*does not match its digest"):
        store.download("checkpoint", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_lost_file_is_found_on_download(store: Store, folder: Path, tmp_path: Path) -> None:
    store.upload(folder, "checkpoint")
    store.delete("checkpoint/config.json")
    with pytest.raises(BadData, match=r"config\.json|no such object"):
        store.download("checkpoint", tmp_path / "copy")


@pytest.mark.parametrize("content", [b"no json", b'{"../../outside": {"xxh3_128": "0", "size": 0}}'])
def test_digests_that_are_none_are_refused(store: Store, folder: Path, tmp_path: Path, content: bytes) -> None:
    store.upload(folder, "checkpoint")
    store.write(f"checkpoint/{DIGESTS}", content)
    with pytest.raises(BadData, match="upload the folder again"):
        store.download("checkpoint", tmp_path / "copy")


def test_missing_local_source_is_bad_data(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="absent.*no such file"):
        store.upload(tmp_path / "absent", "key")
