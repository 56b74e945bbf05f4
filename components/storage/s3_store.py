"""Store on S3 or a server with its interface, through boto3 (and the AWS Common Runtime where it is the faster one).

A folder is complete when its `_digests.json` is there: it is written last and removed first. Replacing a folder is
therefore not atomic as it is on a file system: while the new one is on its way there is none.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from s3transfer.subscribers import BaseSubscriber
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from components.storage.digest import (
    DIGESTS,
    OnBytes,
    decode_digests,
    digest_bytes,
    digest_file,
    digest_folder,
    encode_digests,
    verify_folder,
)
from components.storage.replacement import explained, replacement
from components.storage.s3_failure import NOT_FOUND, explained_s3
from components.storage.store import checked_key
from configs.failure import BadConfig, BadData
from configs.run import StorageConfig

_ATTEMPTS = 4
_CONNECT_S, _READ_S = 5, 60
_AWS_ENDPOINT = re.compile(r"https://s3(\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?")
_DELETE_BATCH = 1000
"""Keys one DeleteObjects request may name."""


class S3Store:
    """Objects below a prefix of a bucket.

    Args:
        bucket: Its name.
        prefix: Without slashes at its ends; may be empty.
        settings: Endpoint and concurrency. Credentials and region come from where boto3 finds them.
    """

    def __init__(self, bucket: str, prefix: str, settings: StorageConfig) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.settings = settings

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @retry(
        retry=retry_if_exception_type((ResponseStreamingError, IncompleteReadError, ReadTimeoutError)),
        stop=stop_after_attempt(_ATTEMPTS),
        reraise=True,
    )
    def _get(self, key: str) -> bytes:
        # botocore retries the request, not the reading of its body.
        return self._client().get_object(Bucket=self.bucket, Key=self._object(key))["Body"].read()

    def read(self, key: str) -> bytes:
        with explained_s3(self._uri(key)):
            return self._get(key)

    def write(self, key: str, data: bytes) -> None:
        with explained_s3(self._uri(key)):
            self._client().put_object(Bucket=self.bucket, Key=self._object(key), Body=data)

    def exists(self, key: str) -> bool:
        return self._is_object(key) or self._is_object(f"{key}/{DIGESTS}")

    def list(self, prefix: str = "") -> list[str]:
        folder = self._object(prefix)
        with explained_s3(self._uri(prefix)):
            keys = [key for key in self._pages(folder) if not folder or key == folder or key.startswith(f"{folder}/")]
        return sorted(key.removeprefix(self.prefix).lstrip("/") for key in keys)

    def delete(self, prefix: str) -> None:
        if not checked_key(prefix):
            raise BadConfig(f"{self.uri}: a whole store is not deleted; name a key in it")
        # A folder without its digests counts as absent, so they go first.
        keys = sorted(self.list(prefix), key=lambda key: not key.endswith(DIGESTS))
        self._delete(keys)

    def upload(self, local: Path, key: str, on_bytes: OnBytes | None = None) -> str:
        with explained(local), explained_s3(self._uri(key)):
            local.stat()
            if not local.is_dir():
                digest = digest_file(local).xxh3_128
                self._transfer([(local, key)], "upload", on_bytes)
                return digest
            digests = digest_folder(local, self.settings.max_concurrency)
            earlier = self.list(key)
            self._delete([each for each in earlier if each == f"{checked_key(key)}/{DIGESTS}"])
            self._transfer([(local / name, f"{key}/{name}") for name in digests], "upload", on_bytes)
            kept = {f"{checked_key(key)}/{name}" for name in (*digests, DIGESTS)}
            self._delete([each for each in earlier if each not in kept])
            content = encode_digests(digests)
            self.write(f"{key}/{DIGESTS}", content)
            return digest_bytes(content)

    def download(self, key: str, local: Path, on_bytes: OnBytes | None = None, verify: bool = True) -> None:
        with replacement(local) as unfinished, explained_s3(self._uri(key)):
            if self._is_object(key):
                self._transfer([(unfinished, key)], "download", on_bytes)
            elif self._is_object(f"{key}/{DIGESTS}"):
                self._download_verified(key, unfinished, on_bytes)
            else:
                found = self.list(key)
                if not found:
                    raise BadData(f"{self._uri(key)}: no such object or folder; check the URI")
                if verify:
                    raise BadData(
                        f"{self._uri(key)}: has no {DIGESTS}, so it was not uploaded to its end; upload it again"
                    )
                self._download_files(
                    key, [each.removeprefix(checked_key(key) + "/") for each in found], unfinished, on_bytes
                )

    def child(self, key: str) -> S3Store:
        return S3Store(self.bucket, self._object(key), self.settings)

    def local(self, key: str) -> Path | None:
        return None

    def _download_verified(self, key: str, folder: Path, on_bytes: OnBytes | None) -> None:
        content = self.read(f"{key}/{DIGESTS}")
        digests = decode_digests(content, self._uri(key))
        self._download_files(key, list(digests), folder, on_bytes)
        verify_folder(folder, digests, self._uri(key), self.settings.max_concurrency)
        (folder / DIGESTS).write_bytes(content)

    def _download_files(self, key: str, names: Sequence[str], folder: Path, on_bytes: OnBytes | None) -> None:
        for parent in {folder, *((folder / name).parent for name in names)}:
            parent.mkdir(parents=True, exist_ok=True)
        self._transfer([(folder / name, f"{key}/{name}") for name in names], "download", on_bytes)

    def _transfer(self, pairs: Sequence[tuple[Path, str]], direction: str, on_bytes: OnBytes | None) -> None:
        """Move files in parallel; the parts of large ones share the same threads."""
        subscribers = [_Progress(on_bytes)] if on_bytes is not None else None
        client = self._client()
        # boto3's CRT client drops the endpoint override and would talk to AWS itself.
        overridden = not _AWS_ENDPOINT.fullmatch(client.meta.endpoint_url)
        config = TransferConfig(
            max_concurrency=self.settings.max_concurrency,
            preferred_transfer_client="classic" if overridden else "auto",
        )
        with create_transfer_manager(client, config) as manager:
            futures = [
                (manager.upload if direction == "upload" else manager.download)(
                    fileobj=str(path), bucket=self.bucket, key=self._object(key), subscribers=subscribers
                )
                for path, key in pairs
            ]
            for future in futures:
                future.result()

    def _is_object(self, key: str) -> bool:
        with explained_s3(self._uri(key)):
            try:
                self._client().head_object(Bucket=self.bucket, Key=self._object(key))
            except ClientError as error:
                if error.response["Error"]["Code"] in NOT_FOUND:
                    return False
                raise
        return True

    def _pages(self, prefix: str) -> Iterator[str]:
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return (entry["Key"] for page in pages for entry in page.get("Contents", ()))

    def _delete(self, keys: Iterable[str]) -> None:
        remaining = iter(keys)
        while batch := list(itertools.islice(remaining, _DELETE_BATCH)):
            objects = [{"Key": self._object(key)} for key in batch]
            with explained_s3(self.uri):
                answer = self._client().delete_objects(Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True})
                for refused in answer.get("Errors", ()):
                    raise ClientError({"Error": refused}, "DeleteObjects")

    def _object(self, key: str) -> str:
        return "/".join(part for part in (self.prefix, checked_key(key)) if part)

    def _uri(self, key: str) -> str:
        return f"{self.uri}/{checked_key(key)}".rstrip("/")

    def _client(self) -> Any:
        environment = frozenset(item for item in os.environ.items() if item[0].startswith("AWS_"))
        return _client(self.settings.endpoint_url, self.settings.max_concurrency, environment, os.getpid())


class _Progress(BaseSubscriber):
    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self._on_bytes = on_bytes

    def on_progress(self, future: Any, bytes_transferred: int, **_: Any) -> None:
        self._on_bytes(bytes_transferred)


@functools.lru_cache(maxsize=8)
def _client(endpoint_url: str, concurrency: int, environment: frozenset[tuple[str, str]], pid: int) -> Any:
    """A client is safe among threads but not across fork, hence `pid`, and takes its credentials when it is made."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None
    config = Config(
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        max_pool_connections=concurrency + 2,
    )
    try:
        return boto3.Session(region_name=region).client("s3", endpoint_url=endpoint_url or None, config=config)
    except ValueError as error:
        raise BadConfig(f"storage.endpoint_url '{endpoint_url}': {error}; write http://host:port") from None
