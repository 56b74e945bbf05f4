"""Routing: what the routers of a model choose: masked for padding, counted, recorded, replayed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kernels.dispatch.contract import DROPPED

if TYPE_CHECKING:
    from torch import nn

Choices = list[torch.Tensor]
"""One int64 [T, K] a layer: the experts of each token, -1 in the slots of padding."""


class Routed(NamedTuple):
    """What the routers did in one forward pass, in order of the layers."""

    logits: list[torch.Tensor]
    """[T, E] a layer, with their gradients."""
    choices: Choices


class Routing:
    """Watches every router of a model by a forward hook; between `forward` blocks the hooks do nothing.

    A replayed choice keeps the gradient of its weight: the weights are the present router's probabilities at the given
    experts, renormalised as the model does. So a later forward pass of a training step scores tokens with the very
    experts an earlier one scored them with, and a change of the ratio is a change of the policy, not of the routing
    (routing replay; arXiv 2507.18071 names it for GRPO on Mixture-of-Experts models).

    Attributes:
        layers: Routers of the model.

    Args:
        model: A transformers model whose routers return (logits, weights, indices), as Qwen3-MoE's do.
        masked: Whether padding reaches the experts as -1, which those in `kernels.experts` leave out; other experts
            implementations take no -1.
    """

    def __init__(self, model: nn.Module, masked: bool) -> None:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

        routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
        self.layers = len(routers)
        self._masked = masked
        self._routed: Routed | None = None
        self._valid: torch.Tensor | None = None
        self._replay: Choices | None = None
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._route, layer))

    @contextmanager
    def forward(self, valid: torch.Tensor, replay: Choices | None = None) -> Iterator[Routed]:
        """Watch one forward pass; what is yielded is filled by it.

        Args:
            valid: bool [T], False for padding.
            replay: Choices to use in place of the routers' own; -1 leaves a token's first slot, and so the token, to
                the router.
        """
        routed = self._routed = Routed([], [])
        self._valid, self._replay = valid, replay
        try:
            yield routed
        finally:
            self._routed = self._valid = self._replay = None

    def _route(self, layer: int, router: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> Any:
        if self._routed is None or self._valid is None:
            return None
        logits, weights, indices = output
        if self._replay is not None:
            given = self._replay[layer]
            indices = torch.where(given[:, :1] == DROPPED, indices, given)
            weights = logits.softmax(-1, dtype=torch.float).gather(1, indices)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            weights = weights.to(logits.dtype)
        chosen = indices.masked_fill(~self._valid[:, None], DROPPED)
        self._routed.logits.append(logits)
        self._routed.choices.append(chosen)
        return logits, weights, chosen if self._masked else indices


def loads(choices: Choices, experts: int) -> torch.Tensor:
    """float32 [layers, E]: tokens each expert was chosen for, padding left out."""
    # The last class is that of dropped slots.
    return torch.stack(
        [torch.bincount(each.reshape(-1) % (experts + 1), minlength=experts + 1)[:experts] for each in choices]
    ).float()


def load_statistics(counts: torch.Tensor) -> dict[str, float]:
    """How evenly tokens were spread over the experts: means over the layers.

    Args:
        counts: [layers, E], as `loads`, over all ranks.

    Returns:
        `max_load` and `min_load`, relative to the mean load (1 is even; `max_violation` is `max_load` - 1, arXiv
        2408.15664); `load_entropy`, relative to that of an even load; `unused_experts`, as a fraction.
    """
    share = counts / counts.sum(1, keepdim=True).clamp(min=1)
    relative = share * counts.shape[1]
    entropy = torch.special.entr(share).sum(1) / math.log(counts.shape[1])
    return {
        "max_load": float(relative.amax(1).mean()),
        "min_load": float(relative.amin(1).mean()),
        "max_violation": float(relative.amax(1).mean() - 1),
        "load_entropy": float(entropy.mean()),
        "unused_experts": float((counts == 0).float().mean()),
    }
