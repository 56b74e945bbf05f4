"""A bad verifier costs its own group, nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from components.reward.pool import Job, VerifierPool
from components.reward.verifiers import Completion
from configs.failure import BadConfig
from configs.run import RewardConfig


def moody(completions: list[Completion], answer: str) -> list[float]:
    """Does what the answer says."""
    while answer == "loop":
        pass
    if answer == "raise":
        raise ValueError("cannot judge this")
    if answer == "die":
        os._exit(3)
    if answer == "nan":
        return [float("nan")] * len(completions)
    return [1.0] if answer == "short" else [1.0] * len(completions)


@contextmanager
def pool(**settings: object) -> Iterator[VerifierPool]:
    made = VerifierPool(RewardConfig.model_validate({"verifier": "tests.reward.test_pool:moody", **settings}))
    yield made
    made.close()


def job(answer: str) -> Job:
    return Job([Completion("a", "stop"), Completion("b", "stop")], answer)


def test_only_the_culprit_is_without_reward() -> None:
    with pool(timeout_s=1.0) as verifiers:
        for bad, reason in (
            ("loop", "reward_timeout"),
            ("raise", "reward_error"),
            ("die", "reward_error"),
            ("short", "reward_error"),
            ("nan", "reward_error"),
        ):
            verdicts = verifiers.verify([job("fine"), job(bad), job("fine")])
            assert [verdict.failed for verdict in verdicts] == ["", reason, ""], bad
            assert verdicts[0].rewards == verdicts[2].rewards == [1.0, 1.0]
        assert "cannot judge this" in verifiers.verify([job("raise")])[0].sentence
        assert verifiers.verify([]) == []


def test_verdicts_come_in_order() -> None:
    with pool(verifier="exact_match", processes=2) as verifiers:
        jobs = [Job([Completion(str(number % 3), "stop")], "1") for number in range(30)]
        assert [verdict.rewards for verdict in verifiers.verify(jobs)] == [
            [float(number % 3 == 1)] for number in range(30)
        ]


def test_an_unknown_verifier_stops_the_pool_before_it_starts() -> None:
    with pytest.raises(BadConfig, match="unknown"):
        VerifierPool(RewardConfig(verifier="nothing"))
