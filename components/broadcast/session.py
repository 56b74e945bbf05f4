"""A collective transfer: which engines take part, where their ranks meet, and in which messages tensors travel."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

Described = tuple[str, str, list[int]]
"""A tensor's name, torch dtype (such as `float32`) and shape."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int32": 4}
"""Size of an element by torch dtype."""


class Place(NamedTuple):
    """An engine's place in a process group, in which broadcast is rank 0."""

    group: str
    """Name of the group."""
    rank: int
    """The engine's first rank; the others follow."""
    world: int
    """Ranks in all."""


class Session(msgspec.Struct, frozen=True):
    """Process groups of broadcast and engines; one that failed is never used again."""

    name: str
    """Unique name of the session."""
    address: str
    """Host that rank 0 listens on."""
    port: int
    backend: str
    """`gloo` or `nccl`."""
    ranks: dict[str, int]
    """Workers whose engines take part, and how many ranks each engine has."""
    bucket_bytes: int
    """Tensors are sent in order, in messages of up to this size (a larger tensor is one message)."""

    def place(self, worker: str) -> Place:
        """Where a worker's engine joins.

        With gloo each engine is in a group of its own: engines in one group pass tensors on to each other, so one that
        stands still would hold up others that broadcast cannot free. With nccl all are in one group, for its bandwidth.
        """
        if self.backend == "gloo":
            return Place(f"{self.name}-{worker}", 1, 1 + self.ranks[worker])
        before = [ranks for other, ranks in sorted(self.ranks.items()) if other < worker]
        return Place(self.name, 1 + sum(before), 1 + sum(self.ranks.values()))


def buckets(tensors: Iterable[Described], limit: int) -> list[list[Described]]:
    """Tensors in order, as messages of one type and up to `limit` bytes; a larger tensor is one message."""
    found: list[list[Described]] = []
    room, kind = 0, ""
    for name, dtype, shape in tensors:
        size = math.prod(shape) * BYTES[dtype]
        if dtype != kind or size > room:
            found.append([])
            room, kind = limit, dtype
        found[-1].append((name, dtype, shape))
        room -= size
    return found
