"""What S3 can refuse, and how it is told."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from components.storage.store import open_store
from configs.failure import BadConfig, BadData, ServiceGone
from configs.run import StorageConfig
from tests.storage.s3_server import S3Server


def test_missing_bucket(s3_uri: str, tmp_path: Path) -> None:
    store = open_store("s3://no-such-bucket-here/prefix", StorageConfig())
    for attempt in (
        lambda: store.read("key"),
        lambda: store.write("key", b"x"),
        lambda: store.list(),
        lambda: store.download("key", tmp_path / "copy"),
    ):
        with pytest.raises(BadConfig, match="no-such-bucket-here.*no such bucket"):
            attempt()


def test_wrong_secret(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(BadConfig, match="access is refused"):
        open_store(s3_uri, StorageConfig()).read("key")


def test_no_credentials(s3_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BadConfig, match="no usable AWS credentials.*AWS_ACCESS_KEY_ID"):
        open_store(s3_uri, StorageConfig()).list()


def test_unknown_profile(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(BadConfig, match="no-such-profile"):
        open_store(s3_uri, StorageConfig()).list()


def test_server_that_is_not_there(s3_uri: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with pytest.raises(ServiceGone, match="does not answer"):
        open_store(s3_uri, StorageConfig(endpoint_url=f"http://127.0.0.1:{port}")).read("key")


@pytest.mark.parametrize("url", ["http://"])
def test_endpoint_that_is_no_address(s3_uri: str, url: str) -> None:
    with pytest.raises(BadConfig, match=r"storage\.endpoint_url"):
        open_store(s3_uri, StorageConfig(endpoint_url=url)).read("key")


def test_endpoint_from_the_configuration_wins(
    s3_uri: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = open_store(s3_uri, StorageConfig(endpoint_url=s3_server.endpoint_url))
    store.write("key", b"x")
    assert store.read("key") == b"x"


def test_list_and_delete_go_beyond_one_page(s3_uri: str, tmp_path: Path) -> None:
    store = open_store(s3_uri, StorageConfig(max_concurrency=16))
    source = tmp_path / "many"
    source.mkdir()
    for number in range(1005):
        (source / f"{number:04d}").write_bytes(b"")
    store.upload(source, "many")
    assert len(store.list("many")) == 1006
    store.delete("many")
    assert store.list() == []


def test_interrupted_folder_upload_is_not_complete(s3_uri: str, tmp_path: Path) -> None:
    store = open_store(s3_uri, StorageConfig(max_concurrency=1))
    source = tmp_path / "source"
    source.mkdir()
    for number in range(5):
        (source / f"{number}").write_bytes(bytes(100_000))
    store.upload(source, "checkpoint")
    calls = threading.Semaphore(2)

    def stop(_: int) -> None:
        if not calls.acquire(blocking=False):
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        store.upload(source, "checkpoint", stop)
    assert store.list("checkpoint"), "something of it is there"
    assert not store.exists("checkpoint")
    with pytest.raises(BadData, match="not uploaded to its end"):
        store.download("checkpoint", tmp_path / "copy")
    store.upload(source, "checkpoint")
    assert store.exists("checkpoint")


def test_endpoint_is_kept_where_the_common_runtime_would_be_chosen(
    s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = pytest.importorskip("awscrt.s3")
    monkeypatch.setattr(runtime, "is_optimized_for_system", lambda: True)
    store = open_store(s3_uri, StorageConfig())
    (tmp_path / "source").write_bytes(b"content")
    store.upload(tmp_path / "source", "key")
    assert store.read("key") == b"content"
