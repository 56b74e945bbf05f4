"""What a file system can refuse, and what is left then."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.storage.digest import DIGESTS
from components.storage.store import open_store
from configs.failure import BadConfig
from configs.run import StorageConfig

MIB = 1024 * 1024
NOBODY = 65534


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs takes root")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_full_disk_keeps_the_earlier_file_and_leaves_nothing(small_disk: Path) -> None:
    store = open_store(str(small_disk), StorageConfig())
    store.write("state", b"earlier")
    with pytest.raises(BadConfig, match="disk is full.*nothing written earlier was lost.*free space"):
        store.write("state", bytes(8 * MIB))
    assert store.read("state") == b"earlier"
    assert names(small_disk) == ["state"]


def test_full_disk_keeps_the_earlier_folder_and_leaves_nothing(small_disk: Path, tmp_path: Path) -> None:
    store = open_store(str(small_disk), StorageConfig())
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(b"earlier")
    store.upload(source, "checkpoint")
    (source / "weights").write_bytes(bytes(3 * MIB))
    (source / "optimizer").write_bytes(bytes(3 * MIB))
    with pytest.raises(BadConfig, match="disk is full"):
        store.upload(source, "checkpoint")
    assert store.exists("checkpoint")
    assert store.read("checkpoint/weights") == b"earlier"
    assert names(small_disk) == ["checkpoint"]


def test_full_disk_while_downloading(small_disk: Path, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), StorageConfig())
    store.write("large", bytes(8 * MIB))
    with pytest.raises(BadConfig, match="disk is full"):
        store.download("large", small_disk / "copy")
    assert names(small_disk) == []


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadConfig, match="cannot be used as a location.*choose another path"):
        open_store(str(tmp_path / "file"), StorageConfig()).write("key", b"x")


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A folder that another user can enter but not write; pytest's own folders let no other user in."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        Path(parent).chmod(0o755)
        root = Path(parent) / "root"
        root.mkdir(mode=0o555)
        yield root


def test_unwritable_root_is_told_in_one_sentence(unwritable: Path) -> None:
    script = (
        "import os, sys\n"
        "from components.storage.store import open_store\n"
        "from configs.failure import BadConfig\n"
        "from configs.run import StorageConfig\n"
        "store = open_store(sys.argv[1], StorageConfig())\n"
        f"os.geteuid() or os.setuid({NOBODY})\n"
        "try:\n    store.write('key', b'x')\n"
        "except BadConfig as failure:\n    print(failure.sentence)\n"
    )
    # PYTHONDONTWRITEBYTECODE: the user that the script becomes need not own the checkout.
    answer = subprocess.run(
        [sys.executable, "-c", script, str(unwritable)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert "is not accessible (Permission denied)" in answer.stdout


def test_killed_upload_leaves_no_folder_and_the_next_one_clears_up(tmp_path: Path) -> None:
    root, source = tmp_path / "root", tmp_path / "source"
    source.mkdir()
    for number in range(4):
        (source / f"weights-{number}").write_bytes(bytes(8 * MIB))
    script = (
        "import pathlib, sys, time\n"
        "from components.storage.store import open_store\n"
        "from configs.run import StorageConfig\n"
        "store = open_store(sys.argv[1], StorageConfig(max_concurrency=1))\n"
        "store.upload(pathlib.Path(sys.argv[2]), 'checkpoint', lambda _: (print('moving', flush=True), time.sleep(60)))\n"
    )
    uploading = subprocess.Popen(
        [sys.executable, "-c", script, str(root), str(source)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert uploading.stdout is not None
    with uploading:
        assert uploading.stdout.readline() == b"moving\n"
        uploading.send_signal(signal.SIGKILL)
        uploading.wait(30)
    store = open_store(str(root), StorageConfig())
    assert len(names(root)) == 1, "the killed process left its half-written folder"
    assert not store.exists("checkpoint")
    assert store.list() == []
    store.upload(source, "checkpoint")
    assert names(root) == ["checkpoint"]


def test_folder_replaced_where_there_is_no_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path / "root"), StorageConfig())
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("1")
    store.upload(source, "folder")
    (source / "a").write_text("2")

    class WithoutExchange:
        def renameat2(self, *_: object) -> int:
            import ctypes

            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: WithoutExchange())
    store.upload(source, "folder")
    assert store.read("folder/a") == b"2"
    assert names(tmp_path / "root") == ["folder"]


def test_reader_never_sees_a_part_of_a_write(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), StorageConfig())
    store.write("state", b"0" * MIB)
    script = (
        "import sys\n"
        "from components.storage.store import open_store\n"
        "from configs.run import StorageConfig\n"
        "store = open_store(sys.argv[1], StorageConfig())\n"
        "print('ready', flush=True)\n"
        "for number in range(100):\n    store.write('state', str(number % 10).encode() * 1048576)\n"
    )
    writing = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert writing.stdout is not None
    with writing:
        writing.stdout.readline()
        limit = time.monotonic() + 60
        while writing.poll() is None and time.monotonic() < limit:
            content = store.read("state")
            assert len(content) == MIB
            assert len(set(content)) == 1
    assert writing.returncode == 0


def test_local_gives_the_path(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), StorageConfig())
    store.write("a/b", b"x")
    path = store.local("a/b")
    assert path is not None
    assert path.read_bytes() == b"x"
    assert DIGESTS not in store.list()
