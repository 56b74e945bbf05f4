"""The objective: clipped policy surrogate, importance weights for stale tokens, router load balance."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from configs.train import TrainConfig


class Surrogate(NamedTuple):
    """The policy loss and what is worth logging about it (sums over tokens, without gradient)."""

    loss: torch.Tensor
    """Scalar: sum over tokens; the caller divides."""
    clipped: torch.Tensor
    approximate_kl: torch.Tensor
    tis: torch.Tensor
    """Importance weights, truncated."""
    tis_clipped: torch.Tensor
    """Tokens whose weight or ratio was truncated."""


def surrogate(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    stale: torch.Tensor,
    config: TrainConfig,
) -> Surrogate:
    """Clipped surrogate with truncated importance sampling, summed over tokens.

    The ratio is taken to the reference policy and clipped to [1 - low, 1 + high] (DAPO, arXiv 2503.14476); it is
    truncated at the cap, so that no bad token weighs more than that (dual-clip PPO, arXiv 1912.09729). A stale token is
    also weighted by min(reference / behaviour, cap): with the step's first policy as reference this is the decoupled
    objective (AReaL, arXiv 2505.24298); with the behaviour policy as reference that weight is 1.

    Args:
        logprobs: float [M], of the policy being trained.
        reference: float [M], of the policy the ratio is taken to.
        behaviour: float [M], of the policy that sampled the token.
        advantage: float [M].
        stale: bool [M], whether an older version sampled the token.
    """
    log_ratio = logprobs - reference
    full = log_ratio.exp()
    ratio = full.clamp(max=config.tis_clip)
    clipped = full.clamp(1 - config.clip_low, 1 + config.clip_high)
    uncapped = torch.where(stale, (reference - behaviour).exp(), torch.ones_like(behaviour))
    weight = uncapped.clamp(max=config.tis_clip)
    loss = -(weight * torch.min(ratio * advantage, clipped * advantage)).sum()
    with torch.no_grad():
        return Surrogate(
            loss,
            ((ratio * advantage) > (clipped * advantage)).sum(),
            (full - 1 - log_ratio).sum(),
            (weight * ratio).sum(),
            ((uncapped > config.tis_clip) | (full > config.tis_clip)).sum(),
        )


def load_balance(
    router_logits: tuple[torch.Tensor, ...],
    valid: torch.Tensor,
    top: int,
    chosen: list[torch.Tensor] | None = None,
    total: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Switch-style load-balance loss, mean over layers; 1 when every expert gets the same share (arXiv 2101.03961).

    Args:
        router_logits: A tensor [tokens, E] a layer.
        valid: bool [tokens], False for padding.
        top: Experts a token is sent to.
        chosen: int64 [tokens, top] a layer: the experts that tokens were sent to, where those are not the likeliest.
        total: Sums a tensor over the ranks that share a batch: the loss is then this rank's share of the global one.
    """
    experts = router_logits[0].shape[-1]
    probabilities = [logits[valid].float().softmax(-1) for logits in router_logits]
    if chosen is None:
        picked = [each.topk(top, -1).indices for each in probabilities]
    else:
        picked = [each[valid] for each in chosen]
    counts = torch.stack([F.one_hot(each, experts).float().sum((0, 1)) for each in picked])
    counted = torch.cat([counts.reshape(-1), valid.sum().float()[None]])
    if total is not None:
        counted = total(counted)
    tokens = counted[-1]
    shares = counted[:-1].reshape(counts.shape) / tokens
    loss = torch.zeros((), device=tokens.device)
    for share, each in zip(shares, probabilities, strict=True):
        loss = loss + experts * (share * (each.sum(0) / tokens)).sum() / top
    return loss / len(router_logits)
