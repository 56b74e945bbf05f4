"""Rows by expert on a GPU: copy each row to where its experts are, and sum what they made of it, in one pass each.

The same as `kernels.dispatch.grouping` does with PyTorch's own operations: sums are made in float32, in the order of the
rows, and rounded once, so the same input gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

WIDTH = 1024
"""Values of a row that a program handles."""


def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy rows.

    Args:
        x: [R, H], of any type.
        rows: int [S]: which row goes there; a negative number leaves zeros.

    Returns:
        [S, H].
    """
    hidden = x.shape[1]
    made = x.new_empty((len(rows), hidden))
    if not made.numel():
        return made
    if not len(x):
        return made.zero_()
    width = _width(hidden)
    grid = (len(rows), triton.cdiv(hidden, width))
    _gather[grid](x, rows.contiguous(), made, hidden, x.stride(0), x.stride(1), WIDTH=width)
    return made


def sum_rows(y: torch.Tensor, rows: torch.Tensor, total: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Sum the rows that belong together.

    Args:
        y: [S, H], floating point.
        rows: int [S]: which of the sums each row belongs to; negative for none.
        total: R, the number of sums.
        weights: float32 [S]: what each row is multiplied by; 1 if not given.

    Returns:
        [R, H], of the type of `y`; zeros where nothing belongs.
    """
    hidden = y.shape[1]
    if not len(y) or not total or not hidden:
        return y.new_zeros((total, hidden))
    order = rows.argsort(stable=True)
    # Slot 0 counts the rows that belong nowhere; they come first in the order.
    ends = torch.bincount(rows.clamp_min(-1) + 1, minlength=total + 1).cumsum(0)
    made = y.new_empty((total, hidden))
    width = _width(hidden)
    grid = (total, triton.cdiv(hidden, width))
    _sum[grid](
        y, order, ends, order if weights is None else weights.contiguous(), made, hidden, y.stride(0), y.stride(1),
        WEIGHTED=weights is not None, WIDTH=width,
    )  # fmt: skip
    return made


def _width(hidden: int) -> int:
    return min(WIDTH, triton.next_power_of_2(hidden))


@triton.jit
def _gather(x, rows, made, hidden, row_stride, column_stride, WIDTH: tl.constexpr) -> Any:  # type: ignore[no-untyped-def]
    slot = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(rows + slot).to(tl.int64)
    inside = column < hidden
    # Of a transposed matrix columns lie far apart.
    place = tl.maximum(row, 0) * row_stride + column.to(tl.int64) * column_stride
    values = tl.load(x + place, mask=inside, other=0)
    tl.store(made + slot * hidden + column, tl.where(row >= 0, values, 0), mask=inside)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    y, order, ends, weights, made, hidden, row_stride, column_stride, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr
) -> Any:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < hidden
    first, last = tl.load(ends + row), tl.load(ends + row + 1)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for place in range(first, last):
        slot = tl.load(order + place).to(tl.int64)
        where = slot * row_stride + column.to(tl.int64) * column_stride
        values = tl.load(y + where, mask=inside, other=0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + slot)
        total += values
    tl.store(made + row * hidden + column, total.to(made.dtype.element_ty), mask=inside)
