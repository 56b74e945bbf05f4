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
from kernels.dispatch.wire import Scratch, Traffic

DROPPED = -1
"""In `topk_idx`: the slot is unused."""


class Route(NamedTuple):
    """The way back of one dispatch, opaque to its user. Good until its dispatcher is closed."""

    backend: Dispatcher
    way: Any
    """The backend's own."""
    rows: int
    """N: rows received."""
    tokens: int
    """T: tokens sent."""


class Dispatched(NamedTuple):
    """What a rank received: N rows, one for each (token, slot) that named one of its experts."""

    x: torch.Tensor
    """[N, H]: rows grouped by local expert, ascending."""
    weights: torch.Tensor
    """float32 [N]: routing weight of each row; the expert's output is to be multiplied by it."""
    counts: torch.Tensor
    """int64 [E / W], on the CPU: rows of each local expert."""
    route: Route
    """The way back, for `combine`."""


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
        self.traffic = Traffic()
        self.scratch = Scratch()
        self._closed = False

    @property
    def inter_node_bytes(self) -> int:
        """Payload this rank has sent to other nodes so far, forward and backward."""
        return self.traffic.inter_node

    @property
    def intra_node_bytes(self) -> int:
        """Payload this rank has sent to other ranks of its node so far, forward and backward."""
        return self.traffic.intra_node

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

        Raises:
            ValueError: A shape, type or device that does not fit, or (seen on the CPU only) a number that is no expert.
            RuntimeError: The dispatcher is closed.
        """
        self._check_open()
        _check_tokens(x, topk_idx, topk_weights, self.num_experts)
        got: list[Any] = []
        rows, weights = _Dispatch.apply(x, topk_weights.float(), topk_idx, self, got)
        counts, way = got
        return Dispatched(rows, weights, counts, Route(self, way, len(rows), len(x)))

    def combine(self, y: torch.Tensor, route: Route) -> torch.Tensor:
        """Sum the rows of every token at the rank it came from. Differentiable in `y`.

        Args:
            y: [N, H], in the order of `Dispatched.x`, already multiplied by `Dispatched.weights`.
            route: `Dispatched.route`.

        Returns:
            [T, H]; zeros for a token without a used slot.

        Raises:
            ValueError: `y` is not one floating-point row for each row received, or the route is another dispatcher's.
            RuntimeError: The dispatcher is closed.
        """
        self._check_open()
        if route.backend is not self:
            raise ValueError(f"this route belongs to another dispatcher ({route.backend.name})")
        if y.dim() != 2 or len(y) != route.rows or not y.is_floating_point():
            raise ValueError(f"y must be floating point [{route.rows}, H], not {y.dtype} {list(y.shape)}")
        return _Combine.apply(y, self, route.way)

    def close(self) -> None:
        """Give back buffers and process groups; collective. Afterwards neither the dispatcher nor its routes can be used,
        backward passes included."""
        self._closed = True
        self.scratch.free()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the {self.name} dispatcher is closed; finish backward passes before closing it")

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


def _check_tokens(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x must be floating point [T, H], not {x.dtype} {list(x.shape)}")
    if topk_idx.dim() != 2 or len(topk_idx) != len(x) or topk_idx.dtype != torch.int64:
        raise ValueError(f"topk_idx must be int64 [{len(x)}, K], not {topk_idx.dtype} {list(topk_idx.shape)}")
    if topk_weights.shape != topk_idx.shape or not topk_weights.is_floating_point():
        raise ValueError(
            f"topk_weights must be floating point {list(topk_idx.shape)}, not {topk_weights.dtype}"
            f" {list(topk_weights.shape)}"
        )
    if not x.shape[1] or not topk_idx.shape[1]:
        raise ValueError("H and K must be at least 1")
    if not x.device == topk_idx.device == topk_weights.device:
        raise ValueError(
            f"tokens are on {x.device}, {topk_idx.device} and {topk_weights.device}; they must be together"
        )
    # To look at the numbers of a GPU would make it wait.
    if x.device.type == "cpu" and topk_idx.numel():
        least, most = topk_idx.aminmax()
        if least < DROPPED or most >= num_experts:
            raise ValueError(f"topk_idx names experts {int(least)} to {int(most)}; there are {num_experts} (-1: none)")


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
        ctx.backend._check_open()
        tokens, weights = ctx.backend._collect(grad_x.contiguous(), grad_weights.contiguous(), ctx.route)
        return tokens, weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, backend: Dispatcher, route: Any) -> torch.Tensor:
        ctx.backend, ctx.route = backend, route
        return backend._collect(y.contiguous(), None, route)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.backend._check_open()
        return ctx.backend._resend(grad.contiguous(), ctx.route), None, None
