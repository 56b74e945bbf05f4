"""Greedy scoring of a policy on held-out prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from components.rollout.greedy import GreedyScorer, Scores
from components.rollout.torch_engine import TorchEngine
from components.rollout.torch_policy import TorchPolicy
from components.stage_data.rows import Row
from components.storage.store import open_store, split_uri
from components.weights.policy import policy_tokenizer
from configs.run import RunConfig


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
    scorer = GreedyScorer(policy_tokenizer(folder), config)
    try:
        return scorer.score(TorchEngine(TorchPolicy.from_folder(folder)), rows)
    finally:
        scorer.close()
