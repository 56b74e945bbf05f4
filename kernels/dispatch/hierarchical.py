"""hierarchical: a token crosses to each node once and is forwarded there; its results are summed there and return once.

Two levels, as in DeepEP's kernels for several nodes (github.com/deepseek-ai/DeepEP): a token crosses over the rail, the
ranks with the same place in each node, to the rank with its sender's place; that one forwards it to each rank of its node
that has an expert for it. Results come back the same way: summed at the expert's rank, summed again where the token had
entered the node, then sent home. What an expert of the sender's own node needs never leaves the node.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from configs.failure import BadConfig
from kernels.dispatch.contract import DROPPED, Dispatcher, Received
from kernels.dispatch.fp8 import dequantize, quantize
from kernels.dispatch.grouping import Grouping, sum_rows
from kernels.dispatch.hop import Hop, Slots, aligned, decode, encode, plan
from kernels.dispatch.topology import Topology
from kernels.dispatch.wire import Exchange, Lane, as_bytes

MOST_CHUNKS = 8
"""Parts that `chunks=0` chooses at most: each costs the latency of two exchanges."""
CHUNK_BYTES = 3 << 18
"""Least bytes that one rank sends across nodes in a part of its own choosing."""

Wire = Literal["same", "fp8"]


class Crossing(NamedTuple):
    """The level between nodes."""

    hop: Hop
    sizes: list[int]
    """Tokens of each chunk."""
    incoming: list[list[int]]
    """For each chunk, rows from each node."""
    records: list[int]
    """Records from each node."""
    own: torch.Tensor
    """int64: which of the used slots stay on this node."""
    away: torch.Tensor
    """int64: which leave it; the hop's slots."""


class Forwarding(NamedTuple):
    """The level inside a node. Its rows in a chunk are the chunk's own tokens, then what crossed."""

    hop: Hop
    incoming: list[list[int]]
    """For each chunk, rows from each rank of the node."""
    records: list[int]
    """Records from each rank of the node."""


class Flight(NamedTuple):
    """A chunk between nodes."""

    exchange: Exchange
    landing: torch.Tensor
    """[rows, H]: the chunk's own tokens, then what crosses."""
    own: int
    """Rows of the former."""


class Way(NamedTuple):
    """The way back of one dispatch."""

    crossing: Crossing
    forwarding: Forwarding
    grouping: Grouping
    """The expansion to experts at the end."""
    places: torch.Tensor
    """int64 [S]: the used slots (token * K + slot)."""
    shape: torch.Size
    """[T, K]."""


