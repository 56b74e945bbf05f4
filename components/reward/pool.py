"""Verification in processes that can be killed: a verifier that loops forever costs its own group, nothing else."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import TimeoutError as TaskTimeout
from typing import NamedTuple

from pebble import ProcessExpired, ProcessPool

from components.reward.verifiers import Completion, Verifier, load_verifier
from components.role import die_with_parent
from configs.run import RewardConfig

_verifier: Verifier | None = None


class Job(NamedTuple):
    """One group to verify."""

    completions: list[Completion]
    answer: str


class Verdict(NamedTuple):
    """What came of a job: rewards, or the reason there are none."""

    rewards: list[float]
    failed: str = ""
    """Drop reason: `reward_timeout` or `reward_error`; empty when there are rewards."""
    sentence: str = ""


class VerifierPool:
    """A pool of verifier processes with a time limit a group."""

    def __init__(self, config: RewardConfig) -> None:
        """Check that the verifier can be loaded, and make the pool.

        Raises:
            BadConfig: it cannot.
        """
        load_verifier(config)
        self.timeout_s = config.timeout_s
        self._pool = ProcessPool(
            max_workers=config.processes,
            initializer=_initialise,
            initargs=(config,),
            context=multiprocessing.get_context("spawn"),
        )

    def verify(self, jobs: list[Job]) -> list[Verdict]:
        """Verify jobs in order.

        All go to the pool as one task, which is cheap when nothing is wrong; if that task fails, each goes by itself,
        so that only the culprits are without rewards.
        """
        if not jobs:
            return []
        verdicts, failure = self._run(jobs)
        if failure is None:
            return verdicts
        return [failure] if len(jobs) == 1 else [verdict for job in jobs for verdict in self.verify([job])]

    def _run(self, jobs: list[Job]) -> tuple[list[Verdict], Verdict | None]:
        try:
            rewards = self._pool.schedule(_verify, args=(jobs,), timeout=self.timeout_s).result()
            return [Verdict(values) for values in rewards], None
        except TaskTimeout:
            return [], Verdict(
                [], "reward_timeout", f"verification took longer than reward.timeout_s {self.timeout_s:g} s"
            )
        except ProcessExpired as error:
            return [], Verdict([], "reward_error", f"the verifier's process died with exit code {error.exitcode}")
        except Exception as error:  # whatever a user's verifier raises
            return [], Verdict([], "reward_error", f"the verifier raised {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the pool's processes."""
        self._pool.stop()
        self._pool.join(timeout=5)


def _initialise(config: RewardConfig) -> None:
    global _verifier
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _verifier = load_verifier(config)


def _verify(jobs: list[Job]) -> list[list[float]]:
    assert _verifier is not None
    results = []
    for job in jobs:
        rewards = [float(reward) for reward in _verifier(job.completions, job.answer)]
        if len(rewards) != len(job.completions):
            raise ValueError(f"{len(rewards)} rewards for {len(job.completions)} completions")
        results.append(rewards)
    return results
