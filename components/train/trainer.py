"""The trainer: one policy update from a batch of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from components.experience.group import Group
from components.train.batch import Batch, collate
from components.train.gathering import Gathering
from components.train.objective import load_balance, surrogate
from components.train.parallel import apply_parallelism, clip_gradients
from components.train.ranks import Ranks
from components.train.sums import Sums
from configs.failure import Failure
from configs.run import RunConfig
from kernels.routing import Choices, Routed, Routing, loads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reference(NamedTuple):
    """What the policy was before a step's first update, for the tokens of one minibatch."""

    logprobs: torch.Tensor
    """float32 [M]: what ratios are taken to."""
    choices: Choices | None
    """The experts to use again, if they are replayed."""


class Trainer:
    """Holds the policy and its optimizer, or one rank's shards of them.

    With several ranks every method is collective: all ranks call it together, with the same groups.

    Attributes:
        model: The policy being trained.
        optimizer: AdamW over all its parameters.
        step: Policy updates done; also the number of the policy's version.
        ranks: Those that train it together.
        dispatch: How tokens travel to the experts of other ranks, if they do.
    """

    def __init__(self, model: PreTrainedModel, config: RunConfig, ranks: Ranks | None = None) -> None:
        self.model = model.train()
        self.config = config
        self.step = 0
        self.ranks = ranks or Ranks()
        self.dispatch = apply_parallelism(model, config, self.ranks)
        self.routing = Routing(model, masked=not self.ranks.alone)
        self.gathering = Gathering(model, self.ranks)
        train = config.train
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            weight_decay=train.weight_decay,
            fused=True,
        )

    def update(self, groups: list[Group]) -> dict[str, float]:
        """One policy update; returns the step's metrics, the same at every rank.

        Minibatches are drawn by a seed of the run and the step, so a step that is repeated with the same groups after
        a crash comes to the same weights.
        """
        metrics = _rollout_metrics(groups, self.step)
        batch = collate(groups, self.config.train, self.step)
        tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
        rate = self._set_learning_rate()
        if batch is not None:
            metrics |= self._optimize(batch, tokens)
        self.step += 1
        return metrics | {"train/learning_rate": rate, "perf/tokens": float(tokens)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The policy under checkpoint names; with several ranks whole at rank 0, and empty at the others."""
        return self.gathering.tensors()

    def _optimize(self, batch: Batch, tokens: int) -> dict[str, float]:
        """The optimizer steps over a batch's minibatches, each shared among the ranks."""
        train = self.config.train
        random = torch.Generator().manual_seed(
            int(np.random.default_rng([self.config.seed, self.step]).integers(2**62))
        )
        drawn = torch.randperm(batch.rows, generator=random).chunk(train.minibatches)
        # Ranks share a minibatch's width as well: what counts as padding must not depend on who has which row.
        widths = [int(batch.lengths[rows].max()) for rows in drawn]
        parts = [
            batch.select(self.ranks.share(rows), width).to(self.ranks.device)
            for rows, width in zip(drawn, widths, strict=True)
        ]
        # The first minibatch's own forward is the proximal policy's; later ones need theirs from before any update.
        stale_at_all = bool((batch.staleness > 0).any())
        references = [None] + [self._reference(part, stale_at_all) for part in parts[1:]]
        sums = Sums(self.ranks)
        for part, reference in zip(parts, references, strict=True):
            logprobs, entropy, routed = self._forward(part, reference.choices if reference else None)
            balance = self._balance(routed, part)
            stale = part.staleness > 0
            if reference is None:
                decoupled = stale if train.off_policy == "decoupled" else torch.zeros_like(stale)
                proximal = torch.where(decoupled, logprobs.detach(), part.behaviour)
            else:
                proximal = reference.logprobs
            policy = surrogate(logprobs, proximal, part.behaviour, part.advantage, stale, train)
            loss = policy.loss / tokens * len(parts) + train.load_balance * balance
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = clip_gradients(list(self.model.parameters()), train.clip_norm, self.ranks)
            if not torch.isfinite(norm):
                raise Failure(f"step {self.step + 1}: the gradient is not finite; lower train.learning_rate")
            self.optimizer.step()
            sums.add("loss", loss / len(parts))
            sums.add("aux_loss", balance / len(parts))
            sums.add("grad_norm", norm / len(parts) / self.ranks.size)
            sums.add("entropy", entropy / batch.row.numel())
            sums.add("pg_clipfrac", policy.clipped / batch.row.numel())
            sums.add("ppo_kl", policy.approximate_kl / batch.row.numel())
            sums.add("tis", policy.tis / batch.row.numel())
            sums.add("tis_clipfrac", policy.tis_clipped / batch.row.numel())
            sums.count_loads(loads(routed.choices, self.model.config.num_experts))
            if reference is None:
                # Only here do trainer and sampler hold the same weights.
                sums.compare((logprobs.detach() - part.behaviour).abs()[~stale])
        return sums.metrics()

    def _reference(self, part: Batch, stale_at_all: bool) -> Reference:
        """What a later minibatch is compared with, from before the step's first update.

        Args:
            part: This rank's share of the minibatch.
            stale_at_all: Whether any token of the batch is stale: ranks must agree on whether to look.
        """
        decoupled = self.config.train.off_policy == "decoupled" and stale_at_all
        replayed = self.config.train.router_replay == "step"
        if not decoupled and not replayed:
            return Reference(part.behaviour, None)
        stale = torch.zeros(part.rows, dtype=torch.bool, device=part.row.device)
        stale[part.row[part.staleness > 0]] = True
        looked = part if replayed else part.select(stale.nonzero()[:, 0])
        with torch.no_grad():
            logprobs, _, routed = self._forward(looked)
        reference = part.behaviour.clone()
        if decoupled:
            of_stale = stale[part.row]
            reference[of_stale] = logprobs[of_stale] if replayed else logprobs
        return Reference(reference, routed.choices if replayed else None)

    def _forward(self, part: Batch, replay: Choices | None = None) -> tuple[torch.Tensor, torch.Tensor, Routed]:
        """Log-probabilities of the completion tokens [M], the sum of their entropies, what the routers did."""
        inputs = part.ids[:, :-1]
        # Padding stands at the right, where causal attention keeps it from every token that counts.
        with self.routing.forward(_valid(part), replay) as routed:
            output = self.model.model(input_ids=inputs, use_cache=False)
        logits = self.model.lm_head(output.last_hidden_state[part.row, part.column - 1]).float()
        distribution = (logits / self.config.rollout.temperature).log_softmax(-1)
        targets = part.ids[part.row, part.column]
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum()
        return distribution.gather(1, targets[:, None])[:, 0], entropy, routed

    def _balance(self, routed: Routed, part: Batch) -> torch.Tensor:
        """This rank's share of the load-balance loss."""
        top = self.model.config.num_experts_per_tok
        return load_balance(tuple(routed.logits), _valid(part), top, routed.choices, self.ranks.total)

    def _set_learning_rate(self) -> float:
        """Linear warm-up, then linear decay to a fraction; returns the rate of this step."""
        train = self.config.train
        warm = min(1.0, (self.step + 1) / train.warmup_steps) if train.warmup_steps else 1.0
        rate = train.learning_rate * warm * max(train.final_learning_rate, 1 - self.step / train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate


def _valid(part: Batch) -> torch.Tensor:
    """bool [rows * (L - 1)]: which of the model's inputs are not padding."""
    return (torch.arange(part.ids.shape[1] - 1, device=part.ids.device) < part.lengths[:, None]).reshape(-1)


def _rollout_metrics(groups: list[Group], version: int) -> dict[str, float]:
    rewards = np.array([group.rewards for group in groups])
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.token_ids) for sample in samples])
    staleness = np.array([version - group.oldest_version for group in groups])
    return {
        "rollout/raw_reward": float(rewards.mean()),
        "rollout/zero_std_fraction": float((rewards.std(1) == 0).mean()),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/truncated_ratio": float(np.mean([sample.finish == "length" for sample in samples])),
        "async/staleness_mean": float(staleness.mean()),
        "async/staleness_max": float(staleness.max()),
    }
