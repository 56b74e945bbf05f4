"""A collective transfer group: who is in it and where its ranks meet."""

from __future__ import annotations

import msgspec


class Session(msgspec.Struct, frozen=True):
    """One process group of broadcast (rank 0) and engines; a group that failed is never used again."""

    name: str
    """Unique name of the group."""
    address: str
    """Host that rank 0 listens on."""
    port: int
    backend: str
    """`gloo` or `nccl`."""
    ranks: dict[str, int]
    """First rank of each worker's engine."""
    world: int
    """Ranks in all, broadcast included."""
    bucket_bytes: int
    """Tensors are sent in order, in messages of up to this size (a larger tensor is one message)."""
