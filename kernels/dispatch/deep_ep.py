"""deep_ep: DeepEP carries tokens once to every rank that has an expert of theirs, and sums of results back.

What DeepEP asks for and the contract does not promise is made up for here: rows of bfloat16 (other types are rounded to
it, on the way there and back), a width that is a multiple of 256, experts that occur once in a token, at least one token
a rank, and a number of tokens that no rank exceeds.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from configs.failure import BadConfig
from configs.kernels import KernelsConfig
from kernels.dispatch.contract import DROPPED, Dispatcher, Received
from kernels.dispatch.deep_ep_buffers import Channel, ElasticChannel, LegacyChannel
from kernels.dispatch.deep_ep_environment import load
from kernels.dispatch.fp8 import dequantize, quantize
from kernels.dispatch.grouping import TableGrouping, group
from kernels.dispatch.topology import Topology

MOST_TOP = 32
"""A warp of DeepEP's kernels has a lane for each slot of a token."""
ROUND = 128
"""Buffers are made for a multiple of so many tokens."""
ROW = torch.bfloat16


def why_not(kernels: KernelsConfig, topology: Topology) -> str:
    """Why DeepEP cannot be tried by these ranks with these settings; empty if it can."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    try:
        load(kernels.deep_ep, len(topology.nodes), topology.size)
    except BadConfig as failure:
        return failure.sentence
    return ""


class Way(NamedTuple):
    """The way back of one dispatch."""

    channel: Channel
    handle: Any
    grouping: TableGrouping
    reach: torch.Tensor
    """int64 [2]: rows to other nodes, and to other ranks of a node."""
    tokens: int
    hidden: int
    dtype: torch.dtype


class DeepEP(Dispatcher):
    """One exchange a dispatch and one a combine, by DeepEP's own kernels; on GPUs.

    Buffers are made at the first dispatch, by DeepEP's own hints, and anew when more tokens come; earlier ones stay until
    the dispatcher is closed, since backward passes may still need them.

    Args:
        topology: The group.
        num_experts: E.
        kernels: `wire` and the section `deep_ep` count.
        library: The package deep_ep; None imports it.

    Raises:
        BadConfig: DeepEP cannot work here; see `deep_ep_environment`.
    """

    name = "deep_ep"

    def __init__(
        self,
        topology: Topology,
        num_experts: int,
        kernels: KernelsConfig | None = None,
        library: ModuleType | None = None,
    ) -> None:
        super().__init__(topology, num_experts)
        kernels = kernels or KernelsConfig()
        self.config, self.wire = kernels.deep_ep, kernels.wire
        if topology.size == 1:
            raise BadConfig("deep_ep has nothing to do for one rank; set kernels.dispatch to all_to_all")
        self.library = library or load(self.config, len(topology.nodes), topology.size)
        older = self.config.api == "legacy" or not hasattr(self.library, "ElasticBuffer")
        self._open: type[ElasticChannel] | type[LegacyChannel] = LegacyChannel if older else ElasticChannel
        self._channels: dict[tuple[int, int], list[tuple[int, Channel]]] = {}
        self._sent: torch.Tensor | None = None

    @property
    def inter_node_bytes(self) -> int:
        """As `Dispatcher`; DeepEP does not tell, so that this follows from the routing. A combine counts as much as its
        dispatch, which is right for all ranks together."""
        return 0 if self._sent is None else int(self._sent[0])

    @property
    def intra_node_bytes(self) -> int:
        """As `inter_node_bytes`."""
        return 0 if self._sent is None else int(self._sent[1])

    def close(self) -> None:
        """See `Dispatcher.close`."""
        super().close()
        for made in self._channels.values():
            for _, channel in made:
                channel.close()
        self._channels.clear()

    def _send(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Received:
        (tokens, hidden), top = x.shape, topk_idx.shape[1]
        if top > MOST_TOP:
            raise BadConfig(f"deep_ep knows at most {MOST_TOP} experts a token, not {top}; take another dispatcher")
        most, copies = self._agree(topk_idx)
        self._check_experts(copies)
        channel = self._channel(most, hidden, top)
        idx, weights = topk_idx, topk_weights
        if copies > 1:
            # An expert that occurs twice in a token becomes two; V2's kernels would stop at it.
            idx = torch.where(idx == DROPPED, DROPPED, idx * copies + _occurrence(idx))
        if not tokens:
            idx, weights = idx.new_full((1, top), DROPPED), weights.new_zeros((1, top))
        rows = _padded(x, channel.multiple)
        reach = _reach(topk_idx, self.topology, self.num_local_experts)
        self._count(reach, x.shape[1] * (1 if self.wire == "fp8" else ROW.itemsize))
        got = channel.dispatch(
            quantize(rows) if self.wire == "fp8" else rows,
            # Its kernels read the table as rows that follow one another.
            idx.to(self.library.topk_idx_t).contiguous(),
            weights.contiguous(),
            self.num_experts * copies,
        )
        # -1 stays -1: the division rounds down.
        local = got.idx.long() if copies == 1 else got.idx.long().div(copies, rounding_mode="floor")
        grouping = group(local, self.num_local_experts)
        arrived = dequantize(*got.x, ROW) if isinstance(got.x, tuple) else got.x
        way = Way(channel, got.handle, grouping, reach, tokens, hidden, x.dtype)
        return Received(_expanded(arrived, way), grouping.expand_slots(got.weights), grouping.counts, way)

    def _resend(self, x: torch.Tensor, route: Way) -> torch.Tensor:
        self._count(route.reach, x.shape[1] * ROW.itemsize)
        arrived = route.channel.again(_padded(x, route.channel.multiple), route.handle)
        return _expanded(arrived, route)

    def _collect(
        self, y: torch.Tensor, values: torch.Tensor | None, route: Way
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._count(route.reach, y.shape[1] * ROW.itemsize)
        rows = route.grouping.reduce(y).to(ROW)
        if missing := -rows.shape[1] % route.channel.multiple:
            rows = torch.nn.functional.pad(rows, (0, missing))
        # Slots of other ranks are 0 in the table, which sums on the way rely on.
        table = None if values is None else route.grouping.spread(values)
        sums, back = route.channel.combine(rows, route.handle, table)
        return (
            sums[: route.tokens, : y.shape[1]].to(y.dtype),
            None if back is None else back[: route.tokens],
        )

    def _check_experts(self, copies: int) -> None:
        """Refuse more experts than its kernels have room for; the same on every rank."""
        experts, local = self.num_experts * copies, self.num_local_experts * copies
        if experts > self._open.most_experts or local > self._open.most_local:
            twice = f" ({copies} copies of each, since a token names an expert {copies} times)" if copies > 1 else ""
            raise BadConfig(
                f"deep_ep has room for {self._open.most_experts} experts and {self._open.most_local} a rank, not {experts} and"
                f" {local}{twice}; set kernels.dispatch to hierarchical"
            )

    def _count(self, reach: torch.Tensor, row: int) -> None:
        """Add rows of so many bytes to the traffic; stays on the device until asked for."""
        sent = reach * row
        self._sent = sent if self._sent is None else self._sent + sent

    def _agree(self, topk_idx: torch.Tensor) -> tuple[int, int]:
        """Most tokens of a rank, and how often an expert occurs in a token at most.

        The exchange also brings the group's NCCL communicator into being before DeepEP takes hold of it.
        """
        limit, tokens = self.config.max_tokens, len(topk_idx)
        if limit and self._channels:
            if tokens > limit:
                raise BadConfig(
                    f"a rank dispatches {tokens} tokens, more than kernels.deep_ep.max_tokens {limit}; raise it, or set 0"
                )
            return limit, 1
        own = torch.stack([torch.full((), tokens, device=topk_idx.device), _occurrence(topk_idx).max() + 1])
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self.topology.group)
        most, copies = own.tolist()
        if limit and most > limit:
            raise BadConfig(
                f"a rank dispatches {most} tokens, more than kernels.deep_ep.max_tokens {limit}; raise it, or set 0"
            )
        if limit and copies > 1:
            raise BadConfig("a token names an expert twice, which needs kernels.deep_ep.max_tokens 0; set it")
        return limit or most, copies

    def _channel(self, tokens: int, hidden: int, top: int) -> Channel:
        """A buffer with room; the same decision on every rank."""
        wide = hidden + -hidden % self._open.multiple
        made = self._channels.setdefault((wide, top), [])
        if not made or (self._open.grows and made[-1][0] < tokens):
            # Twice as much each time, so that what is kept for backward passes is never more than the newest.
            room = max(tokens + -tokens % ROUND, 2 * made[-1][0] if made else 0, ROUND)
            made.append((room, self._open(self.library, self.topology.group, self.config, room, wide, top)))
        return made[-1][1]


def _reach(topk_idx: torch.Tensor, topology: Topology, num_local_experts: int) -> torch.Tensor:
    """int64 [2], on the device: rows that leave the node, and that go from rank to rank of one."""
    ranks, node_of = topology.size, torch.tensor(topology.node_of, device=topk_idx.device)
    goal = torch.where(topk_idx == DROPPED, ranks, topk_idx // num_local_experts)
    to_rank = goal.new_zeros((len(goal), ranks + 1)).scatter_(1, goal, 1)[:, :ranks]
    to_node = goal.new_zeros((len(goal), len(topology.nodes))).index_reduce_(1, node_of, to_rank, "amax")
    inter = to_node.sum() - to_node[:, topology.node].sum()
    # A token arrives by the rail, beside which it is handed on; at most one rank needs no handing.
    intra = to_rank.sum() - to_rank[:, topology.rank].sum() - inter
    return torch.stack([inter, intra.clamp_min(0)])


def _occurrence(idx: torch.Tensor) -> torch.Tensor:
    """int64 [T, K]: how often the slot's expert stands before it in its token; one row of zeros if there is no token."""
    if not len(idx):
        return idx.new_zeros((1, idx.shape[1]))
    same = (idx[:, :, None] == idx[:, None, :]) & (idx != DROPPED)[:, :, None]
    return same.tril(-1).sum(2)


def _padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """bfloat16, at least one row, a width that DeepEP takes."""
    rows = x.to(ROW)
    missing, short = -x.shape[1] % multiple, int(not len(x))
    return torch.nn.functional.pad(rows, (0, missing, 0, short)).contiguous() if missing or short else rows.contiguous()


def _expanded(arrived: torch.Tensor, way: Way) -> torch.Tensor:
    return way.grouping.expand(arrived)[:, : way.hidden].to(way.dtype)
