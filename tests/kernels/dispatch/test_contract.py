"""Every backend, on every layout of ranks, does what one dense pass does, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kernels.dispatch.all_to_all import AllToAll
from kernels.dispatch.contract import Dispatcher
from kernels.dispatch.hierarchical import Hierarchical
from tests.kernels.dispatch.fleet import Fleet, Member
from tests.kernels.dispatch.suite import ROUTINGS, Case, cases, check, go, tokens_of

BACKENDS = {
    "all_to_all": AllToAll,
    "hierarchical": Hierarchical,
    "hierarchical in 3 chunks": partial(Hierarchical, chunks=3),
    "hierarchical fp8": partial(Hierarchical, wire="fp8"),
    "hierarchical fp8 in 3 chunks": partial(Hierarchical, wire="fp8", chunks=3),
}
LAYOUTS = {"1x1": (1, 1), "1x2": (2, 2), "2x1": (2, 1), "2x2": (4, 2), "3x2": (6, 2), "4x2": (8, 2)}
"""Nodes x ranks of each: the world and the width of a node."""

pytestmark = pytest.mark.timeout(300)
# To shrink a case that hangs would take minutes; the cases are small.
few = settings(
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(few, max_examples=12)
@given(data=st.data())
def test_what_ranks_do_together_is_the_dense_pass(
    fleet: Callable[[int], Fleet], backend: str, layout: str, data: st.DataObject
) -> None:
    world, width = LAYOUTS[layout]
    check(fleet(world), BACKENDS[backend], width, data.draw(cases(world)), "fp8" in backend)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_kind_of_routing(fleet: Callable[[int], Fleet], backend: str, routing: str) -> None:
    """What the random cases may miss: the kinds of routing, with empty ranks among full ones."""
    case = Case(7, (40, 0, 1, 33), 16, 4, 130, routing, 0.1)
    check(fleet(4), BACKENDS[backend], 2, case, "fp8" in backend)


def _twice(member: Member, factory: Callable[..., Dispatcher], case: Case) -> bool:
    first, second = (go(member, factory, 2, case) for _ in range(2))
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_input_gives_the_same_bits(fleet: Callable[[int], Fleet], backend: str, dtype: torch.dtype) -> None:
    case = Case(11, (50, 20, 0, 31), 16, 8, 32, "duplicates", 0.1, dtype)
    assert all(fleet(4).run(_twice, BACKENDS[backend], case))


def _gradients(member: Member, factory: Callable[..., Dispatcher], of_x: bool, of_weights: bool) -> list[torch.Tensor]:
    tokens = tokens_of(Case(3, (5, 0, 7, 2), 8, 2), member.rank, 2)
    backend = member.dispatcher(factory, 2, 8)
    x, weights = tokens.x.clone().requires_grad_(of_x), tokens.weights.clone().requires_grad_(of_weights)
    got = backend.dispatch(x, tokens.idx, weights)
    result = backend.combine(got.x * got.weights[:, None], got.route)
    if of_x or of_weights:
        result.backward(tokens.gradient)
    else:
        assert not result.requires_grad
    return [each.grad if each.grad is not None else torch.zeros(0) for each in (x, weights)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_come_for_what_asks_for_them(fleet: Callable[[int], Fleet], backend: str) -> None:
    factory = BACKENDS[backend]
    both, of_x, of_weights, none = (
        fleet(4).run(_gradients, factory, *flags)
        for flags in ((True, True), (True, False), (False, True), (False, False))
    )
    for rank in range(4):
        assert torch.equal(both[rank][0], of_x[rank][0]) and not len(of_x[rank][1])
        assert torch.equal(both[rank][1], of_weights[rank][1]) and not len(of_weights[rank][0])
        assert not len(none[rank][0]) and not len(none[rank][1])
    assert both[0][0].any() and both[0][1].any()


def _without_gradients(member: Member, factory: Callable[..., Dispatcher]) -> tuple[bool, torch.Tensor, torch.Tensor]:
    tokens = tokens_of(Case(3, (5, 0, 7, 2), 8, 2), member.rank, 2)
    backend = member.dispatcher(factory, 2, 8)
    with torch.no_grad():
        got = backend.dispatch(tokens.x.requires_grad_(), tokens.idx, tokens.weights)
        result = backend.combine(got.x * got.weights[:, None], got.route)
    return result.requires_grad, result, (tokens.x * tokens.weights.sum(1)[:, None]).detach()


@pytest.mark.parametrize("backend", ["all_to_all", "hierarchical"])
def test_without_gradients_none_are_kept(fleet: Callable[[int], Fleet], backend: str) -> None:
    for asks, result, want in fleet(4).run(_without_gradients, BACKENDS[backend]):
        assert not asks
        torch.testing.assert_close(result, want)


def _two_layers(member: Member, factory: Callable[..., Dispatcher]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two dispatches under way at once, combined in the other order, and one backward pass through both."""
    case = Case(5, (6, 3, 0, 9), 8, 2)
    tokens, other = tokens_of(case, member.rank, 2), tokens_of(Case(6, (6, 3, 0, 9), 8, 2), member.rank, 2)
    backend = member.dispatcher(factory, 2, 8)
    x = tokens.x.clone().requires_grad_()
    one, two = (backend.dispatch(x, each.idx, each.weights) for each in (tokens, other))
    late = backend.combine(two.x * two.weights[:, None], two.route)
    (late + backend.combine(one.x * one.weights[:, None], one.route)).backward(tokens.gradient)
    assert x.grad is not None
    return x.grad, tokens.gradient * (tokens.weights.sum(1) + other.weights.sum(1))[:, None]


