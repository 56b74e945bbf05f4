"""fp8 on a GPU: rows as e4m3 with a float32 scale for every block of 128 values, in one pass.

The same numbers as `kernels.dispatch.fp8` makes with PyTorch's own operations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 128
BLOCKS = 8
"""Blocks of a row that a program handles."""
LEAST_CAPABILITY = (8, 9)
"""Compute capability from which a GPU converts to e4m3 (Ada, Hopper)."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max
TINY = torch.finfo(torch.float32).tiny


def supported(device: torch.device) -> bool:
    """Whether these kernels can run on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each value to e4m3 in units of its block's scale.

    Args:
        x: [T, H], floating point; the last block of a row is shorter if 128 does not divide H.

    Returns:
        float8_e4m3fn [T, H] and float32 [T, ceil(H / 128)]; a block with an infinity or a NaN has the scale NaN, and NaN
        throughout.
    """
    tokens, hidden = x.shape
    blocks = triton.cdiv(hidden, BLOCK)
    values = torch.empty((tokens, hidden), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((tokens, blocks), dtype=torch.float32, device=x.device)
    if values.numel():
        grid = (tokens, triton.cdiv(blocks, BLOCKS))
        _quantize[grid](
            x, values, scales, hidden, blocks, x.stride(0), x.stride(1),
            BLOCK=BLOCK, BLOCKS=BLOCKS, LARGEST=LARGEST, TINY=TINY,
        )  # fmt: skip
    return values, scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, H] of `dtype` from what `quantize` gave."""
    tokens, hidden = values.shape
    values, scales = values.contiguous(), scales.contiguous()
    made = torch.empty((tokens, hidden), dtype=dtype, device=values.device)
    if made.numel():
        blocks = scales.shape[1]
        grid = (tokens, triton.cdiv(blocks, BLOCKS))
        _dequantize[grid](values, scales, made, hidden, blocks, BLOCK=BLOCK, BLOCKS=BLOCKS)
    return made


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    x, values, scales, hidden, blocks, row_stride, column_stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LARGEST: tl.constexpr, TINY: tl.constexpr,
) -> Any:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < hidden
    # Of a transposed matrix columns lie far apart.
    place = row * row_stride + column.to(tl.int64) * column_stride
    wide = tl.load(x + place, mask=inside, other=0).to(tl.float32)
    # A maximum may pass over NaN, so it is looked for by itself.
    spoiled = tl.max(((wide != wide) | (tl.abs(wide) == float("inf"))).to(tl.int32), axis=1)
    largest = tl.max(tl.abs(wide), axis=1)
    scale = tl.maximum(tl.div_rn(largest, tl.full((BLOCKS,), LARGEST, tl.float32)), TINY)
    scale = tl.where(spoiled > 0, float("nan"), scale)
    # The plain division of a GPU is not exact, and would round some values to their neighbours.
    rounded = tl.div_rn(wide, tl.broadcast_to(scale[:, None], (BLOCKS, BLOCK))).to(tl.float8e4nv)
    tl.store(values + row * hidden + column, rounded, mask=inside)
    tl.store(scales + row * blocks + block, scale, mask=block < blocks)


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    values, scales, made, hidden, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
) -> Any:
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < hidden
    scale = tl.load(scales + row * blocks + block, mask=block < blocks, other=0)
    wide = tl.load(values + row * hidden + column, mask=inside).to(tl.float32) * scale[:, None]
    tl.store(made + row * hidden + column, wide.to(made.dtype.element_ty), mask=inside)
