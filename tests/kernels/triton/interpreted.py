"""The Triton kernels in Triton's interpreter against PyTorch; test_kernels.py runs this in a process of its own."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from kernels.dispatch import fp8 as plain
from kernels.dispatch import grouping
from kernels.triton import fp8, permute

assert os.environ.get("TRITON_INTERPRET") == "1", "start it by test_kernels.py"

_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}


def _convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """To the nearest, ties to even, as GPUs do: the interpreter's own cuts bfloat16 off, and loses a carry in e4m3."""
    bits = np.ascontiguousarray(values).view(f"int{source.primitive_bitwidth}")
    made = torch.from_numpy(bits.copy()).view(_TYPES[source]).float().to(_TYPES[target])
    whole = made.view(getattr(torch, f"int{target.primitive_bitwidth}")).numpy()
    return whole.view(f"uint{target.primitive_bitwidth}").reshape(values.shape)


interpreter._convert_float = _convert
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sums(y: torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
    """In float32, in the order of the rows, rounded once."""
    made = torch.zeros(total, y.shape[1])
    for row, values in zip(rows.tolist(), y, strict=True):
        made[row] += values.float()
    return made.to(y.dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [1, 7, 128, 130, 1024, 1500])
def test_rows_are_copied(hidden: int, dtype: torch.dtype) -> None:
    x = random(5, hidden, dtype=dtype)
    rows = torch.tensor([4, 0, -1, 0, 2, -7])
    made = permute.gather_rows(x, rows)
    assert torch.equal(made, torch.where((rows >= 0)[:, None], x[rows.clamp_min(0)], 0))


def test_bytes_and_strided_rows_are_copied() -> None:
    wide = random(6, 40)
    assert torch.equal(permute.gather_rows(wide[::2, 1::3], torch.tensor([2, 1])), wide[[4, 2], 1::3])
    numbers = torch.arange(12).reshape(3, 4)
    assert torch.equal(permute.gather_rows(numbers, torch.tensor([2], dtype=torch.int32)), numbers[2:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [1, 130, 1030])
def test_sums_are_those_of_grouping(hidden: int, dtype: torch.dtype) -> None:
    y = random(23, hidden, dtype=dtype)
    rows = torch.randint(6, (23,), generator=torch.Generator().manual_seed(1))
    rows[rows == 4] = 5  # a sum of nothing
    made = permute.sum_rows(y, rows, 7)
    assert made.dtype == dtype and torch.equal(made, sums(y, rows, 7))
    # PyTorch's own sum on a CPU rounds ties of bfloat16 away from zero.
    torch.testing.assert_close(made, grouping.sum_rows(y, rows, 7), rtol=torch.finfo(dtype).eps, atol=0)
    assert not made[4].any() and not made[6].any()


def test_sums_are_weighted_and_leave_out_what_belongs_nowhere() -> None:
    y, weights = random(9, 33), random(9, seed=2)
    rows = torch.tensor([1, -1, 0, 1, 1, -3, 3, 0, 3])
    want = torch.zeros(4, 33)
    for row, value, weight in zip(rows.tolist(), y, weights, strict=True):
        if row >= 0:
            want[row] += value * weight
    torch.testing.assert_close(permute.sum_rows(y, rows, 4, weights), want)
    assert not permute.sum_rows(y, torch.full((9,), -1), 4).any()


def test_strided_numbers_and_weights_are_read_as_they_are() -> None:
    y, wide = random(5, 33), random(10, seed=2)
    rows = torch.tensor([[2, 9], [0, 9], [-1, 9], [2, 9], [1, 9]])[:, 0]
    assert torch.equal(permute.gather_rows(y, rows), permute.gather_rows(y, rows.contiguous()))
    weights = wide[::2]
    want = permute.sum_rows(y, rows.contiguous(), 3, weights.contiguous())
    assert torch.equal(permute.sum_rows(y, rows, 3, weights), want)
    values, scales = fp8.quantize(random(6, 300))
    want = fp8.dequantize(values[::2].contiguous(), scales[::2].contiguous(), torch.float32)
    assert torch.equal(fp8.dequantize(values[::2], scales[::2], torch.float32), want)


def test_columns_may_lie_further_apart_than_32_bits_count() -> None:
    apart = 2**30
    # Memory that is not touched, but in three places, takes no room.
    far = torch.empty(2 * apart + 1, dtype=torch.uint8).as_strided((1, 3), (1, apart))
    far.copy_(torch.tensor([[3, 7, 9]], dtype=torch.uint8))
    assert permute.gather_rows(far, torch.tensor([0])).tolist() == [[3, 7, 9]]


def test_nothing_is_no_trouble() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert permute.gather_rows(random(3, 5), none).shape == (0, 5)
    assert not permute.gather_rows(random(0, 5), torch.tensor([-1, -1])).any()
    assert permute.sum_rows(random(0, 5), none, 3).tolist() == [[0.0] * 5] * 3
    assert permute.sum_rows(random(2, 5), torch.tensor([-1, -1]), 0).shape == (0, 5)
    values, scales = fp8.quantize(random(0, 130))
    assert values.shape == (0, 130) and scales.shape == (0, 2)
    assert fp8.dequantize(values, scales, torch.bfloat16).shape == (0, 130)


def test_there_and_back_is_a_groupings() -> None:
    idx = torch.tensor([[0, 2, -1], [-1, -1, -1], [2, 1, 0], [1, -1, 1]])
    made = grouping.group(idx, 3)
    x = random(4, 200, dtype=torch.bfloat16)
    rows = permute.gather_rows(x, made.rows)
    assert torch.equal(rows, made.expand(x))
    assert torch.equal(permute.sum_rows(rows, made.rows, 4), sums(rows, made.rows, 4))


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [1, 127, 128, 130, 1024, 1153])
def test_fp8_is_the_plain_one(hidden: int, dtype: torch.dtype) -> None:
    x = random(9, hidden, dtype=dtype) * 10.0 ** random(9, 1, seed=3)
    x[2] = 0
    x[3, 0] = 1e-38
    values, scales = fp8.quantize(x.to(dtype))
    want, want_scales = plain.quantize(x.to(dtype))
    assert torch.equal(scales, want_scales) and torch.equal(bytes_of(values), bytes_of(want))
    for back in TYPES:
        assert torch.equal(fp8.dequantize(values, scales, back), plain.dequantize(want, want_scales, back))


def test_what_overflowed_stays_visible() -> None:
    x = random(3, 300)
    x[0, 5], x[1, 290], x[2, 130] = torch.inf, torch.nan, -torch.inf
    values, scales = fp8.quantize(x)
    want, want_scales = plain.quantize(x)
    assert torch.equal(scales.isnan(), want_scales.isnan()) and int(scales.isnan().sum()) == 3
    found, expected = (
        made.dequantize(*each, torch.float32) for made, each in ((fp8, (values, scales)), (plain, (want, want_scales)))
    )
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_strided_rows_are_quantized() -> None:
    wide = random(8, 600)
    values, scales = fp8.quantize(wide[::2, ::2])
    want, want_scales = plain.quantize(wide[::2, ::2])
    assert torch.equal(bytes_of(values), bytes_of(want)) and torch.equal(scales, want_scales)
