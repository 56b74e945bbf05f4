"""Greedy scoring of a policy on held-out prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from components.reward.verifiers import Completion, load_verifier
from components.rollout.torch_engine import TorchEngine
from components.rollout.torch_policy import TorchPolicy
from components.stage_data.rows import Row
from components.storage.store import open_store, split_uri
from components.weights.policy import policy_tokenizer
from configs.run import RunConfig

_PROMPTS_A_CALL = 128


class Scores(NamedTuple):
    """What a policy said to the prompts, and what the verifier made of it."""

    completions: list[str]
    rewards: np.ndarray
    """float64 [N]; with the verifier `exact_match` their mean is the exact match."""


def score_uri(uri: str, rows: Sequence[Row], config: RunConfig, work: Path) -> Scores:
    """Fetch a checkpoint or export and score it.

    Args:
        uri: Hugging Face folder in a store.
        rows: Held-out prompts with their answers.
        config: Verifier and completion length.
        work: Local folder for the download, which is removed afterwards.

    Raises:
        BadData: the folder is absent or damaged, or a prompt does not fit its context.
    """
    parent, key = split_uri(uri)
    with tempfile.TemporaryDirectory(dir=work, prefix="evaluate-") as temporary:
        folder = Path(temporary) / "policy"
        open_store(parent, config.storage).download(key, folder)
        return score_folder(folder, rows, config)


def score_folder(folder: Path, rows: Sequence[Row], config: RunConfig) -> Scores:
    """Complete every prompt greedily and verify the completions."""
    tokenizer = policy_tokenizer(folder)
    engine = TorchEngine(TorchPolicy.from_folder(folder))
    verify = load_verifier(config.reward)
    completions: list[str] = []
    rewards: list[float] = []
    for start in range(0, len(rows), _PROMPTS_A_CALL):
        asked = rows[start : start + _PROMPTS_A_CALL]
        prompts = [tokenizer.encode(row.prompt).ids for row in asked]
        generation = engine.generate(prompts, max_new_tokens=config.rollout.max_new_tokens, greedy=True)
        for number, row in enumerate(asked):
            text = tokenizer.decode(generation.tokens[number, : generation.lengths[number]].tolist())
            finish = "stop" if generation.finished[number] else "length"
            completions.append(text)
            rewards += verify([Completion(text, finish)], row.answer)
    return Scores(completions, np.array(rewards))
