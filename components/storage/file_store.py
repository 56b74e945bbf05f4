"""Store on a file system: everything appears by rename, so a crash or a full disk leaves the earlier file as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from components.storage.digest import (
    CHUNK,
    DIGESTS,
    FileDigest,
    OnBytes,
    damage,
    decode_digests,
    digest_bytes,
    encode_digests,
    folder_files,
)
from components.storage.replacement import (
    UNFINISHED,
    explained,
    replacement,
    sync,
    unfinished_beside,
)
from components.storage.store import checked_key
from configs.failure import BadConfig, BadData


class FileStore:
    """Files below a folder.

    Args:
        root: The folder; made by the first write.
        threads: Files copied at the same time.
    """

    def __init__(self, root: Path, threads: int) -> None:
        self.root = root
        self.threads = threads

    @property
    def uri(self) -> str:
        return self.root.as_uri()

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with explained(path):
            return path.read_bytes()

    def write(self, key: str, data: bytes) -> None:
        with replacement(self._path(key)) as unfinished, unfinished.open("wb") as file:
            file.write(data)
            sync(file)

    def exists(self, key: str) -> bool:
        path = self._path(key)
        return path.is_file() or (path / DIGESTS).is_file()

    def list(self, prefix: str = "") -> list[str]:
        start = self._path(prefix)
        if start.is_file():
            return [checked_key(prefix)]
        names = []
        for folder, folders, files in os.walk(start):
            folders[:] = [name for name in folders if not name.startswith(UNFINISHED)]
            at = Path(folder).relative_to(self.root)
            names += [(at / name).as_posix() for name in files if not name.startswith(UNFINISHED)]
        return sorted(names)

    def delete(self, prefix: str) -> None:
        if not checked_key(prefix):
            raise BadConfig(f"{self.uri}: a whole store is not deleted; name a key in it")
        path = self._path(prefix)
        with explained(path):
            if path.is_dir() and not path.is_symlink():
                removed = unfinished_beside(path)
                path.rename(removed)
                shutil.rmtree(removed)
            else:
                path.unlink(missing_ok=True)

    def upload(self, local: Path, key: str, on_bytes: OnBytes | None = None) -> str:
        with explained(local):
            local.stat()
        with replacement(self._path(key)) as unfinished:
            if not local.is_dir():
                return _copy(local, unfinished, on_bytes).xxh3_128
            digests = self._copy_folder(local, unfinished, folder_files(local), on_bytes)
            content = encode_digests(digests)
            (unfinished / DIGESTS).write_bytes(content)
            return digest_bytes(content)

    def download(self, key: str, local: Path, on_bytes: OnBytes | None = None, verify: bool = True) -> None:
        path = self._path(key)
        with explained(path):
            path.stat()
        with replacement(local) as unfinished:
            if not path.is_dir():
                _copy(path, unfinished, on_bytes)
            elif verify or (path / DIGESTS).is_file():
                self._download_verified(path, unfinished, on_bytes)
            else:
                self._copy_folder(path, unfinished, folder_files(path), on_bytes)

    def child(self, key: str) -> FileStore:
        return FileStore(self._path(key), self.threads)

    def local(self, key: str) -> Path | None:
        return self._path(key)

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def _download_verified(self, path: Path, unfinished: Path, on_bytes: OnBytes | None) -> None:
        uri = path.as_uri()
        if not (path / DIGESTS).is_file():
            raise BadData(f"{uri}: has no {DIGESTS}, so it was not uploaded to its end; upload it again")
        content = (path / DIGESTS).read_bytes()
        digests = decode_digests(content, uri)
        missing = [name for name in digests if not (path / name).is_file()]
        if missing:
            raise BadData(f"{uri}/{missing[0]}: is missing though {DIGESTS} lists it; upload the folder again")
        copied = self._copy_folder(path, unfinished, list(digests), on_bytes)
        for name, expected in digests.items():
            if copied[name] != expected:
                raise BadData(damage(f"{uri}/{name}", copied[name], expected))
        (unfinished / DIGESTS).write_bytes(content)

    def _copy_folder(
        self, source: Path, target: Path, names: Sequence[str], on_bytes: OnBytes | None
    ) -> dict[str, FileDigest]:
        for folder in sorted({(target / name).parent for name in names} | {target}):
            folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self.threads) as pool:
            copied = pool.map(lambda name: _copy(source / name, target / name, on_bytes), names)
            return dict(zip(names, copied, strict=True))


def _copy(source: Path, target: Path, on_bytes: OnBytes | None) -> FileDigest:
    """Copy a file, digesting what passes, and sync it."""
    state, size = xxhash.xxh3_128(), 0
    with source.open("rb") as reader, target.open("wb") as writer:
        while block := reader.read(CHUNK):
            writer.write(block)
            state.update(block)
            size += len(block)
            if on_bytes is not None:
                on_bytes(len(block))
        sync(writer)
    return FileDigest(state.hexdigest(), size)
