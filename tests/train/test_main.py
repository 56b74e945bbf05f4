"""The training role picks up exactly where a killed one stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from components.experience.audit import audit
from components.experience.experience import Experience, Target
from components.experience.redis_server import RedisServer
from components.role import Role
from components.train.main import TrainingRole
from components.weights.policy import save_policy
from configs.run import RunConfig
from tests.train.test_checkpoint import TOKENIZER, save
from tests.train.test_trainer import digest, policy, sampled


@pytest.fixture
def role(make_config: Callable[..., RunConfig], redis_server: RedisServer) -> Iterator[Role]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    made = Role("train", "train", make_config(loop={"max_staleness": 10}), redis_server.url)
    made.layout.scratch.mkdir(parents=True)
    save_policy(policy(), TOKENIZER, made.layout.scratch / "start")
    made.experience.open()
    yield made
    for number, handler in handlers.items():
        signal.signal(number, handler)


def fill(experience: Experience, training: TrainingRole, groups: int) -> None:
    """Bring scored groups to training, as rollout and reward would."""
    held = Target(0, "proof")
    experience.verify("w", held)
    tickets = experience.lease("w", held, groups)
    made = sampled(training.trainer, groups, seed=groups)
    for ticket, group in zip(tickets, made, strict=True):
        group.id = ticket.group
    experience.hand_in(list(zip(tickets, made, strict=True)))
    experience.score(
        [item._replace(group=group) for item, group in zip(experience.deliver("r", groups), made, strict=True)]
    )


def test_a_checkpoint_that_was_not_acknowledged_is_acknowledged_at_the_next_start(role: Role) -> None:
    first = TrainingRole(role)
    fill(role.experience, first, 12)
    for step in (1, 2):
        first.trainer.update(role.experience.take(step))
    save(first.trainer, role.layout)  # and here it dies
    assert role.experience.counters().get("durable", 0) == 0

    second = TrainingRole(role)
    assert second.trainer.step == 2
    assert digest(second.trainer) == digest(first.trainer)
    assert role.experience.counters()["durable"] == 8
    assert audit(role.experience, role.layout).findings == []
    assert [group.id for group in role.experience.take(3)] == [9, 10, 11, 12]

    third = TrainingRole(role)
    assert third.trainer.step == 2
    assert audit(role.experience, role.layout).findings == []
