"""Grouped experts: the rows of each expert side by side, one grouped matrix product a projection.

Registered with transformers as the experts implementation `tandem`. Without a dispatcher all experts are here; with
one, rows travel to the ranks that hold their experts and their results travel back (`kernels.dispatch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from kernels.dispatch.contract import DROPPED, Dispatcher

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

IMPLEMENTATION = "tandem"
"""Name of this implementation in transformers' registry."""
DISPATCHER = "tandem_dispatcher"
"""Attribute of an experts module with its dispatcher."""


def use_grouped_experts(model: PreTrainedModel, dispatcher: Dispatcher | None = None) -> None:
    """Have a model compute its experts here.

    Args:
        model: A transformers model with fused experts (`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]).
        dispatcher: Carries tokens to the ranks that hold the experts; these parameters are then shards of it. Padding
            is to be routed to -1 (`kernels.routing`), so that it does not travel.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, grouped_experts)
    model.config._experts_implementation = IMPLEMENTATION
    for module in experts_of(model):
        setattr(module, DISPATCHER, dispatcher)


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The experts modules of a model, in order of the layers."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def grouped_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts' output, summed over a token's experts, as transformers' experts interface wants it.

    Args:
        self: The experts module.
        hidden_states: [T, H].
        top_k_index: int64 [T, K]; -1 leaves a slot out.
        top_k_weights: [T, K].

    Returns:
        [T, H]; zeros for a token without a used slot.
    """
    gate_up, down = _local(self.gate_up_proj), _local(self.down_proj)
    dispatcher: Dispatcher | None = getattr(self, DISPATCHER, None)
    if dispatcher is not None:
        got = dispatcher.dispatch(hidden_states, top_k_index, top_k_weights)
        offsets = got.counts.cumsum(0).to(got.x.device, torch.int32)
        rows = _experts(got.x, got.weights, offsets, gate_up, down, self._apply_gate)
        return dispatcher.combine(rows, got.route)
    slots, offsets = _grouped(top_k_index, gate_up.shape[0])
    count, top = top_k_index.shape
    weights = top_k_weights.reshape(-1).index_select(0, slots)
    x = hidden_states.index_select(0, slots // top)
    rows = _experts(x, weights, offsets, gate_up, down, self._apply_gate)
    spread = rows.new_zeros(count * top, rows.shape[1]).index_copy(0, slots, rows)
    return spread.view(count, top, rows.shape[1]).sum(1).to(hidden_states.dtype)


def _grouped(top_k_index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The used slots (token * K + slot), ordered by expert, and int32 [E]: where each expert's end."""
    chosen = top_k_index.reshape(-1)
    unused = (chosen == DROPPED).sum()
    slots = chosen.argsort(stable=True)[int(unused) :]
    counts = torch.bincount(chosen[slots], minlength=experts)
    return slots, counts.cumsum(0).to(torch.int32)


def _experts(
    x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, gate: Any
) -> torch.Tensor:
    """[N, H] rows grouped by expert -> the experts' outputs [N, H], times their routing weights."""
    if not x.shape[0]:
        # Every parameter takes part with gradient 0: the ranks' backward passes must make the same exchanges.
        return x * weights[:, None] + (gate_up.sum() + down.sum()) * 0
    hidden = gate(_grouped_product(x.to(gate_up.dtype), gate_up, offsets))
    return _grouped_product(hidden, down, offsets) * weights[:, None].to(hidden.dtype)


def _grouped_product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[N, I] x [E, O, I] -> [N, O], each row with its expert's matrix."""
    product = F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    return _Contiguous.apply(product)


class _Contiguous(torch.autograd.Function):
    """The same tensor; its gradient is made contiguous, without which grouped_mm refuses it (strides of 0)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter that may be shared with others."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
