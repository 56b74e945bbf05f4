"""Greedy completions of held-out prompts, scored by the run's verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from components.reward.pool import Job, VerifierPool
from components.reward.verifiers import Completion
from components.rollout.torch_engine import TorchEngine
from components.stage_data.rows import Row
from configs.failure import BadConfig
from configs.run import RunConfig

PROMPTS_A_CALL = 512


class Scores(NamedTuple):
    """What a policy said to the prompts, and what the verifier made of it."""

    completions: list[str]
    rewards: np.ndarray
    """float64 [N]; with the verifier `exact_match` their mean is the exact match."""


class GreedyScorer:
    """Scores policies greedily; the verifier runs in a pool that can be killed, as in the loop."""

    def __init__(self, tokenizer: Tokenizer, config: RunConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._pool = VerifierPool(config.reward)

    def score(self, engine: TorchEngine, rows: Sequence[Row]) -> Scores:
        """Complete every prompt and verify; a prompt whose verification failed counts 0.

        Raises:
            BadConfig: no verification at all succeeded.
        """
        completions: list[list[int]] = []
        finishes: list[str] = []
        for start in range(0, len(rows), PROMPTS_A_CALL):
            prompts = self.prompts(rows[start : start + PROMPTS_A_CALL])
            made = engine.generate(prompts, max_new_tokens=self.config.rollout.max_new_tokens, greedy=True)
            completions += [made.tokens[number, : made.lengths[number]].tolist() for number in range(len(prompts))]
            finishes += ["stop" if done else "length" for done in made.finished]
        return self.judge(rows, completions, finishes)

    def prompts(self, rows: Sequence[Row]) -> list[list[int]]:
        """Token ids of the rows' prompts."""
        return [self.tokenizer.encode(row.prompt).ids for row in rows]

    def judge(self, rows: Sequence[Row], completions: list[list[int]], finishes: list[str]) -> Scores:
        """Verify one completion a row.

        Raises:
            BadConfig: no verification at all succeeded.
        """
        texts = self.tokenizer.decode_batch(completions)
        jobs = [
            Job([Completion(text, finish)], row.answer) for text, finish, row in zip(texts, finishes, rows, strict=True)
        ]
        verdicts = self._pool.verify(jobs)
        if all(verdict.failed for verdict in verdicts):
            raise BadConfig(
                f"reward.verifier {self.config.reward.verifier}: no held-out prompt could be verified;"
                f" the last because {verdicts[-1].sentence}; mend the verifier"
            )
        rewards = [verdict.rewards[0] if verdict.rewards else 0.0 for verdict in verdicts]
        return Scores(texts, np.array(rewards))

    def close(self) -> None:
        """End the verifier's processes."""
        self._pool.close()
