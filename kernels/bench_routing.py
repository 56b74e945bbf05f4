"""Routings to measure with: which experts every token names."""

from __future__ import annotations

import math

import torch

ROUTINGS = ("uniform", "skewed", "node_limited")
SKEW = 1.0
"""Exponent of the power law that expert popularity follows in `skewed`."""


def routing(
    kind: str, tokens: int, experts: int, top: int, nodes: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 [T, K] (distinct) and weights float32 [T, K] that sum to 1.

    Args:
        kind: `uniform`: every expert is as likely. `skewed`: popularity falls as 1 / rank, the popular ones spread over the
            ranks. `node_limited`: the experts of a token lie on at most half of the nodes (as in DeepSeek-V3,
            arXiv 2412.19437 §2.1.2, with 4 of 8).
        nodes: Nodes that share the experts evenly.
    """
    scores = torch.rand(tokens, experts, generator=random)
    if kind == "skewed":
        # Gumbel noise on log-popularity draws without replacement; the stride scatters the popular experts.
        stride = next(step for step in range(experts // 2 + 1, experts + 1) if math.gcd(step, experts) == 1)
        popularity = -SKEW * torch.log1p(((torch.arange(experts) * stride) % experts).float())
        scores = popularity - torch.log(-torch.log(scores.clamp(1e-9, 1 - 1e-7)))
    if kind == "node_limited":
        allowed = torch.rand(tokens, nodes, generator=random).topk(max(1, nodes // 2)).indices
        reachable = torch.zeros(tokens, nodes, dtype=torch.bool).scatter_(1, allowed, True)
        scores = scores.masked_fill(~reachable.repeat_interleave(experts // nodes, 1), -1.0)
    chosen = scores.topk(top)
    return chosen.indices, chosen.values.softmax(-1)
