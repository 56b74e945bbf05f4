"""all_to_all: one copy of a token for every slot that names an expert, straight to the expert's rank.

The plain path that every process group has: the baseline that others are measured against, and what is left when they
cannot be used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from kernels.dispatch.contract import DROPPED, Dispatcher, Received
from kernels.dispatch.topology import Topology
from kernels.dispatch.wire import Exchange, exchange


class Route(NamedTuple):
    """The way back of one dispatch."""

    slots: torch.Tensor
    """int64 [S]: the used slots (token * K + slot), in the order they were sent."""
    sent: list[int]
    """Rows sent to each rank; sums to S."""
    received: list[int]
    """Rows received from each rank; sums to N."""
    order: torch.Tensor
    """int64 [N]: which received row each grouped row is."""
    tokens: int
    top: int


class AllToAll(Dispatcher):
    """Two exchanges a dispatch (counts, rows with their weights and experts), one a combine."""

    name = "all_to_all"

    def __init__(self, topology: Topology, num_experts: int) -> None:
        super().__init__(topology, num_experts)

    def _send(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Received:
        group, ranks = self.topology.group, self.topology.size
        tokens, top = topk_idx.shape
        experts = topk_idx.reshape(-1)
        slots = experts.argsort(stable=True)[(experts == DROPPED).sum() :]
        # Sorted by expert, the counts say everything: no row needs to name its expert.
        outgoing = torch.bincount(experts[slots], minlength=self.num_experts).reshape(ranks, -1)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=group)
        incoming = incoming.cpu()
        sent, received = outgoing.sum(1).tolist(), incoming.sum(1).tolist()
        rows = exchange(x[slots // top], sent, received, group)
        weights = exchange(topk_weights.reshape(-1)[slots], sent, received, group)
        local = torch.arange(self.num_local_experts).repeat(ranks).repeat_interleave(incoming.reshape(-1))
        order = local.argsort(stable=True).to(x.device)
        route = Route(slots, sent, received, order, tokens, top)
        return Received(rows.wait()[order], weights.wait()[order], incoming.sum(0), route)

    def _resend(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        rows = exchange(x[route.slots // route.top], route.sent, route.received, self.topology.group)
        return rows.wait()[route.order]

    def _collect(
        self, y: torch.Tensor, values: torch.Tensor | None, route: Route
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = self._return(y, route)
        # Half precision is summed in float32, as an expert's own products are.
        total = y.new_zeros((route.tokens, y.shape[1]), dtype=torch.promote_types(y.dtype, torch.float32))
        total.index_add_(0, route.slots // route.top, rows.wait().to(total.dtype))
        if values is None:
            return total.to(y.dtype), None
        spread = values.new_zeros(route.tokens * route.top)
        spread[route.slots] = self._return(values, route).wait()
        return total.to(y.dtype), spread.reshape(route.tokens, route.top)

    def _return(self, rows: torch.Tensor, route: Route) -> Exchange:
        """Rows in grouped order on their way back to where they came from."""
        arrived = torch.empty_like(rows)
        arrived[route.order] = rows
        return exchange(arrived, route.received, route.sent, self.topology.group)
