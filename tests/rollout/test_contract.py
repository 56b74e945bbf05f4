"""The engine contract on the torch engine in its worker's process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from components.rollout.in_process import InProcessEngine
from components.rollout.torch_policy import TorchPolicy
from components.weights.geometry import read_geometry
from tests.rollout.contract import *  # noqa: F403
from tests.rollout.contract import Subject
from tests.rollout.contract_policy import make_version


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """One engine for all tests."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("versions")
    versions = [make_version(folder / str(number), number) for number in (1, 2, 3)]
    file = versions[0].folder / "config.json"
    subject = Subject(InProcessEngine(TorchPolicy.empty(read_geometry(file, str(file)))), versions)
    subject.run(subject.engine.open())
    yield subject
    subject.stop()
