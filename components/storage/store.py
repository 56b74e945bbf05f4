"""Store: files and folders under a URI, the same on a file system and on S3.

A key is a relative path with `/` between its parts. A key names one file, or a folder: everything below it. A folder
that `upload` wrote ends with `_digests.json`; without that it is not complete and counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import unquote

from configs.failure import BadConfig
from configs.run import StorageConfig

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


@runtime_checkable
class Store(Protocol):
    """Files below one URI.

    Every method raises BadData when what it was told to read is absent or damaged, BadConfig when this machine or
    these credentials cannot reach or write it, and ServiceGone when the object store does not answer.
    """

    @property
    def uri(self) -> str:
        """URI that keys are relative to, without a slash at its end."""
        ...

    def read(self, key: str) -> bytes:
        """Content of the file `key`."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Put a file in one step: a reader sees the earlier content or the new one, never a part."""
        ...

    def exists(self, key: str) -> bool:
        """Whether `key` is a file, or a complete folder."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """Keys of the files below the folder `prefix` (and of `prefix` itself if it is a file), sorted."""
        ...

    def delete(self, prefix: str) -> None:
        """Remove the file `prefix` and everything below the folder `prefix`; nothing there is fine."""
        ...

    def upload(self, local: Path, key: str, on_bytes: Callable[[int], None] | None = None) -> str:
        """Put a local file or folder at `key`, in place of an earlier one.

        Args:
            local: File or folder. Of a folder all files are taken, at any depth, and `_digests.json` is written last.
            key: Where it goes.
            on_bytes: Told the bytes moved since its last call, from any thread.

        Returns:
            Hexadecimal xxh3_128 of the file, or of the folder's `_digests.json`.
        """
        ...

    def download(
        self, key: str, local: Path, on_bytes: Callable[[int], None] | None = None, verify: bool = True
    ) -> None:
        """Fetch a file or folder to `local`, in place of what was there, and compare a folder with its digests.

        Args:
            key: File or folder.
            local: Path it gets; appears in one step.
            on_bytes: Told the bytes moved since its last call, from any thread.
            verify: False also takes a folder that something other than `upload` wrote, which has no digests.
        """
        ...

    def child(self, key: str) -> Store:
        """The store whose keys are relative to `key` here."""
        ...

    def local(self, key: str) -> Path | None:
        """Path of `key` where the store is a file system, else None."""
        ...


def as_uri(path_or_uri: str) -> str:
    """URI of a path, which may be relative or start with `~`; a URI stays as it is.

    Raises:
        BadConfig: it is empty or has a scheme other than `file` and `s3`, or no bucket.
    """
    if not path_or_uri.strip():
        raise BadConfig("the storage location is empty; give a path, file:///path or s3://bucket/prefix")
    scheme = _SCHEME.match(path_or_uri)
    if scheme is None:
        return Path(path_or_uri).expanduser().absolute().as_uri()
    if scheme[1] == "file":
        return _file_path(path_or_uri).as_uri()
    if scheme[1] == "s3":
        if not path_or_uri.removeprefix("s3://").partition("/")[0]:
            raise BadConfig(f"{path_or_uri}: names no bucket; write s3://bucket/prefix")
        return path_or_uri
    raise BadConfig(f"{path_or_uri}: scheme '{scheme[1]}' is not known; use s3://, file:// or a path")


def split_uri(uri: str) -> tuple[str, str]:
    """Parent URI and key of a URI or path, so that `open_store(parent).read(key)` reads it.

    Raises:
        BadConfig: it names a whole bucket or the root of the file system.
    """
    full = as_uri(uri)
    if full.startswith("file://"):
        path = _file_path(full)
        parent, key = path.parent.as_uri(), path.name
    else:
        head, _, key = full.rstrip("/").rpartition("/")
        parent, key = head, key if head != "s3:/" else ""
    if not key:
        raise BadConfig(f"{uri}: names no file or folder; add a path to it")
    return parent, key


def open_store(uri: str, settings: StorageConfig) -> Store:
    """Open a store; nothing is read or created until it is used.

    Args:
        uri: `s3://bucket/prefix`, `file:///path` or a path.
        settings: Endpoint and concurrency.

    Raises:
        BadConfig: the URI is not one of those.
    """
    uri = as_uri(uri)
    if uri.startswith("file://"):
        from components.storage.file_store import FileStore

        return FileStore(_file_path(uri), settings.max_concurrency)
    from components.storage.s3_store import S3Store

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return S3Store(bucket, prefix.strip("/"), settings)


def checked_key(key: str) -> str:
    """A key without slashes at its ends; empty names the store itself.

    Raises:
        BadConfig: it leaves the store.
    """
    key = key.strip("/")
    if ".." in key.split("/"):
        raise BadConfig(f"key '{key}' leaves its store; write it without '..'")
    return key


def _file_path(uri: str) -> Path:
    path = unquote(uri.removeprefix("file://").removeprefix("localhost"))
    if not path.startswith("/"):
        raise BadConfig(f"{uri}: is not absolute; write file:///path, or the path alone")
    return Path(path)