@pytest.mark.parametrize("backend", ["all_to_all", "hierarchical", "hierarchical in 3 chunks"])
def test_two_dispatches_may_be_under_way(fleet: Callable[[int], Fleet], backend: str) -> None:
    for got, want in fleet(4).run(_two_layers, BACKENDS[backend]):
        torch.testing.assert_close(got, want)


def _after_close(member: Member, factory: Callable[..., Dispatcher]) -> list[str]:
    backend = factory(member.topology(1), 4)
    tokens = tokens_of(Case(1, (3, 2), 4, 2), member.rank, 1)
    got = backend.dispatch(tokens.x.requires_grad_(), tokens.idx, tokens.weights)
    result = backend.combine(got.x, got.route)
    backend.close()
    backend.close()
    said = []
    for use in (
        lambda: backend.dispatch(tokens.x, tokens.idx, tokens.weights),
        lambda: backend.combine(got.x, got.route),
        lambda: result.sum().backward(),
    ):
        with pytest.raises(RuntimeError) as caught:
            use()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_dispatcher_says_so(fleet: Callable[[int], Fleet], backend: str) -> None:
    for said in fleet(2).run(_after_close, BACKENDS[backend]):
        assert all("closed" in each for each in said) and len(said) == 3


def _misused(member: Member) -> list[str]:
    backend, other = member.dispatcher(AllToAll, 1, 4), Hierarchical(member.topology(1), 4)
    x, idx, weights = torch.ones(2, 3), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2)
    got = backend.dispatch(x, idx, weights)
    said = []
    for use in (
        lambda: backend.dispatch(x.long(), idx, weights),
        lambda: backend.dispatch(x[0], idx, weights),
        lambda: backend.dispatch(x[:1], idx, weights),
        lambda: backend.dispatch(x, idx.int(), weights),
        lambda: backend.dispatch(x, idx, weights[:, :1]),
        lambda: backend.dispatch(x, idx[:, :0], weights[:, :0]),
        lambda: backend.dispatch(x, idx + 4, weights),
        lambda: backend.dispatch(x, idx - 2, weights),
        lambda: backend.combine(got.x[1:], got.route),
        lambda: backend.combine(got.x.int(), got.route),
        lambda: other.combine(got.x, got.route),
    ):
        with pytest.raises(ValueError) as caught:
            use()
        said.append(str(caught.value))
    other.close()
    return said


def test_the_door_refuses_what_does_not_fit(fleet: Callable[[int], Fleet]) -> None:
    said = fleet(1).run(_misused)[0]
    assert said[0] == "x must be floating point [T, H], not torch.int64 [2, 3]"
    assert "topk_idx must be int64 [1, K]" in said[2] and "another dispatcher" in said[-1]
    assert said[6] == "topk_idx names experts 4 to 4; there are 4 (-1: none)"
