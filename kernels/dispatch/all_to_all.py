"""all_to_all: one copy of a token for every slot that names an expert, straight to the expert's rank.

The plain path that every process group has: the baseline that others are measured against, and what is left when they
cannot be used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.dispatch.contract import DROPPED, Dispatcher, Received
from kernels.dispatch.grouping import sum_rows
from kernels.dispatch.topology import Topology
from kernels.dispatch.wire import Exchange, Lane


class Way(NamedTuple):
    """The way back of one dispatch."""

    slots: torch.Tensor
    """int64 [S]: the used slots (token * K + slot), in the order they were sent."""
    sent: list[int]
    """Rows sent to each rank; sums to S."""
    received: list[int]
    """Rows received from each rank; sums to N."""
    order: torch.Tensor
    """int64 [N]: which received row each grouped row is."""
    places: torch.Tensor
    """int64 [N]: which grouped row each received row is."""
    tokens: int
    top: int


class AllToAll(Dispatcher):
    """Three exchanges a dispatch (counts, then rows beside their weights), one a combine.

    Args and Raises: as `Dispatcher`.
    """

    name = "all_to_all"

    def __init__(self, topology: Topology, num_experts: int) -> None:
        super().__init__(topology, num_experts)
        self._lane = Lane(topology.group, topology.rank, topology.node_of, self.traffic)

    def _send(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Received:
        ranks = self.topology.size
        tokens, top = topk_idx.shape
        experts = topk_idx.reshape(-1)
        slots = experts.argsort(stable=True)[(experts == DROPPED).sum() :]
        # Sorted by expert, the counts say everything: no row needs to name its expert.
        outgoing = torch.bincount(experts[slots], minlength=self.num_experts).reshape(ranks, -1)
        incoming = self._lane.trade(outgoing.int()).cpu().long()
        sent, received = outgoing.sum(1).tolist(), incoming.sum(1).tolist()
        rows = self._start(x, slots // top, sent, received)
        weights = self._lane.exchange(topk_weights.reshape(-1)[slots], sent, received)
        local = torch.arange(self.num_local_experts).repeat(ranks).repeat_interleave(incoming.reshape(-1))
        order = local.argsort(stable=True).to(x.device)
        way = Way(slots, sent, received, order, order.argsort(), tokens, top)
        return Received(rows.wait().index_select(0, order), weights.wait()[order], incoming.sum(0), way)

    def _resend(self, x: torch.Tensor, route: Way) -> torch.Tensor:
        rows = self._start(x, route.slots // route.top, route.sent, route.received)
        return rows.wait().index_select(0, route.order)

    def _collect(
        self, y: torch.Tensor, values: torch.Tensor | None, route: Way
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = self._return(y, route)
        back = None if values is None else self._return_values(values, route)
        # Half precision is summed in float32, as an expert's own products are.
        total = sum_rows(rows.wait(), route.slots // route.top, route.tokens)
        if back is None:
            return total, None
        spread = back.rows.new_zeros(route.tokens * route.top)
        spread[route.slots] = back.wait()
        return total, spread.reshape(route.tokens, route.top)

    def _start(self, x: torch.Tensor, tokens: torch.Tensor, sent: list[int], received: list[int]) -> Exchange:
        """Copies of tokens on their way to their experts."""
        leaving = self.scratch.gather("leaving", x, tokens)
        return self._lane.exchange(leaving, sent, received, self.scratch.take("arrived", sum(received), x))

    def _return(self, rows: torch.Tensor, route: Way) -> Exchange:
        """Rows in grouped order on their way back to where they came from."""
        leaving = self.scratch.gather("leaving", rows, route.places)
        return self._lane.exchange(
            leaving, route.received, route.sent, self.scratch.take("arrived", sum(route.sent), rows)
        )

    def _return_values(self, values: torch.Tensor, route: Way) -> Exchange:
        return self._lane.exchange(values[route.places], route.received, route.sent)
