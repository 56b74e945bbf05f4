"""TrainConfig: how the policy is updated, and by how many ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.document import Document


class TrainConfig(Document):
    """Policy optimisation: GRPO with a clipped surrogate and truncated importance sampling."""

    steps: int = Field(default=300, ge=1)
    """Policy updates (versions) of the run."""
    batch_groups: int = Field(default=32, ge=1)
    """Groups a policy update takes (B)."""
    minibatches: int = Field(default=2, ge=1)
    """Optimizer steps a policy update makes over its batch."""
    advantage: Literal["group_mean", "group_mean_std"] = "group_mean"
    """Baseline: reward minus the group's mean, optionally divided by the group's standard deviation."""
    learning_rate: float = Field(default=4e-4, gt=0)
    warmup_steps: int = Field(default=10, ge=0)
    final_learning_rate: float = Field(default=0.05, ge=0, le=1)
    """Fraction of the learning rate at which the linear decay ends."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.28, ge=0)
    """The policy ratio is clipped to [1 - clip_low, 1 + clip_high] (DAPO's clip-higher)."""
    off_policy: Literal["behaviour", "decoupled"] = "behaviour"
    """What a stale token's ratio is taken to: the policy that sampled it (`behaviour`), or the policy the step began
    with, weighted by the truncated importance of that one over the sampler's (`decoupled`, one more forward pass)."""
    tis_clip: float = Field(default=2.0, ge=1)
    """Cap at which importance weights and ratios are truncated."""
    load_balance: float = Field(default=0.001, ge=0)
    """Weight of the router's load-balance loss."""
    router_replay: Literal["none", "step"] = "none"
    """Which experts later minibatches of a step use: those the routers choose by then, or those they chose with the weights
    the step began with (`step`, one more forward pass), so that a token's ratio never jumps with its routing."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Policy updates between durable checkpoints (weights, optimizer, random state, data cursor)."""
    keep_checkpoints: int = Field(default=2, ge=1)
    ranks: int = Field(default=1, ge=1)
    """Processes that train together: every one takes a share of the batch and holds a share of the weights (FSDP2). On
    Kubernetes they are spread evenly over `kubernetes.train.nodes` pods, one a GPU."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share the experts among them; divides `ranks`. Consecutive ranks form a group, so that it stays inside a
    node where it can."""
