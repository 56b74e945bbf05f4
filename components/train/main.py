"""Trains the policy: takes batches of scored groups, updates, publishes each version, checkpoints, acknowledges."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter

import msgspec
import torch

from components.experience.group import Group
from components.role import Orphaned, Role, run_role
from components.train.catalogue import TrainerState, prune_checkpoints
from components.train.checkpoint import restore, save_checkpoint
from components.train.ledger import Ledger
from components.weights.policy import checkpoint_tensors, policy_tokenizer
from components.weights.store import open_weights
from configs.failure import BadData, ToldToLeave

IDLE_S = 0.003
"""Seconds between looks for a batch."""


class TrainingRole:
    """The trainer as a role of the loop."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.weights = open_weights(role.layout)
        start = role.start
        self.tokenizer = policy_tokenizer(start)
        self.trainer, state = restore(role.layout, role.config, start)
        self.saved = state.step if state else -1
        # What a killed process left half written.
        for torn in (*role.layout.scratch.glob(".checkpoint-*"), *role.layout.weights.glob(".publish-*")):
            shutil.rmtree(torn, ignore_errors=True)
        self._check_experience(state)
        if state is not None:
            # The trainer may have died between making the checkpoint durable and acknowledging its groups.
            self._acknowledge(state.step)

    def run(self) -> None:
        """Update until the run's last step, or until told to leave; either way the last step is made durable."""
        role, config = self.role, self.role.config.train
        self._publish()
        try:
            while self.trainer.step < config.steps:
                groups, waited = self._next_batch()
                self._update(groups, waited)
                if self.trainer.step % config.checkpoint_every == 0:
                    self._checkpoint()
        except Orphaned as gone:
            # A pod that failed would be started again, with nobody to work for.
            self._checkpoint()
            role.emit("orphaned", self.trainer.step, sentence=gone.sentence)
            return
        except ToldToLeave:
            self._checkpoint()
            raise
        self._checkpoint()
        role.emit("finished", self.trainer.step)

    def _next_batch(self) -> tuple[list[Group], float]:
        """The next step's groups, and the seconds spent waiting for them."""
        start = time.time()
        while True:
            self.role.check_leaving()
            if groups := self.role.experience.take(self.trainer.step + 1):
                break
            self.role.pause(IDLE_S)
        end = time.time()
        self.role.emit("span", self.trainer.step, kind="wait", start=start, end=end)
        return groups, end - start

    def _update(self, groups: list[Group], waited: float) -> None:
        start = time.time()
        version = self.trainer.step
        metrics = self.trainer.update(groups)
        trained = time.time()
        digest = self._publish()
        end = time.time()
        metrics |= {
            "perf/train_time": trained - start,
            "perf/train_wait_time": waited,
            "perf/step_time": end - start + waited,
            "perf/wait_time_ratio": waited / (end - start + waited),
        }
        staleness = Counter(str(max(0, version - group.oldest_version)) for group in groups)
        self.role.emit("span", self.trainer.step, kind="train", start=start, end=trained, groups=len(groups))
        self.role.emit("span", self.trainer.step, kind="publish", start=trained, end=end)
        self.role.emit(
            "step", self.trainer.step, step=self.trainer.step, metrics=metrics, staleness=dict(staleness), digest=digest
        )

    def _publish(self) -> str:
        """Put the policy into the weights store and announce it; returns its digest."""
        manifest = self.weights.publish(self.trainer.step, checkpoint_tensors(self.trainer.model))
        self.role.experience.announce(manifest.version, manifest.digest)
        self.weights.prune(manifest.version, self.role.config.weights.keep, self.role.experience.held_versions())
        return manifest.digest

    def _checkpoint(self) -> None:
        """Make the current step durable, then acknowledge its groups."""
        step, experience = self.trainer.step, self.role.experience
        if step == self.saved:
            return
        start = time.time()
        manifest = self.weights.manifest(step)
        state = TrainerState(step, experience.counters().get("issued", 0), manifest.digest)
        uri = save_checkpoint(self.trainer, self.tokenizer, self.role.layout, state)
        self._acknowledge(step)
        prune_checkpoints(self.role.layout, self.role.config.train.keep_checkpoints)
        self.saved = step
        self.role.emit("checkpoint", step, uri=uri)
        self.role.emit("span", step, kind="checkpoint", start=start, end=time.time())

    def _check_experience(self, state: TrainerState | None) -> None:
        """See that Redis and the checkpoint tell of the same run; a Redis that lost everything starts from the latter.

        Raises:
            BadData: they do not, and the counts would never balance again.
        """
        experience, step = self.role.experience, state.step if state else 0
        counters = experience.counters()
        if state is not None and not counters:
            experience.recount(state.step, state.issued)
            return
        durable = counters.get("durable_step", 0)
        known = durable + len(experience.batches(durable + 1, step))
        if durable > step or known < step:
            raise BadData(
                f"the newest checkpoint is at step {step}, but Redis tells of {max(durable, known)} steps: one of them is"
                " another run's or was lost; restore it, or start a new run from a checkpoint by model.checkpoint"
            )

    def _acknowledge(self, step: int) -> None:
        """Enter the groups that a durable checkpoint covers into the ledger, then acknowledge them; repeatable."""
        experience = self.role.experience
        if groups := experience.batches(experience.counters().get("durable_step", 0) + 1, step):
            self.role.layout.store.write(f"ledger/step-{step:06d}.json", msgspec.json.encode(Ledger(step, groups)))
            experience.commit(step)


def train(role: Role) -> None:
    """Train to the run's last step."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    TrainingRole(role).run()


if __name__ == "__main__":
    run_role("train", train)
