"""The weights store among machines that share no disk, on a real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from components.storage.store import open_store
from components.weights.shared_store import SharedWeightsStore
from components.weights.store import fingerprint
from configs.failure import BadData
from configs.run import StorageConfig
from tests.weights.test_differences import published, start, stepped

pytest_plugins = ["tests.storage.s3_server"]


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"b": torch.full((3, 2), value), "a": torch.full((4,), value, dtype=torch.bfloat16)}


class Machines:
    """Machines with a folder of their own and one store."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.uri, self.folder = uri, folder

    def store(self, machine: str, deltas: int = 0, shard_bytes: int = 1 << 30) -> SharedWeightsStore:
        store = open_store(f"{self.uri}/weights", StorageConfig())
        return SharedWeightsStore(self.folder / machine, store, deltas, shard_bytes=shard_bytes)


@pytest.fixture
def machines(s3_uri: str, tmp_path: Path) -> Machines:
    return Machines(s3_uri, tmp_path)


def shard(store: SharedWeightsStore, version: int) -> str:
    """Key of a file of a version."""
    return f"shards/{store.manifest(version).shards[0].file}"


def test_another_machine_loads_and_proves_what_was_published(machines: Machines) -> None:
    published = machines.store("train").publish(3, tensors(0.5))
    other = machines.store("rollout")
    assert other.versions() == [3]
    assert other.check(3) == published
    assert fingerprint(other.load(3)) == published.tensors


def test_differences_reach_another_machine(machines: Machines) -> None:
    made = published(machines.store("train", deltas=3, shard_bytes=4000), range(6))
    follower, late = machines.store("rollout"), machines.store("joiner")
    assert len(follower.manifest(1).shards) > 0 and follower.manifest(1).base
    assert len(follower.manifest(0).shards) > 1
    for version, expected in made.items():
        assert fingerprint(follower.load(version)) == fingerprint(expected)
    assert fingerprint(late.load(3)) == fingerprint(made[3])
    assert late.check(5).digest == follower.manifest(5).digest
    kept = [path for path in late.root.rglob("*.safetensors") if "folders/v" not in str(path)]
    assert kept == [], "what was fetched has done its work"


def test_the_next_version_costs_one_difference(machines: Machines) -> None:
    made = published(machines.store("train", deltas=9), range(4))
    follower = machines.store("rollout")
    follower.folder(2)
    for version in range(3):
        follower.store.delete(f"manifests/v{version:06d}.json")
    assert fingerprint(follower.load(3)) == fingerprint(made[3])


def test_a_version_made_anew_replaces_what_a_machine_has_cached(machines: Machines) -> None:
    machines.store("train").publish(3, tensors(0.5))
    other = machines.store("rollout")
    other.load(3)
    # Training crashed, lost its disk, and came to version 3 again by another way.
    again = machines.store("train after the crash").publish(3, tensors(0.25))
    assert other.check(3).digest == again.digest
    assert fingerprint(other.load(3)) == again.tensors


def test_a_base_made_anew_is_noticed(machines: Machines) -> None:
    made = published(machines.store("train", deltas=9), range(2))
    machines.store("another").publish(0, stepped(made[0], 9))
    with pytest.raises(BadData, match=r"s3://.*v000001.json: version 1 is the difference from 0 with digest"):
        machines.store("rollout").load(1)


def test_a_repeated_step_uploads_nothing(machines: Machines) -> None:
    train = machines.store("train", deltas=9)
    made = published(train, range(2))
    written: list[str] = []
    again = machines.store("train", deltas=9)
    upload, write = again.store.upload, again.store.write
    again.store.upload = lambda *args: written.append(args[1]) or upload(*args)  # type: ignore[method-assign]
    again.store.write = lambda *args: written.append(args[0]) or write(*args)  # type: ignore[method-assign]
    again.publish(0, made[0])
    again.publish(1, made[1])
    assert written == []
    again.publish(2, stepped(made[1], 1))
    assert [key.partition("/")[0] for key in written] == ["shards", "manifests"]


def test_a_machine_that_lost_its_disk_publishes_the_same_step_again(machines: Machines) -> None:
    made = published(machines.store("train", deltas=9), range(2))
    fresh = machines.store("fresh", deltas=9)
    fresh.publish(1, made[1])
    fresh.publish(2, stepped(made[1], 1))
    assert fresh.manifest(1).base is None
    assert fingerprint(machines.store("rollout").load(2)) == fingerprint(stepped(made[1], 1))


def test_versions_are_pruned_in_the_store_and_on_the_machines(machines: Machines) -> None:
    train, other = machines.store("train"), machines.store("rollout")
    for version in range(6):
        train.publish(version, tensors(float(version)))
        other.load(version)
        train.prune(version, 3)
    assert other.versions() == [3, 4, 5]
    assert sorted(path.name[:7] for path in other.folders.root.glob("v*")) == ["v000004", "v000005"]
    assert len(list(train.shards.iterdir())) == 3
    train.prune(5, 3)
    assert set(train.store.list("shards")) == {shard(train, version) for version in (3, 4, 5)}
    with pytest.raises(BadData):
        machines.store("late").load(1)


def test_pruning_keeps_what_is_needed_and_what_differences_lead_back_to(machines: Machines) -> None:
    train = machines.store("train", deltas=3)
    made = published(train, range(11))
    for _ in range(2):
        train.prune(10, keep=2, needed={2})
    assert train.versions() == [0, 1, 2, 8, 9, 10]
    for version in train.versions():
        assert fingerprint(machines.store(f"reader {version}").load(version)) == fingerprint(made[version])


def test_what_another_publisher_has_not_finished_survives_a_prune(machines: Machines) -> None:
    """A trainer that is not quite dead yet may prune between the shards and the manifest of its successor."""
    dying, train = machines.store("dying"), machines.store("train")
    for version in range(4):
        dying.publish(version, tensors(float(version)))
    file = train.root / "coming"
    file.parent.mkdir()
    file.write_bytes(b"a shard whose manifest comes next")
    train.store.upload(file, "shards/coming")
    dying.prune(3, 2)
    assert "shards/coming" in train.store.list("shards")


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_damaged_upload_is_refused(machines: Machines, damage: str, broken: int) -> None:
    published(machines.store("train", deltas=9), range(2))
    store = machines.store("rollout")
    key = shard(store, broken)
    content = store.store.read(key)
    if damage == "delete":
        store.store.delete(key)
    else:
        changed = {"flip": content[:-20] + bytes([content[-20] ^ 1]) + content[-19:], "truncate": content[:-5]}
        store.store.write(key, changed.get(damage, b""))
    with pytest.raises(BadData, match=key.removeprefix("shards/")):
        store.check(1)
    assert not list(store.folders.root.glob("v*"))
    # Once it is mended, the same process reads it.
    store.store.write(key, content)
    assert store.check(1)


def test_a_missing_upload_is_noticed_though_the_folder_is_there(machines: Machines) -> None:
    machines.store("train").publish(1, start())
    store = machines.store("rollout")
    store.folder(1)
    store.store.delete(shard(store, 1))
    with pytest.raises(BadData, match="is missing; version 1 needs it"):
        store.check(1)


def test_a_damaged_manifest_is_one_sentence(machines: Machines) -> None:
    machines.store("train").publish(1, tensors(1.0))
    store = machines.store("rollout")
    key = "manifests/v000001.json"
    store.store.write(key, store.store.read(key)[:-3])
    with pytest.raises(BadData, match=r"s3://.*/manifests/v000001.json: version 1"):
        store.load(1)
