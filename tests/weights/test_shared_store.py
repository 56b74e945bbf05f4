"""The weights store among machines that share no disk, on a real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from components.storage.store import open_store
from components.weights.store import SharedWeightsStore, fingerprint
from configs.failure import BadData
from configs.run import StorageConfig

pytest_plugins = ["tests.storage.s3_server"]


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"b": torch.full((3, 2), value), "a": torch.full((4,), value, dtype=torch.bfloat16)}


class Machines:
    """Machines with a cache of their own and one store."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.uri, self.folder = uri, folder

    def store(self, machine: str) -> SharedWeightsStore:
        return SharedWeightsStore(self.folder / machine, open_store(f"{self.uri}/weights", StorageConfig()))


@pytest.fixture
def machines(s3_uri: str, tmp_path: Path) -> Machines:
    return Machines(s3_uri, tmp_path)


def test_another_machine_loads_and_proves_what_was_published(machines: Machines) -> None:
    published = machines.store("train").publish(3, tensors(0.5))
    other = machines.store("rollout")
    assert other.versions() == [3]
    assert other.check(3) == published
    assert fingerprint(other.load(3)) == published.tensors


def test_a_version_made_anew_replaces_what_a_machine_has_cached(machines: Machines) -> None:
    machines.store("train").publish(3, tensors(0.5))
    other = machines.store("rollout")
    other.load(3)
    # Training crashed, lost its disk, and came to version 3 again by another way.
    again = machines.store("train after the crash").publish(3, tensors(0.25))
    assert other.check(3).digest == again.digest
    assert fingerprint(other.load(3)) == again.tensors


def test_versions_are_pruned_in_the_store_and_in_the_cache(machines: Machines) -> None:
    train, other = machines.store("train"), machines.store("rollout")
    for version in range(6):
        train.publish(version, tensors(float(version)))
        other.load(version)
        train.prune(version, 3)
    assert other.versions() == [3, 4, 5]
    assert sorted(path.name for path in other.folder.glob("v*")) == ["v000004", "v000005"]
    with pytest.raises(BadData):
        machines.store("late").load(1)


def test_a_damaged_upload_is_refused(machines: Machines) -> None:
    machines.store("train").publish(1, tensors(1.0))
    store = machines.store("rollout")
    content = store.store.read("v000001/model.safetensors")
    store.store.write("v000001/model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BadData):
        store.check(1)
