"""Rows that arrived once a rank, as rows grouped by expert, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dispatch.grouping import group, sum_rows


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 30), top=st.integers(1, 8), experts=st.integers(1, 5))
def test_grouping_is_what_loops_would_do(seed: int, rows: int, top: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(-1, experts, (rows, top), generator=generator)
    x, weights = torch.randn(rows, 4, generator=generator), torch.rand(rows, top, generator=generator)
    grouping = group(idx, experts)

    places = [(row, slot) for number in range(experts) for row, slot in (idx == number).nonzero().tolist()]
    want = torch.stack([x[row] for row, _ in places]) if places else x[:0]
    assert grouping.counts.tolist() == [int((idx == number).sum()) for number in range(experts)]
    assert torch.equal(grouping.expand(x), want)
    assert grouping.expand_slots(weights).tolist() == [weights[place].item() for place in places]
    assert torch.equal(grouping.spread(grouping.expand_slots(weights)), torch.where(idx >= 0, weights, 0.0))
    torch.testing.assert_close(grouping.reduce(want), x * (idx >= 0).sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    """Ones beside 2048: in half precision none of them would count."""
    y = torch.ones(1025, 3, dtype=dtype)
    y[0] = 2048
    assert torch.equal(sum_rows(y, torch.zeros(1025, dtype=torch.int64), 2)[0], torch.full((3,), 3072, dtype=dtype))


def test_sums_without_rows_are_zeros() -> None:
    assert torch.equal(sum_rows(torch.ones(0, 3), torch.zeros(0, dtype=torch.int64), 2), torch.zeros(2, 3))
    assert sum_rows(torch.ones(2, 3), torch.tensor([3, 1]), 4).tolist() == [[0] * 3, [1] * 3, [0] * 3, [1] * 3]
