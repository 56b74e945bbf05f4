"""The training role picks up exactly where a killed one stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from components.experience.audit import audit
from components.experience.deliveries import Target
from components.experience.experience import Experience
from components.experience.redis_server import RedisServer
from components.role import Inputs, Role
from components.train.catalogue import TrainerState
from components.train.main import TrainingRole
from components.weights.policy import checkpoint_tensors, save_policy
from configs.failure import BadData
from configs.run import RunConfig
from tests.train.test_checkpoint import TOKENIZER, save
from tests.train.test_trainer import digest, policy, sampled


@pytest.fixture
def role(make_config: Callable[..., RunConfig], redis_server: RedisServer) -> Iterator[Role]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    config = make_config(loop={"max_staleness": 10})
    made = Role("train", "train", config, Inputs(redis_server.url, "", ""))
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


def trained(role: Role) -> TrainingRole:
    """Two steps trained, the checkpoint made and acknowledged, four groups still on their way."""
    training = TrainingRole(role)
    fill(role.experience, training, 12)
    for step in (1, 2):
        training.trainer.update(role.experience.take(step))
    training.weights.publish(2, checkpoint_tensors(training.trainer.model))
    training._checkpoint()
    return training


def test_the_loop_is_told_of_a_checkpoint_that_takes_long(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.train.occupation.BEAT_S", 0.01)
    training = TrainingRole(role)
    assert role.experience.occupation() == ""
    training._publish()
    told: list[str] = []

    def store(state: TrainerState) -> str:
        end = time.monotonic() + 20
        while "checkpoint" not in role.experience.occupation() and time.monotonic() < end:
            time.sleep(0.01)
        told.append(role.experience.occupation())
        return ""

    monkeypatch.setattr(training.command, "checkpoint", store)
    training._checkpoint()
    assert told[0].startswith("storing checkpoint 0 since ")


def test_a_redis_that_lost_everything_starts_from_the_checkpoint(role: Role) -> None:
    first = trained(role)
    assert audit(role.experience, role.layout).findings == []
    role.experience.redis.delete(*role.experience.redis.keys(role.experience.key("*").replace("{", "\\{")))
    role.experience.open()
    second = TrainingRole(role)
    assert second.trainer.step == 2
    assert digest(second.trainer) == digest(first.trainer)
    result = audit(role.experience, role.layout)
    assert result.findings == []
    assert result.dropped_by_reason == {"lost": 4}
    held = Target(2, "proof")
    role.experience.verify("w", held)
    assert min(ticket.group for ticket in role.experience.lease("w", held, 4)) == 13, "an id was given twice"


def test_a_checkpoint_and_a_redis_of_different_runs_are_refused(role: Role) -> None:
    trained(role)
    role.layout.store.delete("checkpoints")
    with pytest.raises(BadData, match="newest checkpoint is at step 0, but Redis tells of 2 steps"):
        TrainingRole(role)


def test_what_a_killed_trainer_left_half_written_is_swept(role: Role) -> None:
    for torn in (role.layout.scratch / ".checkpoint-x", role.layout.weights / ".publish-x"):
        torn.mkdir(parents=True)
    TrainingRole(role)
    assert not list(role.layout.scratch.rglob(".*-x"))
