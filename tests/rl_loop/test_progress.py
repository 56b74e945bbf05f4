"""When a run in which nothing moves is ended, and when it is not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from components.experience.experience import Experience
from components.experience.redis_server import RedisServer
from components.rl_loop.progress import ProgressWatch
from configs.failure import ServiceGone
from configs.run import RunConfig

Make = Callable[..., RunConfig]


def opened(redis: RedisServer, config: RunConfig) -> Experience:
    made = Experience(redis.url, config)
    made.open()
    return made


def test_what_training_says_it_is_at_is_no_standstill(make_config: Make, redis_server: RedisServer) -> None:
    experience = opened(redis_server, make_config(loop={"no_progress_s": 0.3}))
    watch = ProgressWatch(experience.config, experience, lambda worker: "words")
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        experience.occupy("restoring since 12:00:00", 30.0)
        watch.note((0,))
        time.sleep(0.05)
    # Nobody says so any more.
    experience.occupy("restoring since 12:00:00", 0.001)
    with pytest.raises(ServiceGone, match=r"no progress for \d+ s: train stopped"):
        for _ in range(100):
            watch.note((0,))
            time.sleep(0.05)


def test_what_training_is_at_has_a_limit_that_begins_anew_with_another(
    make_config: Make, redis_server: RedisServer
) -> None:
    experience = opened(redis_server, make_config(loop={"checkpoint_s": 0.5}))
    watch = ProgressWatch(experience.config, experience, lambda worker: "words")
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        experience.occupy(f"storing checkpoint {int(10 * time.monotonic())}", 30.0)
        watch.note((0,))
        time.sleep(0.01)
    with pytest.raises(ServiceGone, match=r"train is storing checkpoint \d+, longer than the 0 s of loop.checkpoint_s"):
        for number in range(100):
            # That groups move meanwhile does not help: training hangs.
            watch.note((number,))
            time.sleep(0.05)
