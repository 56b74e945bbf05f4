"""The contract's check for DeepEP, which carries bfloat16 (or e4m3) to every rank, its own among them, and bfloat16 back."""

from __future__ import annotations

import torch

from kernels.dispatch.fp8 import dequantize, quantize
from tests.kernels.dispatch.fleet import Factory, Fleet
from tests.kernels.dispatch.suite import Case, Outcome, Tokens, check_arrivals, dense, go, tokens_of

ROUNDING = 8e-3
"""Of a result: to bfloat16 at each of two ends, relative to 1."""


def carried(tokens: Tokens, case: Case, wire: str) -> torch.Tensor:
    """[T, K, H]: what each slot's expert sees of its token."""
    rows = tokens.x.bfloat16()
    if wire == "fp8":
        rows = dequantize(*quantize(rows), torch.bfloat16)
    return rows.to(case.dtype)[:, None].expand(-1, case.top, -1)


def check(fleet: Fleet, factory: Factory, width: int, case: Case, wire: str = "same") -> None:
    """The case's outcome is the dense one."""
    outcomes = fleet.run(go, factory, width, case)
    everything = [tokens_of(case, rank, width) for rank in range(fleet.world)]
    views = [carried(tokens, case, wire) for tokens in everything]
    local = case.experts // fleet.world
    for rank, (tokens, view, outcome) in enumerate(zip(everything, views, outcomes, strict=True)):
        check_arrivals(case, everything, views, range(rank * local, (rank + 1) * local), outcome)
        check_results(tokens, view, outcome, f"rank {rank} of {case}")
        assert outcome.result.dtype == outcome.x_gradient.dtype == case.dtype
        assert not outcome.weights_gradient[tokens.idx < 0].any()


def check_results(tokens: Tokens, view: torch.Tensor, outcome: Outcome, where: str) -> None:
    """Result and gradients are those of one dense pass, up to the rounding of what was carried."""
    top, hidden = view.shape[1:]
    for name, got, want, size in zip(
        ("result", "gradient of x", "gradient of the weights"),
        (outcome.result, outcome.x_gradient, outcome.weights_gradient),
        dense(tokens, view),
        # Sums of K slots of about 2, or of H products, whose errors are independent.
        (2 + top, 4 + 2 * top, 8 * hidden**0.5 + 8),
        strict=True,
    ):
        message = f"{where}: {name}: "
        torch.testing.assert_close(
            got.double(), want, rtol=0, atol=ROUNDING * size, msg=lambda text, at=message: at + text
        )
