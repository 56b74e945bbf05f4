"""What is the hierarchical path's own: what crosses nodes and how often, its groups, its chunks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from configs.failure import BadConfig
from kernels.dispatch.all_to_all import AllToAll
from kernels.dispatch.contract import Dispatcher
from kernels.dispatch.hierarchical import Hierarchical
from kernels.dispatch.topology import Topology, topology_of
from tests.kernels.dispatch.fleet import Fleet, Member
from tests.kernels.dispatch.suite import Case, check, dense, tokens_of

pytestmark = pytest.mark.timeout(300)
FP8 = partial(Hierarchical, wire="fp8")
CASE = Case(3, (64, 64, 64, 64), 64, 8, 1024, dtype=torch.bfloat16)
TABLE = 4 * (3 + 2 * 8)
"""Bytes of the counts that a rank tells another: 8 chunks at most."""


def _bytes(member: Member, factory: Callable[..., Dispatcher], case: Case) -> list[list[int]]:
    """Bytes to other nodes and inside this one: of a dispatch, of a combine, of both backward."""
    tokens = tokens_of(case, member.rank, 2)
    backend = member.dispatcher(factory, 2, case.experts)
    marks = [(backend.inter_node_bytes, backend.intra_node_bytes)]

    def mark() -> None:
        marks.append((backend.inter_node_bytes, backend.intra_node_bytes))

    got = backend.dispatch(tokens.x.requires_grad_(), tokens.idx, tokens.weights.requires_grad_())
    mark()
    result = backend.combine(got.x, got.route)
    mark()
    result.sum().backward()
    mark()
    return [
        [after - before for before, after in zip(*pair, strict=True)] for pair in zip(marks, marks[1:], strict=False)
    ]


def _copies(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [W]: slots that a rank has for each rank, and whether they are on another node."""
    to = tokens_of(case, rank, 2).idx // (case.experts // len(case.tokens))
    return torch.bincount(to.flatten(), minlength=len(case.tokens)), torch.arange(len(case.tokens)) // 2 != rank // 2