class Hierarchical(Dispatcher):
    """Carries a token to each node at most once.

    Args:
        topology: The group; uniform, that is, equally many ranks on each node, numbered node by node.
        num_experts: E, a multiple of W.
        wire: Type of a token between nodes. `fp8` is e4m3 with a float32 scale per 128 values, for a dispatch's rows
            only: its results and all gradients cross as bfloat16 if they are float32, else as they are. `same` changes
            nothing.
        chunks: Parts in which the two levels overlap, the same on every rank; 0 chooses by bytes, at most 8.
        timeout: How long an exchange over the groups made here may take; torch's default if not given.

    Making one is collective over the group, which may be a part of the world; its ranks must have made equally many
    process groups before, as ever with `use_local_synchronization`.

    Raises:
        BadConfig: E is not a multiple of W, or the topology is not uniform.
    """

    name = "hierarchical"

    def __init__(
        self,
        topology: Topology,
        num_experts: int,
        wire: Wire = "same",
        chunks: int = 0,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(topology, num_experts)
        if not topology.uniform:
            raise BadConfig(
                f"the {topology.size} ranks lie unevenly on {len(topology.nodes)} nodes ({topology.nodes}), which"
                " kernels.dispatch: hierarchical cannot use; give every node equally many consecutive ranks or set"
                " kernels.dispatch: all_to_all"
            )
        self.wire, self.chunks = wire, chunks
        self._timeout = timeout
        self._width = len(topology.nodes[0])
        self._node_experts = self.num_local_experts * self._width
        self._all = Lane(topology.group, topology.rank, topology.node_of, self.traffic)
        rail = [ranks[topology.local] for ranks in topology.nodes]
        self._rail = Lane(self._subgroup(rail), topology.node, range(len(rail)), self.traffic)
        mine = topology.nodes[topology.node]
        self._node = Lane(self._subgroup(list(mine)), topology.local, [0] * self._width, self.traffic)

    def _subgroup(self, ranks: list[int]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        whole = self.topology.group
        group = dist.new_group(
            [dist.get_global_rank(whole, rank) for rank in ranks],
            timeout=self._timeout,
            backend=dist.get_backend_config(whole),
            use_local_synchronization=True,
            group_desc="expert_parallel",
        )
        assert isinstance(group, dist.ProcessGroup)
        return group

    def close(self) -> None:
        """As `Dispatcher.close`."""
        if not self._closed:
            for lane in (self._rail, self._node):
                if lane.group is not None:
                    dist.destroy_process_group(lane.group)
        super().close()

    def _send(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Received:
        flat = topk_idx.reshape(-1)
        places = (flat != DROPPED).nonzero()[:, 0]
        slots = Slots(places // topk_idx.shape[1], flat[places], topk_weights.reshape(-1)[places])
        crossing, incoming, records = self._plan_crossing(slots, x)
        leaving = Slots(*(each[crossing.away] for each in slots))
        leaving = leaving._replace(experts=leaving.experts % self._node_experts)
        notes = self._rail.exchange(
            encode(leaving, crossing.hop, self._node_experts), crossing.hop.records, crossing.records
        )
        flight = self._depart(x, crossing, 0, self.wire == "fp8")
        hop, notes = self._plan_forwarding(slots, crossing, notes.wait(), records)
        forwarding = Forwarding(hop, incoming, records)
        rows = self._forth(x, crossing, forwarding, flight, self.wire == "fp8")
        last = decode(notes.wait(), self.num_local_experts, incoming)
        grouping = Grouping(last.experts, last.rows, len(rows), self.num_local_experts)
        way = Way(crossing, forwarding, grouping, places, topk_idx.shape)
        return Received(grouping.expand(rows), grouping.expand_slots(last.weights), grouping.counts, way)

    def _resend(self, x: torch.Tensor, route: Way) -> torch.Tensor:
        flight = self._depart(x, route.crossing, 0)
        return route.grouping.expand(self._forth(x, route.crossing, route.forwarding, flight, False))

    def _collect(
        self, y: torch.Tensor, values: torch.Tensor | None, route: Way
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        crossing, grouping = route.crossing, route.grouping
        rows = grouping.reduce(y)
        inside = [self._give_back(rows, route, 0)]
        spread = None if values is None else self._return_values(grouping.spread(values), route)
        chunks = len(crossing.sizes)
        flights: list[Flight] = []
        totals = []
        for chunk in range(chunks):
            if chunk + 1 < chunks:
                inside.append(self._give_back(rows, route, chunk + 1))
            size = crossing.sizes[chunk] + sum(crossing.incoming[chunk])
            partial = sum_rows(inside[chunk].wait(), route.forwarding.hop.copies[chunk], size)
            flights.append(self._go_home(partial, crossing, chunk))
            # One flight stays under way while the one before it lands.
            if chunk:
                totals.append(_sum_up(flights[chunk - 1], crossing.hop.copies[chunk - 1]))
        totals.append(_sum_up(flights[-1], crossing.hop.copies[-1]))
        return totals[0] if chunks == 1 else torch.cat(totals), spread

    def _plan_crossing(self, slots: Slots, x: torch.Tensor) -> tuple[Crossing, list[list[int]], list[int]]:
        """Plan the level between nodes and trade all counts; also the rows of each chunk and the records that the ranks of
        this node are going to send."""
        topology, nodes = self.topology, len(self.topology.nodes)
        node = slots.experts.div(self._node_experts, rounding_mode="floor")
        stays = node == topology.node
        own, away = stays.nonzero()[:, 0], (~stays).nonzero()[:, 0]
        most = self.chunks or MOST_CHUNKS
        chunks = self.chunks or min(most, 1 + min(len(away), len(x) * (nodes - 1)) * x[:1].nbytes // CHUNK_BYTES)
        sizes = _split(len(x), chunks)
        hop = plan(slots.rows[away], node[away], nodes, sizes)

        rank = slots.experts.div(self.num_local_experts, rounding_mode="floor")
        reached = torch.zeros((len(x), topology.size), dtype=torch.bool, device=x.device)
        reached[slots.rows, rank] = True
        # For each rank: chunks, records to it, to its node; then for each chunk rows to it, to its node.
        table = torch.zeros((2 * most + 3, topology.size), dtype=torch.int32)
        table[0] = chunks
        table[1] = torch.bincount(rank, minlength=topology.size)
        table[2] = torch.tensor(hop.records).repeat_interleave(self._width)
        table[3 : 3 + chunks] = torch.stack([part.sum(0) for part in reached.split(sizes)])
        table[3 + most : 3 + most + chunks] = torch.tensor(hop.rows).repeat_interleave(self._width, 1)
        told = self._all.trade(table.t().contiguous().to(x.device)).cpu().view(nodes, self._width, -1)

        agreed = int(told[:, :, 0].max())
        missing = agreed - chunks
        hop = hop._replace(copies=hop.copies + [hop.order[:0]] * missing, rows=hop.rows + [[0] * nodes] * missing)
        mine = told[:, topology.local]
        incoming = mine[:, 3 + most : 3 + most + agreed].t().tolist()
        crossing = Crossing(hop, sizes + [0] * missing, incoming, mine[:, 2].tolist(), own, away)
        return crossing, told[:, :, 3 : 3 + agreed].sum(0).t().tolist(), told[:, :, 1].sum(0).tolist()

    def _plan_forwarding(
        self,
        slots: Slots,
        crossing: Crossing,
        notes: torch.Tensor,
        records: list[int],
    ) -> tuple[Hop, Exchange]:
        """Plan the level inside the node from the records that crossed, and start its records."""
        arrived = decode(notes, self._node_experts, crossing.incoming)
        crossed = [sum(rows) for rows in crossing.incoming]
        first = self.topology.node * self._node_experts
        tokens, rows = slots.rows[crossing.own], arrived.rows
        # Each chunk's own tokens come before what crossed in it.
        tokens, rows = (
            tokens + _before(tokens, crossing.sizes, [0, *crossed]),
            rows + _before(rows, crossed, crossing.sizes),
        )
        rows = torch.cat([tokens, rows])
        experts = torch.cat([slots.experts[crossing.own] - first, arrived.experts])
        weights = torch.cat([slots.weights[crossing.own], arrived.weights])
        sizes = [own + more for own, more in zip(crossing.sizes, crossed, strict=True)]
        to = experts.div(self.num_local_experts, rounding_mode="floor")
        hop = plan(rows, to, self._width, sizes)
        leaving = encode(Slots(rows, experts % self.num_local_experts, weights), hop, self.num_local_experts)
        return hop, self._node.exchange(leaving, hop.records, records)

    def _depart(self, x: torch.Tensor, crossing: Crossing, chunk: int, fp8: bool = False) -> Flight:
        """Start a chunk's tokens across nodes."""
        own, rows = crossing.sizes[chunk], sum(crossing.incoming[chunk])
        start = sum(crossing.sizes[:chunk])
        tokens = x[start : start + own]
        if len(self.topology.nodes) == 1:
            return Flight(Exchange(tokens[:0], None), tokens, own)
        landing = self.scratch.take(("landing", chunk), own + rows, x)
        packed = _pack(tokens) if fp8 else tokens.to(self._narrow(x.dtype))
        out = landing[own:] if packed.dtype == x.dtype else self.scratch.take(("crossed", chunk), rows, packed)
        leaving = self.scratch.gather(("crossing", chunk), packed, crossing.hop.copies[chunk])
        exchange = self._rail.exchange(leaving, crossing.hop.rows[chunk], crossing.incoming[chunk], out)
        landing[:own] = tokens
        return Flight(exchange, landing, own)

    def _forth(
        self, x: torch.Tensor, crossing: Crossing, forwarding: Forwarding, flight: Flight, fp8: bool
    ) -> torch.Tensor:
        """[T, H], the first chunk of which has departed, -> [R, H] (scratch), once a token that this rank has an expert
        for."""
        arrived = self.scratch.take("arrived", sum(map(sum, forwarding.incoming)), x)
        pending, start = [], 0
        for chunk, incoming in enumerate(forwarding.incoming):
            following = self._depart(x, crossing, chunk + 1, fp8) if chunk + 1 < len(crossing.sizes) else None
            rows = _land(flight, fp8)
            leaving = self.scratch.gather(("leaving", chunk), rows, forwarding.hop.copies[chunk])
            out = arrived[start : start + sum(incoming)]
            pending.append(self._node.exchange(leaving, forwarding.hop.rows[chunk], incoming, out))
            start += sum(incoming)
            if following is not None:
                flight = following
        for exchange in pending:
            exchange.wait()
        return arrived

    def _give_back(self, rows: torch.Tensor, way: Way, chunk: int) -> Exchange:
        """Start a chunk's results [R, H] back to the ranks of this node where their tokens came from."""
        counts = [sum(incoming) for incoming in way.forwarding.incoming]
        start = sum(counts[:chunk])
        leaving = rows[start : start + counts[chunk]]
        sent, received = way.forwarding.incoming[chunk], way.forwarding.hop.rows[chunk]
        return self._node.exchange(leaving, sent, received, self.scratch.take(("arrived", chunk), sum(received), rows))

    def _go_home(self, partial: torch.Tensor, crossing: Crossing, chunk: int) -> Flight:
        """Start a chunk's sums [own tokens + crossed, H] back across nodes."""
        own = crossing.sizes[chunk]
        if len(self.topology.nodes) == 1:
            return Flight(Exchange(partial[:0], None), partial, own)
        rows = sum(crossing.hop.rows[chunk])
        landing = self.scratch.take(("landing", chunk), own + rows, partial)
        leaving = partial[own:].to(self._narrow(partial.dtype))
        out = landing[own:] if leaving.dtype == partial.dtype else self.scratch.take(("crossed", chunk), rows, leaving)
        exchange = self._rail.exchange(leaving, crossing.incoming[chunk], crossing.hop.rows[chunk], out)
        landing[:own] = partial[:own]
        return Flight(exchange, landing, own)

    def _return_values(self, values: torch.Tensor, way: Way) -> torch.Tensor:
        """A value of each slot that arrived here, back to its place: [T, K], 0 in unused slots."""
        crossing, forwarding = way.crossing, way.forwarding
        inside = torch.empty(len(forwarding.hop.order), dtype=values.dtype, device=values.device)
        back = self._node.exchange(values, forwarding.records, forwarding.hop.records)
        inside[forwarding.hop.order] = back.wait()
        stayed = len(crossing.own)
        spread = values.new_zeros(way.shape.numel())
        spread[way.places[crossing.own]] = inside[:stayed]
        if len(self.topology.nodes) > 1:
            back = self._rail.exchange(inside[stayed:], crossing.records, crossing.hop.records)
            spread[way.places[crossing.away[crossing.hop.order]]] = back.wait()
        return spread.reshape(way.shape)

    def _narrow(self, dtype: torch.dtype) -> torch.dtype:
        """How results and gradients cross nodes."""
        return torch.bfloat16 if self.wire == "fp8" and dtype.itemsize > 2 else dtype


def _split(tokens: int, chunks: int) -> list[int]:
    size = -(-tokens // chunks)
    return [max(0, min(size, tokens - chunk * size)) for chunk in range(chunks)]


def _before(rows: torch.Tensor, sizes: list[int], others: list[int]) -> torch.Tensor:
    """For rows numbered through chunks of `sizes`: how many others, of which `others[c]` come before chunk c's rows and
    after chunk c - 1's, come before each row."""
    if len(sizes) == 1:
        return rows.new_full((1,), others[0])
    before = torch.tensor(others[: len(sizes)], device=rows.device).cumsum(0)
    ends = torch.tensor(sizes, device=rows.device).cumsum(0)
    return before[torch.bucketize(rows, ends, right=True)]


def _pack(tokens: torch.Tensor) -> torch.Tensor:
    """uint8 [T, H + 4 · ceil(H / 128)]: e4m3 values, then their scales."""
    values, scales = quantize(tokens)
    return torch.cat([as_bytes(values), as_bytes(scales)], 1)


def _land(flight: Flight, fp8: bool) -> torch.Tensor:
    """Wait for a chunk; its own rows and what crossed, in the type of the activations."""
    arrived, landing = flight.exchange.wait(), flight.landing
    if arrived.dtype == torch.uint8 and fp8:
        hidden = landing.shape[1]
        values, scales = arrived[:, :hidden].view(torch.float8_e4m3fn), aligned(arrived[:, hidden:], torch.float32)
        landing[flight.own :] = dequantize(values, scales, landing.dtype)
    elif arrived.dtype != landing.dtype:
        landing[flight.own :] = arrived
    return landing


def _sum_up(flight: Flight, copies: torch.Tensor) -> torch.Tensor:
    """Wait for a chunk's results and add to each token's own sum those that crossed."""
    landing = _land(flight, False)
    if flight.exchange.work is None:
        return landing
    return sum_rows(landing, torch.cat([torch.arange(flight.own, device=copies.device), copies]), flight.own)
