"""Publication: a version of the policy made into shards, whole or as the difference from the one before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from components.weights import delta
from components.weights.manifest import Base, HostTensor, Manifest, Shard, TensorEntry, digest_of, on_host
from components.weights.parallel import on_cores
from components.weights.shard import Part, header_of, is_intact, named_by_content, planned, write_file

if TYPE_CHECKING:
    import torch

WORTHWHILE = 0.6
"""Size of a difference, as a share of the whole, up to which it is stored instead."""
_ENOUGH = 16
"""When 1/16 of the tensors has told that a difference is not worthwhile, the rest is not looked at."""


class Snapshot(NamedTuple):
    """A version in host memory."""

    tensors: dict[str, HostTensor]
    """By name, in order of name."""
    entries: list[TensorEntry]
    digest: str


class Published(NamedTuple):
    """What the next version may be the difference from."""

    manifest: Manifest
    snapshot: Snapshot
    depth: int
    """Differences between it and a whole version."""


def snapshot(tensors: dict[str, torch.Tensor], dtype: Literal["float32", "bfloat16"]) -> Snapshot:
    """The tensors as they are published: those of type float32 are rounded where `dtype` is bfloat16."""
    import torch

    held = {}
    for name, tensor in sorted(tensors.items()):
        rounded = dtype == "bfloat16" and tensor.dtype == torch.float32
        held[name] = on_host(tensor.bfloat16() if rounded else tensor)
    with on_cores(sum(each.data.nbytes for each in held.values())) as threads:
        entries = list(threads(lambda item: item[1].entry(item[0]), held.items()))
    return Snapshot(held, entries, digest_of(entries))


def kept(taken: Snapshot, tensors: dict[str, torch.Tensor]) -> Snapshot:
    """A snapshot that stays as it is when training goes on: what is a view of the model's memory is copied."""
    lent = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return taken._replace(
        tensors={
            name: each._replace(data=each.data.copy()) if each.data.ctypes.data == lent[name] else each
            for name, each in taken.tensors.items()
        }
    )


def write_whole(taken: Snapshot, folder: Path, limit: int, present: Path) -> list[Shard]:
    """Write shards of whole tensors.

    Args:
        taken: The version.
        folder: Where to write.
        limit: Bytes a shard may have.
        present: Where shards already are; those found there intact are not written.
    """
    data = {name: each.data for name, each in taken.tensors.items()}
    parts = [Part(entry.name, entry.dtype, entry.shape, entry.bytes) for entry in taken.entries]
    return _write(parts, data, folder, limit, present)


def write_difference(
    taken: Snapshot, base: Published, folder: Path, limit: int, present: Path
) -> tuple[list[Shard], Base] | None:
    """Write shards of what changed since `base`; None where that is not possible or not worthwhile."""
    before = base.snapshot.tensors
    if [(e.name, e.dtype, e.shape) for e in taken.entries] != [
        (e.name, e.dtype, e.shape) for e in base.snapshot.entries
    ]:
        return None
    frames: dict[str, np.ndarray] = {}
    total, seen, made = sum(entry.bytes for entry in taken.entries), 0, 0

    def encoded(name: str) -> dict[str, bytes]:
        return delta.encode(before[name].data, taken.tensors[name].data)

    changed = [new for new, old in zip(taken.entries, base.snapshot.entries, strict=True) if new.xxh3 != old.xxh3]
    seen = total - sum(entry.bytes for entry in changed)
    with on_cores(total) as threads:
        for entry, planes in zip(changed, threads(encoded, [entry.name for entry in changed]), strict=True):
            frames |= {f"{plane}/{entry.name}": np.frombuffer(frame, np.uint8) for plane, frame in planes.items()}
            seen += entry.bytes
            made += sum(map(len, planes.values()))
            if seen * _ENOUGH >= total and made > WORTHWHILE * seen:
                return None
    parts = [Part(name, "U8", [len(frame)], len(frame)) for name, frame in frames.items()]
    shards = _write(parts, frames, folder, limit, present)
    return shards, Base(base.manifest.version, base.manifest.digest)


def split_name(name: str) -> tuple[str, str]:
    """Plane and tensor that an entry of a difference's shard holds."""
    plane, _, tensor = name.partition("/")
    return plane, tensor


def _write(parts: list[Part], data: dict[str, np.ndarray], folder: Path, limit: int, present: Path) -> list[Shard]:
    def written(held: list[Part]) -> Shard:
        pieces: list[bytes | np.ndarray] = [header_of(held), *(data[part.name] for part in held)]
        shard = named_by_content(pieces)
        if not is_intact(present / shard.file, shard):
            write_file(folder / shard.file, pieces)
        return shard

    with on_cores(sum(part.bytes for part in parts)) as threads:
        return list(threads(written, planned(parts, limit)))