def _crossing(case: Case, rank: int) -> tuple[list[int], int]:
    """Tokens that a rank has for each node, 0 for its own, and its slots for other nodes."""
    idx = tokens_of(case, rank, 2).idx
    node = idx // (case.experts // len(case.tokens) * 2)
    counts = [int((node == each).any(1).sum()) for each in range(len(case.tokens) // 2)]
    counts[rank // 2] = 0
    return counts, int(((node != rank // 2) & (idx >= 0)).sum())


def _entering(case: Case, rank: int, at: int) -> tuple[int, int]:
    """Tokens and slots for the experts of rank `at` that pass through a rank of its node: those of its rail's ranks."""
    local = case.experts // len(case.tokens)
    hits = [tokens_of(case, other, 2).idx // local == at for other in range(rank % 2, len(case.tokens), 2)]
    return sum(int(hit.any(1).sum()) for hit in hits), sum(int(hit.sum()) for hit in hits)


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("wire", ["same", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_crosses_to_a_node_once_and_its_sum_back_once(
    fleet: Callable[[int], Fleet], world: int, wire: str, dtype: torch.dtype
) -> None:
    case = Case(3, (64, 0, 20, 5, 64, 64, 1, 64)[:world], 64, 8, 200, "uniform", 0.2, dtype)
    row = narrow = dtype.itemsize * 200
    coded = row
    if wire == "fp8":
        coded, narrow = 200 + 2 * 4, 2 * 200
    crossing = [_crossing(case, rank) for rank in range(world)]
    steps = fleet(world).run(_bytes, partial(Hierarchical, wire=wire), case)
    for rank, (dispatch, combine, backward) in enumerate(steps):
        leave, slots = crossing[rank]
        back = sum(crossing[other][0][rank // 2] for other in range(rank % 2, world, 2))
        entered = sum(
            int((tokens_of(case, other, 2).idx // (64 // world * 2) == rank // 2).sum())
            for other in range(rank % 2, world, 2)
            if other // 2 != rank // 2
        )
        assert dispatch[0] == TABLE * (world - 2) + sum(leave) * coded + slots * 5
        assert combine[0] == back * narrow
        # The gradient of the combine goes as the dispatch went, that of the dispatch as the combine, with the weights'.
        assert backward[0] == sum(leave) * narrow + back * narrow + 4 * entered
        # Inside the node: once to the other rank, and its sum back.
        rows, records = _entering(case, rank, rank ^ 1)
        returned, values = _entering(case, rank ^ 1, rank)
        assert dispatch[1] == TABLE + rows * row + records * 5
        assert combine[1] == returned * row
        assert backward[1] == rows * row + returned * row + 4 * values


def test_all_to_all_counts_a_copy_for_each_slot(fleet: Callable[[int], Fleet]) -> None:
    for rank, (dispatch, combine, _) in enumerate(fleet(4).run(_bytes, AllToAll, CASE)):
        slots, remote = _copies(CASE, rank)
        beside = torch.arange(4) == rank ^ 1
        for level, ranks in enumerate((remote, beside)):
            assert dispatch[level] == int(slots[ranks].sum()) * (2048 + 4) + int(ranks.sum()) * 16 * 4
        came = sum(int(_copies(CASE, other)[0][rank]) for other in range(4) if other // 2 != rank // 2)
        assert combine[0] == came * 2048


@pytest.mark.parametrize(("world", "least", "least_fp8"), [(4, 3.9, 5.0), (8, 2.1, 2.8)])
def test_fewer_bytes_cross_nodes_than_straight(
    fleet: Callable[[int], Fleet], world: int, least: float, least_fp8: float
) -> None:
    case = Case(3, (256,) * world, 64, 8, 1024, dtype=torch.bfloat16)

    def crossed(factory: Callable[..., Dispatcher]) -> int:
        return sum(each[0] for steps in fleet(world).run(_bytes, factory, case) for each in steps[:2])

    straight = crossed(AllToAll)
    assert straight / crossed(Hierarchical) >= least
    assert straight / crossed(FP8) >= least_fp8


def test_what_stays_on_its_node_never_crosses(fleet: Callable[[int], Fleet]) -> None:
    """All tokens of all ranks choose experts of one node: its own ranks send no row away."""
    case = Case(3, (9, 9, 9, 9), 16, 4, 16, "one_node")
    for rank, (dispatch, combine, _) in enumerate(fleet(4).run(_bytes, FP8, case)):
        home = case.seed % 16 // 8 == rank // 2
        assert (dispatch[0] == 2 * TABLE) == home
        assert (combine[0] == 0) != home


def test_ranks_that_choose_other_numbers_of_chunks_agree(fleet: Callable[[int], Fleet]) -> None:
    check(fleet(4), Hierarchical, 2, Case(5, (700, 0, 3, 300), 16, 8, 512))


def _fp8_error(member: Member) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    case = Case(9, (30, 30), 8, 2, 256, "duplicates")
    tokens = tokens_of(case, member.rank, 1)
    backend = member.dispatcher(FP8, 1, 8)
    got = backend.dispatch(tokens.x, tokens.idx, tokens.weights)
    result = backend.combine(got.x * got.weights[:, None], got.route)
    return result, tokens.x * tokens.weights.sum(1)[:, None], tokens.x.abs().amax(1, keepdim=True)


def test_fp8_costs_a_sixteenth_at_most(fleet: Callable[[int], Fleet]) -> None:
    differ = False
    for got, want, largest in fleet(2).run(_fp8_error):
        # Half a step of e4m3, or its least step; then bfloat16 on the way back.
        assert ((got - want).abs() <= want.abs() * (2**-4 + 2**-7) + 2 * largest * 2**-17).all()
        differ = differ or not torch.equal(got, want)
    assert differ


def _in_part_of_the_world(member: Member, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks 0, 2 are one group of two nodes, 1, 3 another; as training replicas are."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[member.rank % 2]
    result = torch.zeros(0)
    # Groups that were closed must not be mistaken for those that follow.
    for _ in range(2):
        backend = Hierarchical(Topology(group, member.rank // 2, ((0,), (1,))), case.experts)
        tokens = tokens_of(case, member.rank // 2, 1)
        x = tokens.x.clone().requires_grad_()
        got = backend.dispatch(x, tokens.idx, tokens.weights)
        result = backend.combine(got.x * got.weights[:, None] * (1 + member.rank % 2), got.route)
        result.backward(tokens.gradient)
        assert x.grad is not None
        dist.barrier(group)
        backend.close()
    dist.destroy_process_group(group)
    return result.detach(), tokens.x * tokens.weights.sum(1)[:, None] * (1 + member.rank % 2)


def test_the_group_may_be_a_part_of_the_world(fleet: Callable[[int], Fleet]) -> None:
    for got, want in fleet(4).run(_in_part_of_the_world, Case(2, (7, 4), 4, 3)):
        torch.testing.assert_close(got, want)


def _refused(member: Member) -> list[str]:
    world = member.topology(1).group
    said = []
    for nodes, experts, backend in (
        (((0, 1, 2), (3,)), 8, Hierarchical),
        (((0, 2), (1, 3)), 8, Hierarchical),
        (((0, 1), (2, 3)), 6, Hierarchical),
        (((0, 1), (2, 3)), 6, AllToAll),
    ):
        with pytest.raises(BadConfig) as caught:
            backend(Topology(world, member.rank, nodes), experts)
        said.append(str(caught.value))
    return said


def test_what_it_cannot_serve_it_refuses(fleet: Callable[[int], Fleet]) -> None:
    for uneven, scattered, odd, odd_too in fleet(4).run(_refused):
        assert "unevenly on 2 nodes" in uneven and "all_to_all" in uneven and "unevenly" in scattered
        assert (
            odd
            == odd_too
            == (
                "6 experts cannot be shared evenly by 4 ranks; set train.expert_parallel to a divisor of model.num_experts"
            )
        )


def _topologies(member: Member) -> list[tuple[tuple[int, ...], ...]]:
    group = member.topology(1).group
    found = []
    for settings in (
        {"TANDEM_NODE": "ab"[member.rank // 2]},
        {"TANDEM_NODE": "ab"[member.rank % 2], "LOCAL_WORLD_SIZE": "2"},
        {"LOCAL_WORLD_SIZE": "2", "RANK": str(member.rank)},
        {},
    ):
        os.environ.update(settings)
        found.append(topology_of(group).nodes)
        for name in settings:
            del os.environ[name]
    return found


def test_ranks_find_who_shares_their_node(fleet: Callable[[int], Fleet]) -> None:
    for labelled, label_first, torchrun, one_host in fleet(4).run(_topologies):
        assert labelled == torchrun == ((0, 1), (2, 3))
        assert label_first == ((0, 2), (1, 3))
        assert one_host == ((0, 1, 2, 3),)


def _local(member: Member) -> tuple[range, int]:
    backend = member.dispatcher(Hierarchical, 2, 16)
    return backend.local_experts, backend.num_local_experts


def test_ranks_hold_their_experts_in_order(fleet: Callable[[int], Fleet]) -> None:
    assert fleet(4).run(_local) == [(range(first, first + 4), 4) for first in (0, 4, 8, 12)]


def test_the_dense_pass_is_what_it_says() -> None:
    """The reference itself, on a case done by hand: one expert, number 0, is sin(x) of weight 1/2."""
    tokens = tokens_of(Case(1, (2,), 1, 1, 3), 0, 1)
    tokens = tokens._replace(weights=torch.full((2, 1), 0.5))
    result, of_x, of_weights = dense(tokens, tokens.x[:, None])
    x, gradient = tokens.x.double(), tokens.gradient.double()
    torch.testing.assert_close(result, x.sin() / 2)
    torch.testing.assert_close(of_x, gradient * x.cos() / 2)
    torch.testing.assert_close(of_weights, (gradient * x.sin()).sum(1, keepdim=True))
