"""Real servers that several tests share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from components.experience.deliveries import Target
from components.experience.experience import Experience
from components.experience.group import Group, Sample
from components.experience.redis_server import RedisServer
from configs.run import RunConfig

pytest_plugins = ["tests.cluster.plugin", "tests.storage.s3_server", "tests.tracking.mlflow_server"]

LONG = ("tests/rl_loop/test_loop.py", "tests/pipelines/test_local.py")
"""Files of minutes; begun last, they would be waited for by one process alone."""

_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, the rest in its order."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One real redis-server for all tests; each test uses a run name of its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A small configuration with places of its own; sections given are merged into it."""

    def make(**sections: Any) -> RunConfig:
        values: dict[str, Any] = {
            "name": f"test-{next(_numbers)}",
            "storage": {"root": str(tmp_path / "store"), "scratch": str(tmp_path / "scratch")},
            "train": {"batch_groups": 4, "minibatches": 2, "steps": 6},
            "loop": {"max_staleness": 1},
        }
        for section, content in sections.items():
            values[section] = {**values[section], **content} if isinstance(values.get(section), dict) else content
        return RunConfig.model_validate(values)

    return make


@pytest.fixture
def make_experience(redis_server: RedisServer, make_config: Callable[..., RunConfig]) -> Callable[..., Experience]:
    """Streams of a fresh run."""

    def make(**sections: Any) -> Experience:
        experience = Experience(redis_server.url, make_config(**sections))
        experience.open()
        return experience

    return make


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """A group with G completions of three tokens; rewards are set when given."""

    def make(number: int, version: int = 0, size: int = 4, rewards: list[float] | None = None, seed: int = 0) -> Group:
        random = np.random.default_rng([seed, number])
        samples = []
        for index in range(size):
            sample = Sample.of(np.append(random.integers(3, 15, 2), 2), -random.random(3), version, "stop")
            sample.reward = rewards[index] if rewards else None
            samples.append(sample)
        return Group(number, f"row-{number}", random.integers(3, 15, 6).astype("<i4").tobytes(), "12", samples)

    return make


@pytest.fixture
def prove() -> Callable[..., Target]:
    """Have a worker verified for a version."""

    def verified(experience: Experience, worker: str, version: int = 0) -> Target:
        held = Target(version, f"digest-{version}")
        experience.verify(worker, held)
        return held

    return verified
