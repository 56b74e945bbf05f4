"""Block scales: what comes back from e4m3."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch.fp8 import BLOCK, dequantize, quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 127, 128, 130, 1024])
def test_values_come_back_within_half_a_step(hidden: int, dtype: torch.dtype) -> None:
    x = (torch.randn(33, hidden, generator=torch.Generator().manual_seed(0)) * 7).to(dtype)
    values, scales = quantize(x)
    assert values.shape == x.shape and values.dtype == torch.float8_e4m3fn
    assert scales.shape == (33, -(-hidden // BLOCK)) and scales.dtype == torch.float32
    back = dequantize(values, scales, torch.float32)
    step = scales.repeat_interleave(BLOCK, 1)[:, :hidden] * 2**-9
    assert ((back - x.float()).abs() <= torch.maximum(x.float().abs() * 2**-4, step / 2) * 1.0001).all()


def test_a_blocks_largest_value_comes_back_exactly() -> None:
    x = torch.zeros(3, 256)
    x[0, 5], x[1, 200], x[2, 0] = 448.0, -3.5, 1e-3
    values, scales = quantize(x)
    torch.testing.assert_close(dequantize(values, scales, torch.float32), x, rtol=1e-6, atol=0)
    assert scales[0, 0] == 1 and scales[1, 1] == 3.5 / 448


def test_blocks_do_not_share_scales() -> None:
    x = torch.full((1, 256), 1e-4)
    x[0, :128] = 1e4
    torch.testing.assert_close(dequantize(*quantize(x), torch.float32), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_and_rows_may_be_none(dtype: torch.dtype) -> None:
    back = dequantize(*quantize(torch.zeros(2, 130, dtype=dtype)), dtype)
    assert back.dtype == dtype and torch.equal(back, torch.zeros(2, 130, dtype=dtype))
    assert dequantize(*quantize(torch.zeros(0, 130, dtype=dtype)), dtype).shape == (0, 130)


def test_the_largest_numbers_do_not_overflow() -> None:
    x = torch.full((1, 128), torch.finfo(torch.float32).max)
    x[0, 1:] = torch.finfo(torch.float32).tiny
    back = dequantize(*quantize(x), torch.float32)
    assert back.isfinite().all() and back[0, 0] > 3.4e38 and not back[0, 1:].any()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_stays_visible_in_its_block_alone(bad: float) -> None:
    x = torch.ones(2, 256)
    x[1, 130] = bad
    back = dequantize(*quantize(x), torch.float32)
    assert back[1, 128:].isnan().all()
    assert torch.equal(back[0], x[0]) and torch.equal(back[1, :128], x[1, :128])
