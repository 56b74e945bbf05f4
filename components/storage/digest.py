"""Digests of files and folders: xxh3_128, and the `_digests.json` that marks a folder as complete."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from configs.failure import BadData

DIGESTS = "_digests.json"
CHUNK = 4 * 1024 * 1024

OnBytes = Callable[[int], None]
"""Called with the bytes moved since the last call, from any thread."""


class FileDigest(msgspec.Struct, frozen=True):
    """What `_digests.json` tells of one file."""

    xxh3_128: str
    """Hexadecimal digest of the content."""
    size: int
    """Bytes."""


def digest_file(path: Path) -> FileDigest:
    """Digest of a file's content."""
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            state.update(block)
            size += len(block)
    return FileDigest(state.hexdigest(), size)


def folder_files(folder: Path) -> list[str]:
    """Names of the files below a folder, relative to it, `/` between parts, sorted; `_digests.json` left out."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != DIGESTS)


def digest_folder(folder: Path, threads: int) -> dict[str, FileDigest]:
    """Digests of all files below a folder by relative name, in order of name."""
    names = folder_files(folder)
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(lambda name: digest_file(folder / name), names), strict=True))


def encode_digests(digests: dict[str, FileDigest]) -> bytes:
    """Canonical content of `_digests.json`; its own digest is the folder's."""
    return msgspec.json.format(msgspec.json.encode(digests, order="sorted"), indent=1)


def decode_digests(content: bytes, uri: str) -> dict[str, FileDigest]:
    """Read what `encode_digests` wrote.

    Raises:
        BadData: it is something else, or names a file outside the folder.
    """
    try:
        digests = msgspec.json.decode(content, type=dict[str, FileDigest])
    except msgspec.DecodeError:
        raise BadData(f"{uri}/{DIGESTS}: is not a list of digests; upload the folder again") from None
    for name in digests:
        if name.startswith("/") or ".." in name.split("/"):
            raise BadData(f"{uri}/{DIGESTS}: names '{name}', which is outside the folder; upload the folder again")
    return digests


def digest_bytes(content: bytes) -> str:
    """Hexadecimal xxh3_128 of some bytes."""
    return xxhash.xxh3_128_hexdigest(content)


def verify_folder(folder: Path, digests: dict[str, FileDigest], uri: str, threads: int) -> None:
    """Compare a folder's files with what they should be.

    Args:
        folder: Local folder that was just filled.
        digests: What its files should be.
        uri: Where they came from, for the message.

    Raises:
        BadData: a file is missing, has another size, or another content.
    """
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(lambda name: digest_file(folder / name) if (folder / name).is_file() else None, digests)
        for (name, expected), actual in zip(digests.items(), found, strict=True):
            if actual is None:
                raise BadData(f"{uri}/{name}: is missing though {DIGESTS} lists it; upload the folder again")
            if actual != expected:
                raise BadData(damage(f"{uri}/{name}", actual, expected))


def damage(uri: str, actual: FileDigest, expected: FileDigest) -> str:
    """The sentence for a file whose content is not what its digest says."""
    return (
        f"{uri}: does not match its digest ({actual.size} bytes {actual.xxh3_128}, expected {expected.size} bytes"
        f" {expected.xxh3_128}); it was damaged after upload, so upload it again"
    )
