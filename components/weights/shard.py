"""Shards: safetensors files written from and read as plain bytes, without torch and without copies.

The safetensors package reads bfloat16 only through torch, which broadcast's image does not have, and writes only what
lies in memory as a whole; the format itself is a length, a JSON header and the bytes
(https://huggingface.co/docs/safetensors, "Format"), so these few lines map a file and write one in pieces.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from components.weights.manifest import DTYPE_BYTES, Shard
from configs.failure import BadData

SUFFIX = ".safetensors"
_LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors package."""
_BUFFER = 1 << 20


class Part(NamedTuple):
    """Where a tensor will lie, or lies, in a shard."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int


class _Place(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def planned(parts: Iterable[Part], limit: int) -> list[list[Part]]:
    """Divide tensors among shards of at most `limit` bytes (a larger tensor has one of its own).

    Within a shard wide types come first, as the safetensors package has it, so that every tensor is aligned.
    """
    shards: list[list[Part]] = []
    room = 0
    for part in sorted(parts, key=lambda part: (-DTYPE_BYTES[part.dtype], part.name)):
        if not shards or part.bytes > room:
            shards.append([])
            room = limit
        shards[-1].append(part)
        room -= part.bytes
    return shards


def header_of(parts: list[Part]) -> bytes:
    """The length and header that the bytes of `parts` follow."""
    places: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in parts:
        places[part.name] = _Place(part.dtype, part.shape, (end, end + part.bytes))
        end += part.bytes
    header = msgspec.json.encode(places)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def write_file(path: Path, pieces: Iterable[bytes | np.ndarray]) -> None:
    """Write a file from its pieces in order."""
    with path.open("wb", buffering=_BUFFER) as file:
        for piece in pieces:
            file.write(piece if isinstance(piece, bytes) else piece.view(np.uint8).data)


def named_by_content(pieces: Iterable[bytes | np.ndarray]) -> Shard:
    """The shard that these pieces in order make."""
    state, size = xxhash.xxh3_128(), 0
    for piece in pieces:
        state.update(piece if isinstance(piece, bytes) else piece.view(np.uint8).data)
        size += len(piece) if isinstance(piece, bytes) else piece.nbytes
    return Shard(state.hexdigest() + SUFFIX, size)


def is_intact(path: Path, shard: Shard) -> bool:
    """Whether a file is there and its content is what its name says."""
    try:
        if path.stat().st_size != shard.bytes:
            return False
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return xxhash.xxh3_128_hexdigest(content) + SUFFIX == shard.file
    except (OSError, ValueError):  # the latter of an empty file, which cannot be mapped
        return False


class ShardFile:
    """A safetensors file, mapped.

    Args:
        path: The file.

    Raises:
        BadData: it is missing, cut short, or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except OSError as error:
            raise BadData(f"{path}: cannot be read ({error.strerror or error})") from None
        except ValueError:
            raise BadData(f"{path}: is empty") from None
        self._places, self._start = self._read_header()

    def parts(self) -> Iterator[Part]:
        """Its tensors."""
        for name, place in self._places.items():
            yield Part(name, place.dtype, place.shape, place.data_offsets[1] - place.data_offsets[0])

    def data(self, name: str) -> np.ndarray:
        """A tensor's bytes: uint8 [n], a view of the mapped file."""
        start, end = self._places[name].data_offsets
        return self._content[self._start + start : self._start + end]

    def _read_header(self) -> tuple[dict[str, _Place], int]:
        size = int.from_bytes(self._content[:8].tobytes(), "little")
        start = 8 + size
        if size > _LARGEST_HEADER or start > len(self._content):
            raise BadData(f"{self.path}: is cut short or no safetensors file")
        try:
            raw = msgspec.json.decode(self._content[8:start].tobytes(), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            places = {name: msgspec.json.decode(place, type=_Place) for name, place in raw.items()}
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BadData(f"{self.path}: its header is damaged") from None
        room = len(self._content) - start
        for name, place in places.items():
            first, last = place.data_offsets
            elements = 1
            for extent in place.shape:
                elements *= extent
            if not 0 <= first <= last or last - first != DTYPE_BYTES.get(place.dtype, 0) * elements:
                raise BadData(f"{self.path}: tensor '{name}' has a damaged header")
            if last > room:
                raise BadData(f"{self.path}: is cut short within tensor '{name}'")
        return places, start
