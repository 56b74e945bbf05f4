"""Hop: one level of a journey in two levels, in which a row goes at most once to each destination, with its slots.

A slot travels as a record beside the rows: its expert in as few bytes as the destination's experts need, and its routing
weight as float32. The sign of the expert says whether the slot begins a new row, so no row needs a count or an index.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.dispatch.wire import as_bytes

WEIGHT_BYTES = 4


class Slots(NamedTuple):
    """S used slots."""

    rows: torch.Tensor
    """int64 [S]: the row each slot belongs to."""
    experts: torch.Tensor
    """int64 [S]: its expert, counted from the first that the place where the rows are can reach."""
    weights: torch.Tensor
    """float32 [S]."""


class Hop(NamedTuple):
    """What leaves a rank at one level. Rows are numbered through all chunks; in the order sent, they go by chunk, then
    destination, then row; records by destination, then row."""

    order: torch.Tensor
    """int64 [S]: which slot each record is."""
    first: torch.Tensor
    """bool [S]: whether a record begins a new row."""
    copies: list[torch.Tensor]
    """For each chunk, int64: which of the chunk's rows each row sent is."""
    rows: list[list[int]]
    """For each chunk, rows to each destination."""
    records: list[int]
    """Records to each destination."""


def plan(rows: torch.Tensor, to: torch.Tensor, destinations: int, sizes: list[int]) -> Hop:
    """The hop of slots that belong to `rows` (int64 [S]) and go `to` (int64 [S]).

    Args:
        sizes: Rows of each chunk.
    """
    total, chunks = sum(sizes), len(sizes)
    key = to * total + rows
    key, order = key.sort(stable=True)
    first = torch.ones_like(key, dtype=torch.bool)
    torch.ne(key[1:], key[:-1], out=first[1:])
    key = key[first]
    to_row, row = key.div(max(total, 1), rounding_mode="floor"), key.remainder(max(total, 1))
    records = torch.bincount(to, minlength=destinations)
    if chunks == 1:
        return Hop(order, first, [row], [torch.bincount(to_row, minlength=destinations).tolist()], records.tolist())
    ends = torch.tensor(sizes, device=rows.device).cumsum(0)
    chunk = torch.bucketize(row, ends, right=True)
    row = row - (ends - torch.tensor(sizes, device=rows.device))[chunk]
    counts = torch.bincount(chunk * destinations + to_row, minlength=chunks * destinations).view(chunks, -1).tolist()
    copies = row[chunk.argsort(stable=True)].split([sum(each) for each in counts])
    return Hop(order, first, list(copies), counts, records.tolist())


def expert_type(experts: int) -> torch.dtype:
    """The least integer that numbers so many experts and has a sign to spare."""
    return next(kind for kind in (torch.int8, torch.int16, torch.int32) if experts - 1 <= torch.iinfo(kind).max)


def encode(slots: Slots, hop: Hop, experts: int) -> torch.Tensor:
    """Records, uint8 [S, n], of slots whose experts are counted from the first of their destination's `experts`."""
    number = slots.experts[hop.order]
    number = torch.where(hop.first, ~number, number).to(expert_type(experts))
    weights = slots.weights[hop.order]
    return torch.cat([as_bytes(number), as_bytes(weights)], 1)


def decode(records: torch.Tensor, experts: int, rows: list[list[int]]) -> Slots:
    """Slots of the rows that arrived; rows are numbered in the order they arrive: by chunk, then source.

    Args:
        records: uint8 [S, n], by source.
        experts: As for `encode`.
        rows: For each chunk, rows from each source.
    """
    number = aligned(records[:, :-WEIGHT_BYTES], expert_type(experts))[:, 0].long()
    weights = aligned(records[:, -WEIGHT_BYTES:], torch.float32)[:, 0]
    first = number < 0
    row = first.cumsum(0) - 1
    if len(rows) > 1:
        # The records came by source; within one, by chunk.
        by_source = torch.tensor(rows, device=records.device).t().reshape(-1)
        chunk = torch.arange(len(rows), device=records.device).repeat(len(rows[0])).repeat_interleave(by_source)
        place = torch.empty_like(chunk)
        place[chunk.argsort(stable=True)] = torch.arange(len(chunk), device=records.device)
        row = place[row]
    return Slots(row, torch.where(first, ~number, number), weights)


def aligned(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Columns of rows of bytes, uint8 [S, n], as numbers."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)
