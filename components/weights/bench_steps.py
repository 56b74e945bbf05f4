"""Sizes of the differences that real policy updates leave, for `tandem bench weights`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from tokenizers import Tokenizer

from components.experience.group import Group, Sample
from components.reward.verifiers import Completion, exact_match
from components.rollout.torch_engine import TorchEngine
from components.rollout.torch_policy import TorchPolicy
from components.stage_data.rows import Row
from components.stage_data.tasks import task_rows
from components.train.trainer import Trainer
from components.warm_start.supervised import warm_up
from components.warm_start.tokenizer import character_tokenizer
from components.weights.policy import checkpoint_tensors, load_policy, new_policy, policy_tokenizer, save_policy
from components.weights.store import WeightsStore
from configs.failure import BadConfig
from configs.run import RunConfig

TASK = "add2r"
RATES = (4e-4, 1e-5, 1e-6)
Dtype = Literal["float32", "bfloat16"]


def difference_sizes(steps: int, checkpoint: str, folder: Path) -> dict[str, Any]:
    """Bytes of a version stored as a difference, as a share of its whole bytes, for every learning rate and type.

    The quickstart's trainer takes groups that the torch engine sampled with the current policy, scored by exact match,
    at a constant learning rate. A store keeps the difference only where it is worthwhile; here it is counted anyway.

    Args:
        steps: Policy updates a learning rate; the median of their differences counts, and the first and largest is told.
        checkpoint: Folder of the policy to begin with; empty to warm one up first.
        folder: To work in.

    Raises:
        BadConfig: the policy solves nothing, so that no update changes it.
    """
    rows = task_rows(TASK, 10_000, 0)
    start = Path(checkpoint) if checkpoint else _warm_start(rows, folder / "start")
    figures: dict[str, Any] = {"steps_task": TASK, "steps": steps}
    for rate in RATES:
        config = RunConfig.model_validate(
            {"train": {"learning_rate": rate, "warmup_steps": 0, "final_learning_rate": 1.0}}
        )
        trainer, tokenizer = Trainer(load_policy(start), config), policy_tokenizer(start)
        stores = {
            dtype: WeightsStore(folder / f"steps-{rate:g}-{dtype}", deltas=steps, dtype=dtype)
            for dtype in get_args(Dtype)
        }
        shares: dict[str, list[float]] = {dtype: [] for dtype in stores}
        whole: dict[str, int] = {}
        for step in range(steps + 1):
            for dtype, store in stores.items():
                manifest = store.publish(step, checkpoint_tensors(trainer.model))
                if manifest.base is None:
                    whole[dtype] = manifest.stored_bytes
                if step:
                    shares[dtype].append(manifest.stored_bytes / whole[dtype])
            batch = config.train.batch_groups
            trainer.update(_groups(trainer, tokenizer, rows[step * batch : (step + 1) * batch], config))
        if not all(map(statistics.median, shares.values())):
            raise BadConfig(
                f"{start}: gets no reward on {TASK}, so updates change nothing; give one that solves some of it"
            )
        for dtype, found in shares.items():
            figures[f"{dtype}_bytes"] = whole[dtype]
            figures[f"delta_share_{dtype}_{rate:g}"] = statistics.median(found)
            figures[f"delta_share_first_{dtype}_{rate:g}"] = found[0]
    return figures


def _warm_start(rows: list[Row], folder: Path) -> Path:
    """A policy that gets a quarter of the task right, as the quickstart starts with."""
    config = RunConfig()
    tokenizer = character_tokenizer("".join(sorted({letter for row in rows for letter in row.prompt + row.answer})))
    model = new_policy(config.model, tokenizer.get_vocab_size(), config.seed)
    held_out = config.evaluate.rows
    warm_up(model, tokenizer, rows[held_out:], rows[:held_out], config, lambda progress: None)
    save_policy(model, tokenizer, folder)
    return folder


def _groups(trainer: Trainer, tokenizer: Tokenizer, rows: list[Row], config: RunConfig) -> list[Group]:
    """Groups that the trainer's own policy sampled, scored."""
    size = config.rollout.group_size
    prompts = [tokenizer.encode(row.prompt).ids for row in rows]
    made = TorchEngine(TorchPolicy.from_model(trainer.model)).generate(
        prompts, group_size=size, max_new_tokens=config.rollout.max_new_tokens, seed=trainer.step
    )
    groups = []
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        samples = []
        for index in range(number * size, (number + 1) * size):
            length = int(made.lengths[index])
            finish: Literal["stop", "length"] = "stop" if made.finished[index] else "length"
            tokens = made.tokens[index, :length]
            sample = Sample.of(tokens, made.logprobs[index, :length], trainer.step, finish)
            sample.reward = exact_match([Completion(tokenizer.decode(tokens.tolist()), finish)], row.answer)[0]
            samples.append(sample)
        groups.append(Group(number + 1, row.id, np.array(prompt, "<i4").tobytes(), row.answer, samples))
    return groups
