"""The trainer: one policy update from a batch of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from components.experience.group import Group
from components.train.batch import Batch, collate
from components.train.objective import load_balance, surrogate
from configs.failure import Failure
from configs.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Trainer:
    """Holds the policy and its optimizer.

    Attributes:
        model: The policy being trained.
        optimizer: AdamW over all its parameters.
        step: Policy updates done; also the number of the policy's version.
    """

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        self.model = model.train()
        self.config = config
        self.step = 0
        train = config.train
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            weight_decay=train.weight_decay,
            fused=True,
        )

    def update(self, groups: list[Group]) -> dict[str, float]:
        """One policy update; returns the step's metrics.

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

    def _optimize(self, batch: Batch, tokens: int) -> dict[str, float]:
        """The optimizer steps over a batch's minibatches."""
        train = self.config.train
        random = torch.Generator().manual_seed(
            int(np.random.default_rng([self.config.seed, self.step]).integers(2**62))
        )
        parts = [batch.select(rows) for rows in torch.randperm(batch.rows, generator=random).chunk(train.minibatches)]
        # The first minibatch's own forward is the proximal policy's; later ones need theirs from before any update.
        references = [None] + [self._reference(part) for part in parts[1:]]
        sums: dict[str, float] = {}
        for part, reference in zip(parts, references, strict=True):
            logprobs, entropy, balance = self._forward(part)
            stale = part.staleness > 0
            first = reference is None
            if reference is None:
                decoupled = stale if train.off_policy == "decoupled" else torch.zeros_like(stale)
                reference = torch.where(decoupled, logprobs.detach(), part.behaviour)
            policy = surrogate(logprobs, reference, part.behaviour, part.advantage, stale, train)
            loss = policy.loss / tokens * len(parts) + train.load_balance * balance
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip_norm)
            if not torch.isfinite(norm):
                raise Failure(f"step {self.step + 1}: the gradient is not finite; lower train.learning_rate")
            self.optimizer.step()
            gap = (logprobs.detach() - part.behaviour).abs()[~stale]
            for name, value in (
                ("train/loss", loss.item() / len(parts)),
                ("train/aux_loss", balance.item() / len(parts)),
                ("train/grad_norm", norm.item() / len(parts)),
                ("train/entropy", entropy.item() / batch.row.numel()),
                ("train/pg_clipfrac", policy.clipped.item() / batch.row.numel()),
                ("train/ppo_kl", policy.approximate_kl.item() / batch.row.numel()),
                ("train/tis", policy.tis.item() / batch.row.numel()),
                ("train/tis_clipfrac", policy.tis_clipped.item() / batch.row.numel()),
            ):
                sums[name] = sums.get(name, 0.0) + value
            if first and gap.numel():
                # Only here do trainer and sampler hold the same weights.
                sums["train/train_rollout_logprob_abs_diff"] = gap.mean().item()
        return sums

    def _reference(self, part: Batch) -> torch.Tensor:
        """Log-probabilities [M] a later minibatch's ratios are taken to, from before the step's first update."""
        reference = part.behaviour
        stale_rows = torch.zeros(part.rows, dtype=torch.bool)
        stale_rows[part.row[part.staleness > 0]] = True
        if self.config.train.off_policy == "decoupled" and stale_rows.any():
            reference = reference.clone()
            with torch.no_grad():
                logprobs, _, _ = self._forward(part.select(stale_rows.nonzero()[:, 0]))
            reference[stale_rows[part.row]] = logprobs
        return reference

    def _forward(self, part: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of the completion tokens [M], the sum of their entropies, the load-balance loss."""
        inputs = part.ids[:, :-1]
        # Padding stands at the right, where causal attention keeps it from every token that counts.
        output = self.model.model(input_ids=inputs, use_cache=False, output_router_logits=True)
        logits = self.model.lm_head(output.last_hidden_state[part.row, part.column - 1]).float()
        distribution = (logits / self.config.rollout.temperature).log_softmax(-1)
        targets = part.ids[part.row, part.column]
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum()
        valid = (torch.arange(inputs.shape[1]) < part.lengths[:, None]).reshape(-1)
        balance = load_balance(output.router_logits, valid, self.model.config.num_experts_per_tok)
        return distribution.gather(1, targets[:, None])[:, 0], entropy, balance

    def _set_learning_rate(self) -> float:
        """Linear warm-up, then linear decay to a fraction; returns the rate of this step."""
        train = self.config.train
        warm = min(1.0, (self.step + 1) / train.warmup_steps) if train.warmup_steps else 1.0
        rate = train.learning_rate * warm * max(train.final_learning_rate, 1 - self.step / train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate


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
