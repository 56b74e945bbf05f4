"""The contract of a dispatcher: tokens travel to the ranks that hold their experts, results travel back.

A backend moves rows; what is differentiable about that is written once, here: the gradient of a dispatch is a combine
and the gradient of a combine is a dispatch along the same route. All calls are collective over the expert-parallel
group, backward passes included: every rank makes them in the same order, also with no tokens at all.

The division of labour is DeepEP's (github.com/deepseek-ai/DeepEP): routing weights travel with the tokens, the expert's
rank multiplies by them, and combine is a plain sum, so that partial sums can be made on the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from configs.failure import BadConfig
from kernels.dispatch.topology import Topology

DROPPED = -1
"""In `topk_idx`: the slot is unused."""


class Dispatched(NamedTuple):
    """What a rank received: N rows, one for each (token, slot) that named one of its experts."""

    x: torch.Tensor
    """[N, H]: rows grouped by local expert, ascending."""
    weights: torch.Tensor
    """float32 [N]: routing weight of each row; the expert's output is to be multiplied by it."""
    counts: torch.Tensor
    """int64 [E / W], on the CPU: rows of each local expert."""
    route: Any
    """Opaque: the way back, for `combine`. May be used once forward; backward uses it again."""


class Received(NamedTuple):
    """`Dispatched` without gradients, as a backend returns it."""

    x: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    route: Any


class Dispatcher(ABC):
    """Carries tokens to experts and back, over one expert-parallel group of W ranks.

    Rank r holds the experts [r·E/W, (r+1)·E/W).

    Args:
        topology: The group.
        num_experts: E, a multiple of W.

    Raises:
        BadConfig: E is not a multiple of W.
    """

    name: str
    """As `kernels.dispatch` names it."""

    def __init__(self, topology: Topology, num_experts: int) -> None:
        if num_experts % topology.size:
            raise BadConfig(
                f"{num_experts} experts cannot be shared evenly by {topology.size} ranks; set train.expert_parallel to a"
                " divisor of model.num_experts"
            )
        self.topology = topology
        self.num_experts = num_experts
        self.num_local_experts = num_experts // topology.size

    @property
    def local_experts(self) -> range:
        """The experts this rank holds."""
        first = self.topology.rank * self.num_local_experts
        return range(first, first + self.num_local_experts)

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Dispatched:
        """Send every token to the ranks of its experts. Differentiable in `x` and `topk_weights`.

        Args:
            x: [T, H], floating point; T may differ between ranks and may be 0, H and K may not differ.
            topk_idx: int64 [T, K], global expert numbers; -1 leaves a slot unused, an expert may occur twice.
            topk_weights: [T, K], floating point.
        """
        got: list[Any] = []
        rows, weights = _Dispatch.apply(x, topk_weights.float(), topk_idx, self, got)
        return Dispatched(rows, weights, *got)

    def combine(self, y: torch.Tensor, route: Any) -> torch.Tensor:
        """Sum the rows of every token at the rank it came from. Differentiable in `y`.

        Args:
            y: [N, H], in the order of `Dispatched.x`, already multiplied by `Dispatched.weights`.
            route: `Dispatched.route`.

        Returns:
            [T, H]; zeros for a token without a used slot.
        """
        return _Combine.apply(y, self, route)

    def close(self) -> None:
        """Give back buffers and process groups; collective. The dispatcher cannot be used afterwards."""

    @abstractmethod
    def _send(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Received:
        """Dispatch: shapes as `dispatch`, weights float32."""

    @abstractmethod
    def _resend(self, x: torch.Tensor, route: Any) -> torch.Tensor:
        """[T, H] along a known route -> [N, H]: what the gradient of a combine needs, at full precision."""

    @abstractmethod
    def _collect(
        self, y: torch.Tensor, values: torch.Tensor | None, route: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N, H] back along the route -> their sums [T, H]; with `values` float32 [N], also these, unsummed, as [T, K]
        (0 in unused slots)."""


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_idx: torch.Tensor,
        backend: Dispatcher,
        got: list[Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        received = backend._send(x, topk_idx, topk_weights)
        got += (received.counts, received.route)
        ctx.backend, ctx.route = backend, received.route
        return received.x, received.weights

    @staticmethod
    def backward(ctx: Any, grad_x: torch.Tensor, grad_weights: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, weights = ctx.backend._collect(grad_x.contiguous(), grad_weights.contiguous(), ctx.route)
        return tokens, weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, backend: Dispatcher, route: Any) -> torch.Tensor:
        ctx.backend, ctx.route = backend, route
        return backend._collect(y.contiguous(), None, route)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.backend._resend(grad.contiguous(), ctx.route), None, None
