"""Manifest: what a version of the policy is made of, and the checksums by which anyone can prove it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
import xxhash

from configs.failure import BadData

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Size of an element of each type a version may hold, under safetensors' names."""

TORCH_NAMES = {
    "F64": "float64", "I64": "int64", "F32": "float32", "I32": "int32", "BF16": "bfloat16", "F16": "float16",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""The same types under torch's names."""
_SHARD = re.compile(r"[0-9a-f]{32}\.safetensors")
_DTYPES = {name: dtype for dtype, name in TORCH_NAMES.items()}


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a version."""

    name: str
    dtype: str
    """As safetensors writes it: F32, BF16, …"""
    shape: list[int]
    xxh3: str
    """xxh3-128 of the tensor's bytes, hexadecimal; of a delta, of the bytes after applying it."""

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


class Base(msgspec.Struct, frozen=True):
    """The version a delta applies to."""

    version: int
    digest: str
    """Its digest, because a step repeated after a crash may put other weights under the same number."""


class Shard(msgspec.Struct, frozen=True):
    """One safetensors file of a version."""

    file: str
    """Its name: xxh3-128 of its bytes, hexadecimal, and `.safetensors`."""
    bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """What a version is made of."""

    version: int
    step: int
    """Training step that made it."""
    digest: str
    """xxh3-128 over the names, types, shapes and checksums of all tensors in order of name: equal digests, equal weights."""
    tensors: list[TensorEntry]
    shards: list[Shard]
    encoding: Literal["whole", "difference"] = "whole"
    """What the shards hold: the tensors, or what components/weights/delta.py makes of the changes since `base`."""
    base: Base | None = None
    """Version a difference applies to; None for a whole version."""

    @property
    def bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def sent(self) -> list[tuple[str, str, list[int]]]:
        """Name, torch dtype and shape of every tensor, in the order of a collective transfer."""
        return [(tensor.name, TORCH_NAMES[tensor.dtype], tensor.shape) for tensor in self.tensors]

    @property
    def stored_bytes(self) -> int:
        """Size of the shards in bytes."""
        return sum(shard.bytes for shard in self.shards)


class HostTensor(NamedTuple):
    """A tensor's bytes in host memory."""

    dtype: str
    """As safetensors writes it."""
    shape: list[int]
    data: np.ndarray
    """Unsigned integers of the element's size, one dimension: no arithmetic here depends on what they encode."""

    def entry(self, name: str) -> TensorEntry:
        """Its line in a manifest."""
        return TensorEntry(name, self.dtype, self.shape, checksum(self.data))


def on_host(tensor: torch.Tensor) -> HostTensor:
    """A tensor's bytes; where it lies contiguous in host memory, these are a view of it."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
    return HostTensor(dtype, list(tensor.shape), as_words(flat, dtype))


def as_words(data: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes [n] seen as unsigned integers of the size of a safetensors type's element."""
    return data.view(np.dtype(f"<u{DTYPE_BYTES[dtype]}"))


def checksum(data: np.ndarray) -> str:
    """xxh3-128 of an array's bytes, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data.view(np.uint8).data)


def fingerprint(tensors: dict[str, torch.Tensor]) -> list[TensorEntry]:
    """Checksums of tensors in memory, in order of name."""
    return [on_host(tensor).entry(name) for name, tensor in sorted(tensors.items())]


def digest_of(entries: list[TensorEntry]) -> str:
    """One checksum for all tensors (entries in order of name)."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(entries))


def decoded(content: bytes, version: int, place: str) -> Manifest:
    """A manifest from its bytes.

    Raises:
        BadData: it is damaged, or another version's.
    """
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadData(f"{place}: version {version} cannot be read ({error})") from None
    if not all(_SHARD.fullmatch(shard.file) for shard in manifest.shards):
        raise BadData(f"{place}: version {version} has a damaged manifest: it names a file that is no shard")
    if odd := [tensor for tensor in manifest.tensors if tensor.dtype not in DTYPE_BYTES]:
        raise BadData(f"{place}: version {version} has tensor '{odd[0].name}' of unknown type {odd[0].dtype}")
    if manifest.version != version or digest_of(manifest.tensors) != manifest.digest:
        raise BadData(f"{place}: version {version} has a damaged manifest: its digest is not that of its tensors")
    return manifest
