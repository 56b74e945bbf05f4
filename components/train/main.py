"""Trains the policy: takes batches of scored groups, updates, publishes each version, checkpoints, acknowledges."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter

import msgspec
import torch

from components.experience.group import Group
from components.role import Orphaned, Role, ended_by, run_role
from components.train import follower
from components.train.catalogue import TrainerState, prune_checkpoints
from components.train.checkpoint import restore
from components.train.gang import Gang, Node
from components.train.ledger import Ledger
from components.train.occupation import occupied
from components.train.orders import Command
from components.train.ranks import Ranks
from components.weights.policy import policy_tokenizer
from components.weights.store import open_weights
from configs.failure import TOLD_TO_LEAVE, BadData, ToldToLeave

IDLE_S = 0.003
"""Seconds between looks for a batch."""
LISTEN_S = 1.0
"""Seconds between looks at whether another rank was told to leave."""


class TrainingRole:
    """The trainer as a role of the loop; with several ranks, in the hands of rank 0.

    Args:
        role: What the loop gives.
        ranks: Those that train together; the others follow (`components.train.follower`).
    """

    def __init__(self, role: Role, ranks: Ranks | None = None) -> None:
        self.role = role
        self.weights = open_weights(role.layout)
        start = role.start
        if ranks is not None:
            ranks.wait()
        self.trainer, state = restore(role.layout, role.config, start, ranks)
        self.command = Command(self.trainer, policy_tokenizer(start), role.layout)
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
        if (choice := self.trainer.dispatch) is not None:
            role.emit("dispatch", self.trainer.step, reason=choice.reason, figures=choice.figures)
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
        listened = 0.0
        while True:
            self.role.check_leaving()
            if time.monotonic() - listened >= LISTEN_S:
                listened = time.monotonic()
                if self.command.told_to_leave():
                    raise ToldToLeave("another rank of training was told to leave; the work was handed back")
            if groups := self.role.experience.take(self.trainer.step + 1):
                break
            self.role.pause(IDLE_S)
        end = time.time()
        self.role.emit("span", self.trainer.step, kind="wait", start=start, end=end)
        return groups, end - start

    def _update(self, groups: list[Group], waited: float) -> None:
        start = time.time()
        version = self.trainer.step
        metrics = self.command.update(groups)
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
        with occupied(self.role.experience, f"publishing version {self.trainer.step}"):
            manifest = self.weights.publish(self.trainer.step, self.command.tensors())
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
        with occupied(experience, f"storing checkpoint {step}"):
            uri = self.command.checkpoint(state)
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
    with occupied(role.experience, "meeting its ranks"):
        gang = Gang(role.config, role.layout, sys.argv[1:])
    with gang:
        with occupied(role.experience, "restoring"):
            training = TrainingRole(role, gang.ranks)
        try:
            training.run()
        except ToldToLeave:
            gang.let_go()
            training.command.end(TOLD_TO_LEAVE)
            raise
        gang.let_go()
        training.command.end()


if __name__ == "__main__":
    if Node.from_environment().number:
        # The first node alone speaks to the loop.
        ended_by(follower.main)
    run_role("train", train)
