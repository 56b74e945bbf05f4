"""Whatever happens in whatever order, every group is counted once and no group older than the bound is trained on."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from components.experience.audit import audit
from components.experience.deliveries import Target
from components.experience.experience import Experience, Ticket
from components.experience.group import Group, Sample
from components.experience.redis_server import RedisServer
from components.storage.layout import RunLayout
from components.train.ledger import Ledger
from configs.run import RunConfig

B, STALENESS = 3, 1
_runs = itertools.count()
_server: list[RedisServer] = []


def server() -> RedisServer:
    if not _server:
        _server.append(RedisServer(Path(tempfile.mkdtemp(prefix="tandem-redis-"))))
    return _server[0]


class Loop(RuleBasedStateMachine):
    """Two rollout workers that die, a reward process that dies, a trainer that dies and resumes."""

    @initialize()
    def start(self) -> None:
        folder = tempfile.mkdtemp(prefix="tandem-any-order-")
        self.config = RunConfig.model_validate(
            {
                "name": f"any-{next(_runs)}",
                "storage": {"root": folder, "scratch": folder},
                "train": {"batch_groups": B, "minibatches": 1, "steps": 50},
                "loop": {"max_staleness": STALENESS},
            }
        )
        self.layout = RunLayout(self.config)
        self.experience = Experience(server().url, self.config)
        self.experience.open()
        self.version = self.durable = 0
        self.held = {"a": -1, "b": -1}
        self.leased: dict[str, list[Ticket]] = {"a": [], "b": []}
        self.lost: list[tuple[Ticket, int]] = []
        self.batches: dict[int, list[int]] = {}

    @rule(worker=st.sampled_from("ab"))
    def load(self, worker: str) -> None:
        self.held[worker] = self.version
        self.experience.verify(worker, Target(self.version, f"{self.version}"))

    @rule(worker=st.sampled_from("ab"), limit=st.integers(1, 7))
    def lease(self, worker: str, limit: int) -> None:
        if self.held[worker] >= 0:
            held = self.held[worker]
            self.leased[worker] += self.experience.lease(worker, Target(held, f"{held}"), limit)

    @rule(worker=st.sampled_from("ab"), count=st.integers(1, 7))
    def hand_in(self, worker: str, count: int) -> None:
        done, self.leased[worker] = self.leased[worker][:count], self.leased[worker][count:]
        if done:
            self.experience.hand_in([(ticket, self._group(ticket.group, self.held[worker])) for ticket in done])

    @rule(worker=st.sampled_from("ab"))
    def kill_rollout(self, worker: str) -> None:
        self.lost += [(ticket, self.held[worker]) for ticket in self.leased[worker]]
        self.leased[worker] = []
        self.experience.hand_back(worker)

    @rule(worker=st.sampled_from("ab"))
    def renew(self, worker: str) -> None:
        """Of what a worker leased it loses only what another has by now, or has handed in."""
        mine = self.leased[worker]
        other = {ticket.group for ticket in self.leased["b" if worker == "a" else "a"]}
        if mine:
            own = self.experience.renew(worker, mine)
            assert own <= {ticket.group for ticket in mine}
            assert not own & other

    @rule(worker=st.sampled_from("ab"))
    def leave_unfinished(self, worker: str) -> None:
        partial = [Sample.of(np.arange(1), np.zeros(1), self.held[worker], "abort")]
        self.experience.keep([(ticket, partial) for ticket in self.leased[worker]])
        self.kill_rollout(worker)

    @invariant()
    def partials_are_of_groups_that_still_run(self) -> None:
        if not hasattr(self, "experience"):
            return
        redis, key = self.experience.redis, self.experience.key
        stages = redis.hgetall(key("state"))
        assert all(stages.get(group) == b"running" for group in redis.hkeys(key("partials")))

    @rule()
    def the_dead_hand_in_after_all(self) -> None:
        if self.lost:
            self.experience.hand_in([(ticket, self._group(ticket.group, version)) for ticket, version in self.lost])
            self.lost = []

    @rule(count=st.integers(1, 7), dies=st.booleans(), drops=st.booleans())
    def reward(self, count: int, dies: bool, drops: bool) -> None:
        delivered = self.experience.deliver("r", count)
        if dies:
            self.experience.release_samples("r")
        elif drops:
            self.experience.drop_generated(delivered[:1], "reward_error")
            self.experience.score(delivered[1:])
        elif delivered:
            self.experience.score(delivered)

    @rule()
    def train(self) -> None:
        groups = self.experience.take(self.version + 1)
        if groups:
            taken = [group.id for group in groups]
            assert self.batches.setdefault(self.version + 1, taken) == taken, "a repeated step took another batch"
            assert all(self.version - group.oldest_version <= STALENESS for group in groups)
            self.version += 1

    @rule()
    def checkpoint(self) -> None:
        if self.version > self.durable:
            ledger = Ledger(self.version, self.experience.batches(self.durable + 1, self.version))
            self.layout.store.write(f"ledger/step-{self.version:06d}.json", msgspec.json.encode(ledger))
            self.experience.commit(self.version)
            self.durable = self.version

    @rule()
    def kill_train(self) -> None:
        self.version = self.durable
        self.held = {worker: min(held, self.version) for worker, held in self.held.items()}
        for worker, held in self.held.items():
            if held >= 0:
                self.experience.verify(worker, Target(held, f"{held}"))

    @invariant()
    def balanced(self) -> None:
        if hasattr(self, "experience"):
            assert audit(self.experience, self.layout).findings == []

    def _group(self, number: int, version: int) -> Group:
        sample = Sample.of(np.arange(2), np.zeros(2), version, "stop")
        return Group(number, "row", b"", "", [sample, sample])


TestAnyOrder = Loop.TestCase
TestAnyOrder.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
