"""The contract of dispatchers as properties, for any backend: what many ranks do together is what one dense pass does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from kernels.dispatch.fp8 import dequantize, quantize
from tests.kernels.dispatch.fleet import Factory, Fleet, Member


@dataclass(frozen=True)
class Case:
    """One dispatch and combine, forward and backward, on every rank."""

    seed: int
    tokens: tuple[int, ...]
    """T of each rank."""
    experts: int
    top: int
    hidden: int = 16
    routing: str = "uniform"
    dropped: float = 0.0
    """Share of unused slots."""
    dtype: torch.dtype = torch.float32


class Tokens(NamedTuple):
    """What one rank has; also the gradient of its result."""

    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    gradient: torch.Tensor


class Outcome(NamedTuple):
    """What one rank got; the first three are `Dispatched`'s."""

    x: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    result: torch.Tensor
    x_gradient: torch.Tensor
    weights_gradient: torch.Tensor


ROUTINGS = ("uniform", "duplicates", "one_expert", "one_rank", "one_node", "node_limited", "none")


def cases(
    world: int,
    hidden: Sequence[int] = (1, 16, 130),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float32, torch.bfloat16, torch.float16),
) -> st.SearchStrategy[Case]:
    """Cases for so many ranks, of the shapes and types that a backend takes."""
    token = st.one_of(st.just(0), st.integers(1, 3), st.integers(4, 40))
    return st.builds(
        Case,
        seed=st.integers(0, 2**31),
        tokens=st.one_of(st.just((0,) * world), st.tuples(*[token] * world)),
        experts=st.sampled_from([world, 4 * world, 72 * world]),
        top=st.sampled_from([1, 2, 3, 8]),
        hidden=st.sampled_from(hidden),
        routing=st.sampled_from(ROUTINGS),
        dropped=st.sampled_from([0.0, 0.3, 1.0]),
        dtype=st.sampled_from(dtypes),
    )


def tokens_of(case: Case, rank: int, width: int) -> Tokens:
    """A rank's tokens, the same wherever they are made."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + rank)
    tokens, ranks = case.tokens[rank], len(case.tokens)
    shape = (tokens, case.top)
    local, node = case.experts // ranks, case.experts // ranks * width
    chosen = case.seed % case.experts
    idx = torch.randint(case.experts, shape, generator=generator)
    if case.routing == "uniform" and case.top <= case.experts:
        idx = torch.rand(tokens, case.experts, generator=generator).argsort(1)[:, : case.top]
    elif case.routing == "one_expert":
        idx = torch.full(shape, chosen)
    elif case.routing == "one_rank":
        idx = chosen // local * local + idx % local
    elif case.routing == "one_node":
        idx = chosen // node * node + idx % node
    elif case.routing == "node_limited":
        idx = torch.randint(case.experts // node, (tokens, 1), generator=generator) * node + idx % node
    elif case.routing == "none":
        idx = torch.full(shape, -1)
    idx = torch.where(torch.rand(shape, generator=generator) < case.dropped, -1, idx)
    x = torch.randn(tokens, case.hidden, generator=generator).to(case.dtype)
    weights = torch.rand(shape, generator=generator)
    return Tokens(x, idx, weights, torch.randn(tokens, case.hidden, generator=generator).to(case.dtype))


def expert(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """What each row's expert makes of it: [N, H], int64 [N] -> [N, H]."""
    number = number[:, None].to(x.dtype)
    return torch.sin(x * (1 + number % 7 / 8)) + number % 5 / 4


def go(member: Member, factory: Factory, width: int, case: Case, device: str = "cpu") -> Outcome:
    """A rank's part in a case."""
    backend = member.dispatcher(factory, width, case.experts)
    tokens = Tokens(*(each.to(device) for each in tokens_of(case, member.rank, width)))
    x, weights = tokens.x.clone().requires_grad_(), tokens.weights.clone().requires_grad_()
    got = backend.dispatch(x, tokens.idx, weights)
    numbers = torch.arange(backend.local_experts.start, backend.local_experts.stop).repeat_interleave(got.counts)
    y = expert(got.x.float(), numbers.to(device)) * got.weights[:, None]
    result = backend.combine(y.to(case.dtype), got.route)
    result.backward(tokens.gradient)
    assert x.grad is not None and weights.grad is not None
    outcome = Outcome(got.x, got.weights, got.counts, result, x.grad, weights.grad)
    return Outcome(*(each.detach().cpu() for each in outcome))


