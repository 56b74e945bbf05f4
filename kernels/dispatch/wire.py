"""Rows on the wire: uneven exchanges between the ranks of a group."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Exchange(NamedTuple):
    """Rows on their way; `wait` gives what arrived."""

    rows: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        """The rows of all ranks, in the order of the ranks."""
        if self.work is not None:
            self.work.wait()
        return self.rows


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Exchange:
    """Start to send `sent[r]` rows to every rank r of the group, and to take `received[r]` from it.

    Args:
        rows: [sum(sent), ...], contiguous, in the order of the ranks.
    """
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    work = dist.all_to_all_single(arrived, rows, received, sent, group=group, async_op=True)
    return Exchange(arrived, work)
