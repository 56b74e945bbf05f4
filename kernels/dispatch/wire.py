"""Rows on the wire: uneven exchanges between the ranks of a group, and how many bytes they sent where."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist


@dataclass
class Traffic:
    """Payload this rank has sent so far, in bytes, by what it crossed; what it sent to itself counts nowhere."""

    inter_node: int = 0
    intra_node: int = 0


class Scratch:
    """Memory for what does not outlive a call, used again by the next one.

    A CPU pays for every fresh page as much as for the copy that fills it: a quarter of a dispatch. A GPU's allocator
    already keeps its memory.
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, torch.Tensor] = {}

    def take(
        self, key: Hashable, rows: int, like: torch.Tensor, columns: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """[rows, columns] with anything in it, good until the key is asked for again; columns, type and device as those of
        `like` [N, H] if not given."""
        columns, dtype = columns or like.shape[1], dtype or like.dtype
        if like.device.type != "cpu":
            return torch.empty((rows, columns), dtype=dtype, device=like.device)
        size = rows * columns * dtype.itemsize
        held = self._held.get(key)
        if held is None or len(held) < size:
            held = self._held[key] = torch.empty(size, dtype=torch.uint8)
        return held[:size].view(dtype).view(rows, columns)

    def gather(self, key: Hashable, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The rows [N, H] at `index` (int64), in memory that `take` gives."""
        return torch.index_select(rows, 0, index, out=self.take(key, len(index), rows))

    def free(self) -> None:
        """Give the memory back."""
        self._held.clear()


class Exchange(NamedTuple):
    """Rows on their way; `wait` gives what arrived."""

    rows: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        """The rows of all ranks, in the order of the ranks."""
        if self.work is not None:
            self.work.wait()
        return self.rows


class Lane:
    """One process group to exchange rows over.

    Args:
        group: The process group; none if this rank is alone.
        rank: This process's rank in it.
        nodes: The node of each of its ranks.
        traffic: Where to count what is sent.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, nodes: Sequence[int], traffic: Traffic) -> None:
        self.group = group
        self.rank = rank
        self.nodes = tuple(nodes)
        self.traffic = traffic

    def exchange(
        self, rows: torch.Tensor, sent: list[int], received: list[int], out: torch.Tensor | None = None
    ) -> Exchange:
        """Start to send `sent[r]` rows to every rank r of the group, and to take `received[r]` from it.

        Args:
            rows: [sum(sent), ...], contiguous, in the order of the ranks.
            out: [sum(received), ...], contiguous: where to put what arrives; new if not given.
        """
        if len(self.nodes) == 1:
            return Exchange(rows if out is None else out.copy_(rows), None)
        if out is None:
            out = rows.new_empty((sum(received), *rows.shape[1:]))
        size = prod(rows.shape[1:]) * rows.element_size()
        for rank, count in enumerate(sent):
            if rank == self.rank:
                continue
            if self.nodes[rank] == self.nodes[self.rank]:
                self.traffic.intra_node += count * size
            else:
                self.traffic.inter_node += count * size
        # As bytes: not every backend knows every type.
        work = dist.all_to_all_single(as_bytes(out), as_bytes(rows), received, sent, group=self.group, async_op=True)
        return Exchange(out, work)

    def trade(self, table: torch.Tensor) -> torch.Tensor:
        """Give rank r the row `table[r]` and return, row by row, what the ranks gave.

        Args:
            table: [W, ...], contiguous.
        """
        ones = [1] * len(table)
        return self.exchange(table, ones, ones).wait()


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[N, ...], contiguous, -> the same memory as uint8 [N, bytes of a row]."""
    # A contiguous tensor may have any stride where it has one element only; a view of another type may not.
    flat = rows.as_strided((rows.numel(),), (1,))
    return flat.view(torch.uint8).view(len(rows), prod(rows.shape[1:]) * rows.element_size())