def dense(tokens: Tokens, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Result and gradients [T, H], [T, H], [T, K] of a rank's tokens in one float64 pass without dispatch.

    Args:
        x: [T, K, H]: the token as each slot's expert sees it; its rounding has no gradient.
    """
    exact, weights = tokens.x.double().requires_grad_(), tokens.weights.double().requires_grad_()
    result = torch.zeros_like(exact)
    for slot in range(tokens.idx.shape[1]):
        number = tokens.idx[:, slot]
        seen = exact + (x[:, slot].double() - exact).detach()
        result = result + (number >= 0)[:, None] * weights[:, slot, None] * expert(seen, number.clamp_min(0))
    result.backward(tokens.gradient.double())
    assert exact.grad is not None and weights.grad is not None
    return result.detach(), exact.grad, weights.grad


def seen(tokens: Tokens, case: Case, rank: int, width: int, fp8: bool) -> torch.Tensor:
    """[T, K, H]: what each slot's expert sees of its token: e4m3 if it crossed nodes so, else the token."""
    x = tokens.x[:, None].expand(-1, case.top, -1)
    if not fp8:
        return x
    node = case.experts // len(case.tokens) * width
    crosses = tokens.idx // node != rank // width
    return torch.where(crosses[..., None], dequantize(*quantize(tokens.x), case.dtype)[:, None], x)


def check(fleet: Fleet, factory: Factory, width: int, case: Case, fp8: bool = False, device: str = "cpu") -> None:
    """The case's outcome is the dense one.

    Args:
        fp8: Whether tokens cross nodes as e4m3, and all else as bfloat16.
    """
    outcomes = fleet.run(go, factory, width, case, device)
    everything = [tokens_of(case, rank, width) for rank in range(fleet.world)]
    views = [seen(tokens, case, rank, width, fp8) for rank, tokens in enumerate(everything)]
    local = case.experts // fleet.world
    rounding = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[case.dtype]
    if fp8:
        rounding = max(rounding, 4e-3)
    for rank, (tokens, view, outcome) in enumerate(zip(everything, views, outcomes, strict=True)):
        check_arrivals(case, everything, views, range(rank * local, (rank + 1) * local), outcome)
        # Each of a few sums is rounded once: of K slots of about 2, or, for a weight, of H products whose errors are independent.
        for name, got, want, size in zip(
            ("result", "gradient of x", "gradient of the weights"),
            (outcome.result, outcome.x_gradient, outcome.weights_gradient),
            dense(tokens, view),
            (2 + case.top, 4 + 2 * case.top, 8 * case.hidden**0.5 + 8),
            strict=True,
        ):
            message = f"rank {rank} of {case}: {name}: "
            torch.testing.assert_close(
                got.double(), want, rtol=0, atol=rounding * 2 * size, msg=lambda text, at=message: at + text
            )
        assert outcome.result.dtype == outcome.x_gradient.dtype == case.dtype
        assert not outcome.weights_gradient[tokens.idx < 0].any()


def check_arrivals(
    case: Case, everything: list[Tokens], views: list[torch.Tensor], experts: range, outcome: Outcome
) -> None:
    """Each expert has the row and the weight of every slot that names it, and no other."""
    assert outcome.counts.dtype == torch.int64 and len(outcome.counts) == len(experts)
    assert len(outcome.x) == len(outcome.weights) == int(outcome.counts.sum())
    groups = zip(outcome.x.split(outcome.counts.tolist()), outcome.weights.split(outcome.counts.tolist()), strict=True)
    for number, (rows, weights) in zip(experts, groups, strict=True):
        places = [tokens.idx == number for tokens in everything]
        want = torch.cat([view[at] for view, at in zip(views, places, strict=True)])
        want_weights = torch.cat([tokens.weights[at] for tokens, at in zip(everything, places, strict=True)])
        assert len(rows) == len(want), f"expert {number} of {case}: {len(rows)} rows, not {len(want)}"
        # No two slots have the same weight, so it tells them apart.
        weights, order = weights.sort()
        want_weights, want_order = want_weights.sort()
        assert torch.equal(weights, want_weights), f"expert {number} of {case}: other weights"
        assert torch.equal(rows[order], want[want_order]), f"expert {number} of {case}: other rows"
