"""The whole policy at rank 0, gathered from the shards of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from components.train.parallel import local
from components.train.ranks import Ranks
from components.weights.policy import checkpoint_views

if TYPE_CHECKING:
    from torch import nn

MESSAGE_BYTES = 256 * 2**20
"""Bytes of a rank's shards that travel at once, and at most one shard more."""


class Chunk(NamedTuple):
    """A rank's shard of one parameter."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Gathering:
    """Gathers one model's parameters.

    Args:
        model: Its parameters may be shards.
        ranks: Those that hold them; collective, as every method.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.ranks = ranks
        self.parameters = dict(model.named_parameters())
        self._chunks = ranks.collect([_chunk(each) for each in self.parameters.values()])
        # Every rank must cut at the same parameters, whatever its own shards measure: by the largest of all ranks.
        largest = [max(map(_numel, chunks)) for chunks in zip(*self._chunks, strict=True)]
        sizes = [count * each.element_size() for count, each in zip(largest, self.parameters.values(), strict=True)]
        self._parts = _divided(sizes, MESSAGE_BYTES)

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        """The policy under checkpoint names, on the CPU at rank 0; empty at the others. A lone rank's are
        views of the model's own memory; else they are the caller's, and gone when the caller lets go of them."""
        if self.ranks.alone:
            return checkpoint_views({name: parameter.data.cpu() for name, parameter in self.parameters.items()})
        whole: dict[str, torch.Tensor] = {}
        if self.ranks.rank == 0:
            whole = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in self.parameters.items()}
        for part in self._parts:
            self._gather(part, whole)
        return checkpoint_views(whole)

    def _gather(self, part: list[int], whole: dict[str, torch.Tensor]) -> None:
        names = list(self.parameters)
        shards = [local(self.parameters[names[index]]).reshape(-1) for index in part]
        counts = [sum(_numel(chunks[index]) for index in part) for chunks in self._chunks]
        # Equal lengths, as a gather wants them; a rank's end is filled up.
        flat = shards[0].new_zeros(max(counts))
        torch.cat(shards, out=flat[: counts[self.ranks.rank]])
        got = [torch.empty_like(flat) for _ in counts] if self.ranks.rank == 0 else None
        dist.gather(flat, got)
        for rank, rows in enumerate(got or []):
            chunks = [self._chunks[rank][index] for index in part]
            pieces = rows[: counts[rank]].cpu().split([_numel(chunk) for chunk in chunks])
            for index, chunk, piece in zip(part, chunks, pieces, strict=True):
                where = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
                whole[names[index]][where] = piece.view(chunk.sizes)


def _divided(sizes: list[int], limit: int) -> list[list[int]]:
    """Places of `sizes` in order, a new list wherever the sum so far has come to `limit`."""
    parts: list[list[int]] = [[]]
    room = limit
    for place, size in enumerate(sizes):
        if room <= 0:
            parts.append([])
            room = limit
        parts[-1].append(place)
        room -= size
    return parts


def _chunk(parameter: torch.Tensor) -> Chunk:
    if not isinstance(parameter, DTensor):
        return Chunk((0,) * parameter.dim(), tuple(parameter.shape))
    chunks = parameter.__create_chunk_list__()
    if not chunks:
        return Chunk((0,) * parameter.dim(), (0,) * parameter.dim())
    return Chunk(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def _numel(chunk: Chunk) -> int:
    count = 1
    for size in chunk.sizes:
        count *= size
    return count
