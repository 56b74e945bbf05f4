"""Supervised training of a new policy on the dataset's own answers, until it gets enough of them right to learn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from components.rollout.greedy import GreedyScorer
from components.rollout.torch_engine import TorchEngine
from components.rollout.torch_policy import TorchPolicy
from components.stage_data.rows import Row
from components.train.objective import load_balance
from components.weights.policy import EOS, PAD
from configs.failure import BadConfig
from configs.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100
"""Target of tokens that carry no loss (torch's default)."""


class Progress(NamedTuple):
    """Where the warm start is."""

    step: int
    loss: float | None
    exact_match: float


def warm_up(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    train: list[Row],
    held_out: list[Row],
    config: RunConfig,
    report: Callable[[Progress], None],
) -> Progress:
    """Train until greedy exact match on `held_out` reaches the target.

    Args:
        report: Called at every look at the target.

    Raises:
        BadConfig: the target was not met within `warm_start.max_steps`.
    """
    settings = config.warm_start
    inputs, targets = _examples(train, tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=True
    )
    engine = TorchEngine(TorchPolicy.from_model(model))
    random = np.random.default_rng(config.seed)
    model.train()
    scorer = GreedyScorer(tokenizer, config)
    progress = Progress(0, None, float(scorer.score(engine, held_out).rewards.mean()))
    report(progress)
    while progress.exact_match < settings.target_exact_match and progress.step < settings.max_steps:
        for step in range(progress.step + 1, progress.step + 1 + settings.eval_every):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * min(1.0, step / max(1, settings.warmup_steps))
            rows = torch.from_numpy(random.integers(0, len(inputs), settings.batch_size))
            loss = _loss(model, inputs[rows], targets[rows], settings.load_balance)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
        progress = Progress(step, loss.item(), float(scorer.score(engine, held_out).rewards.mean()))
        report(progress)
    scorer.close()
    if progress.exact_match < settings.target_exact_match:
        raise BadConfig(
            f"the warm start reached exact match {progress.exact_match:.3f} after {progress.step} steps, not"
            f" warm_start.target_exact_match {settings.target_exact_match}; lower the target or raise warm_start.max_steps"
        )
    return progress


def _examples(rows: list[Row], tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [rows, L]: loss on the answer and its end, none on prompt and padding."""
    sequences = []
    for row in rows:
        prompt = tokenizer.encode(row.prompt).ids
        answer = tokenizer.encode(row.answer, add_special_tokens=False).ids
        sequences.append((prompt, [*answer, EOS]))
    width = max(len(prompt) + len(answer) for prompt, answer in sequences)
    ids = np.full((len(rows), width), PAD)
    loss_on = np.zeros((len(rows), width), bool)
    for number, (prompt, answer) in enumerate(sequences):
        end = len(prompt) + len(answer)
        ids[number, :end] = prompt + answer
        loss_on[number, len(prompt) : end] = True
    return torch.from_numpy(ids[:, :-1]), torch.from_numpy(np.where(loss_on, ids, IGNORED)[:, 1:])


def _loss(model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor, balance: float) -> torch.Tensor:
    output = model.model(input_ids=inputs, use_cache=False, output_router_logits=True)
    counted = targets != IGNORED
    loss = F.cross_entropy(model.lm_head(output.last_hidden_state[counted]), targets[counted])
    # Padding follows the answer, so up to a row's last counted token everything is valid.
    valid = counted.flip(1).cummax(1).values.flip(1).reshape(-1)
    return loss + balance * load_balance(output.router_logits, valid, model.config.num_experts_per_tok)
