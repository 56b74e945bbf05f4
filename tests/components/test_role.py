"""A role as a pod: it leaves when nobody owns it any more."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from components.experience.redis_server import RedisServer
from components.role import Inputs, Orphaned, Role
from configs.failure import ServiceGone, ToldToLeave
from configs.run import RunConfig


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("components.role.time.monotonic", made)
    return made


@pytest.fixture
def make_role(redis_server: RedisServer, make_config: Callable[..., RunConfig]) -> Iterator[Callable[[str], Role]]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def make(roles: str) -> Role:
        config = make_config(
            storage={"root": "s3://bucket/runs"}, loop={"roles": roles}, kubernetes={"orphan_s": 60, "ready_s": 0.2}
        )
        return Role("train", "train", config, Inputs(redis_server.url, "s3://bucket/data", "s3://bucket/start"))

    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_pod_outlives_a_launcher_that_is_back_in_time(make_role: Callable[[str], Role], clock: Clock) -> None:
    role = make_role("kubernetes")
    role.experience.beat(100)
    clock.now += 50
    role.check_leaving()
    role.experience.redis.delete(role.experience.key("heartbeat"))
    clock.now += 50
    role.check_leaving()
    role.experience.beat(100)
    clock.now += 50
    role.check_leaving()


def test_a_pod_without_a_launcher_leaves(make_role: Callable[[str], Role], clock: Clock) -> None:
    role = make_role("kubernetes")
    role.check_leaving()
    clock.now += 61
    with pytest.raises(Orphaned, match="no sign of rl_loop for 60 s"):
        role.check_leaving()


def test_a_process_needs_no_heartbeat(make_role: Callable[[str], Role], clock: Clock) -> None:
    role = make_role("processes")
    clock.now += 1e6
    role.check_leaving()


def test_a_pod_waits_for_redis_and_says_so(make_role: Callable[[str], Role]) -> None:
    role = make_role("kubernetes")
    role.wait_for_redis()
    away = Role("train", "train", role.config, Inputs("redis://127.0.0.1:1/0", "", ""))
    with pytest.raises(ServiceGone, match="not ready within"):
        away.wait_for_redis()
    away.leaving = True
    with pytest.raises(ToldToLeave):
        away.wait_for_redis()
