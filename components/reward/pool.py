"""Verification in processes that can be killed: a verifier that loops forever costs its own group, nothing else."""

from __future__ import annotations

import math
import multiprocessing
import signal
from concurrent.futures import TimeoutError as TaskTimeout
from typing import NamedTuple

from pebble import ProcessExpired, ProcessFuture, ProcessPool

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
        self.processes = config.processes
        self._pool = ProcessPool(
            max_workers=config.processes,
            initializer=_initialise,
            initargs=(config,),
            context=multiprocessing.get_context("spawn"),
        )

    def verify(self, jobs: list[Job]) -> list[Verdict]:
        """Verify jobs in order.

        Every process gets an even share as one task, which is cheap when nothing is wrong; of a task that fails each
        job goes by itself, so that only the culprits are without rewards.
        """
        share = max(1, -(-len(jobs) // self.processes))
        parts = [jobs[start : start + share] for start in range(0, len(jobs), share)]
        futures = [self._pool.schedule(_verify, args=(part,), timeout=self.timeout_s) for part in parts]
        verdicts: list[Verdict] = []
        for part, future in zip(parts, futures, strict=True):
            done, failure = self._outcome(future)
            if failure is None:
                verdicts += done
            elif len(part) == 1:
                verdicts.append(failure)
            else:
                verdicts += [verdict for job in part for verdict in self.verify([job])]
        return verdicts

    def _outcome(self, future: ProcessFuture) -> tuple[list[Verdict], Verdict | None]:
        try:
            rewards = future.result()
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
        if not all(map(math.isfinite, rewards)):
            raise ValueError(f"a reward is not a finite number: {rewards}")
        results.append(rewards)
    return results
