"""fp8: rows as e4m3 with a float32 scale for every block of 128 values.

The block scales of DeepSeek-V3 (arXiv:2412.19437, section 3.3) as DeepEP carries them: a scale is its block's largest
magnitude over the largest e4m3 number.
"""

from __future__ import annotations

from functools import cache

import torch

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""448."""


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each value to e4m3 in units of its block's scale.

    Zeros stay zeros. A block with an infinity or a NaN in it has the scale NaN and comes out of `dequantize` as NaN
    throughout, so that an overflow stays visible.

    Args:
        x: [T, H], floating point; the last block of a row is shorter if 128 does not divide H.

    Returns:
        float8_e4m3fn [T, H] and float32 [T, ceil(H / 128)].
    """
    if _fused(x):
        from kernels.triton import fp8

        return fp8.quantize(x)
    hidden = x.shape[1]
    wide = torch.nn.functional.pad(x.float(), (0, -hidden % BLOCK))
    blocks = wide.unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(2)
    # The least normal number, not 0: a block of zeros must not divide by it.
    scales = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    values = (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(1)
    return values[:, :hidden].contiguous(), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, H] of `dtype` from what `quantize` gave."""
    if _fused(values):
        from kernels.triton import fp8

        return fp8.dequantize(values.contiguous(), scales.contiguous(), dtype)
    hidden = values.shape[1]
    wide = torch.nn.functional.pad(_widen(values), (0, -hidden % BLOCK))
    wide.unflatten(1, (-1, BLOCK)).mul_(scales[..., None])
    return wide[:, :hidden].to(dtype)


def _fused(x: torch.Tensor) -> bool:
    """Whether a GPU has a kernel of its own for this."""
    if not x.is_cuda:
        return False
    from kernels.triton import fp8

    return fp8.supported(x.device)


def _widen(values: torch.Tensor) -> torch.Tensor:
    if values.device.type != "cpu":
        return values.float()
    # A CPU converts one number at a time; to look them up is four times as fast.
    return _numbers().index_select(0, values.view(torch.uint8).reshape(-1).int()).view(values.shape)


@cache
def _numbers() -> torch.Tensor:
    """float32 [256]: the number of each e4m3 byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
