"""Grouping: rows that arrived once a rank, expanded to one row for each slot, grouped by local expert, and back."""

from __future__ import annotations

from functools import cached_property

import torch


def sum_rows(y: torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
    """Sum the rows of `y` that belong together; half precision is summed in float32 and rounded once.

    Always adds in the order of `y`, so the same input gives the same bits, on a GPU too.

    Args:
        y: [N, H].
        rows: int64 [N]: which of the sums each row belongs to.
        total: R, the number of sums.

    Returns:
        [R, H], of the type of `y`; zeros where nothing belongs.
    """
    if not len(y):
        return y.new_zeros((total, y.shape[1]))
    if y.is_cuda and y.dtype != torch.float64:
        from kernels.triton import permute

        return permute.sum_rows(y, rows, total)
    order = rows.argsort(stable=True)
    sizes = torch.bincount(rows, minlength=total)
    return torch.nn.functional.embedding_bag(order, y, sizes.cumsum(0) - sizes, mode="sum")


class Grouping:
    """S used slots of R rows, and the same slots grouped by expert.

    Args:
        experts: int64 [S]: the local expert of each slot.
        rows: int64 [S]: the row of each slot.
        num_rows: R.
        num_local_experts: Experts of this rank.
    """

    def __init__(self, experts: torch.Tensor, rows: torch.Tensor, num_rows: int, num_local_experts: int) -> None:
        self.order = experts.argsort(stable=True)
        """int64 [S]: which slot each grouped row is."""
        self.rows = rows[self.order]
        """int64 [S]: which of the R rows each grouped row is a copy of."""
        self.counts = torch.bincount(experts, minlength=num_local_experts).cpu()
        """int64 [num_local_experts], on the CPU: grouped rows of each expert."""
        self.num_rows = num_rows

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [S, H]: a copy of its row for each slot, grouped by expert."""
        if x.is_cuda:
            from kernels.triton import permute

            return permute.gather_rows(x, self.rows)
        return x.index_select(0, self.rows)

    def reduce(self, y: torch.Tensor) -> torch.Tensor:
        """[S, H], grouped -> [R, H]: the sum of each row's slots, see `sum_rows`."""
        return sum_rows(y, self.rows, self.num_rows)

    def expand_slots(self, values: torch.Tensor) -> torch.Tensor:
        """[S], in the order of the slots -> [S], grouped."""
        return values.index_select(0, self.order)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[S], grouped -> [S], in the order of the slots."""
        spread = torch.empty_like(values)
        spread[self.order] = values
        return spread


class TableGrouping(Grouping):
    """A grouping whose slots lie in a table [R, K]; values of slots are tables too.

    Args:
        idx: int [R, K]: local expert numbers; negative where the slot is unused or belongs to another rank.
        num_local_experts: Experts of this rank.
    """

    def __init__(self, idx: torch.Tensor, num_local_experts: int) -> None:
        self.shape = idx.shape
        flat = idx.reshape(-1)
        self.slots = (flat >= 0).nonzero()[:, 0]
        """int64 [S]: the used slots (row * K + slot), ascending."""
        super().__init__(flat[self.slots].long(), self.slots // idx.shape[1], len(idx), num_local_experts)

    @cached_property
    def _places(self) -> torch.Tensor:
        return self.slots[self.order]

    def expand_slots(self, values: torch.Tensor) -> torch.Tensor:
        """[R, K] -> [S], grouped."""
        return values.reshape(-1).index_select(0, self._places)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[S], grouped -> [R, K]; 0 in unused slots."""
        table = values.new_zeros(self.shape.numel())
        table[self._places] = values
        return table.reshape(self.shape)


def group(idx: torch.Tensor, num_local_experts: int) -> TableGrouping:
    """Group what arrived once a rank: `idx` int [R, K] names each slot's local expert, or is negative.

    Example:
        grouping = group(idx, 8)
        rows, weights = grouping.expand(x), grouping.expand_slots(topk_weights)      # [S, H], [S]
        sums, table = grouping.reduce(y), grouping.spread(grad_weights)              # [R, H], [R, K]
    """
    return TableGrouping(idx, num_local_experts)
