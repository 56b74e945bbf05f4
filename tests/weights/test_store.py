"""A version in the weights store is whole, or it is not believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from components.weights.store import WeightsStore, digest_of, fingerprint
from configs.failure import BadConfig, BadData

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors() -> Tensors:
    random = torch.Generator().manual_seed(0)
    fused = torch.randn(2, 8, 4, generator=random)
    return {"b.weight": fused[0], "c.weight": fused[1], "a.weight": torch.randn(3, generator=random).bfloat16()}


def shard(store: WeightsStore, version: int, number: int = 0) -> Path:
    """A file of a version, in the store."""
    return store.shards / store.manifest(version).shards[number].file


def test_what_is_published_is_loaded(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path)
    manifest = store.publish(7, tensors)
    loaded = store.load(7)
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert store.check(7) == manifest
    assert digest_of(fingerprint(loaded)) == manifest.digest
    assert manifest.bytes == 2 * 8 * 4 * 4 + 3 * 2
    assert {name: data.nbytes for name, data in store.mapped(7).items()} == {
        "a.weight": 6,
        "b.weight": 128,
        "c.weight": 128,
    }
    assert store.mapped(7)["b.weight"].tobytes() == tensors["b.weight"].numpy().tobytes()


def test_a_large_version_has_several_shards(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path, shard_bytes=130)
    manifest = store.publish(1, tensors)
    assert len(manifest.shards) == 3
    assert sorted(file.name for file in store.shards.iterdir()) == sorted(each.file for each in manifest.shards)
    assert fingerprint(store.load(1)) == manifest.tensors


def test_equal_shards_are_there_once(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path, shard_bytes=130)
    store.publish(1, tensors)
    inodes = {file.name: file.stat().st_ino for file in store.shards.iterdir()}
    store.publish(2, {**tensors, "c.weight": tensors["c.weight"] + 1})
    now = {file.name: file.stat().st_ino for file in store.shards.iterdir()}
    assert len(now) == 4
    assert inodes.items() <= now.items()


def test_a_damaged_shard_that_comes_again_is_written_again(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    flip_a_bit(shard(store, 1))
    store.publish(2, tensors)
    assert store.check(2).digest == store.check(1).digest


def test_float32_is_published_as_bfloat16_where_asked(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path, dtype="bfloat16")
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert store.publish(1, tensors).digest == digest_of(fingerprint(rounded))
    assert all(torch.equal(loaded, rounded[name]) for name, loaded in store.load(1).items())


def test_the_digest_sees_every_change(tensors: Tensors) -> None:
    original = digest_of(fingerprint(tensors))
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["c.weight"][0, 0] += 1e-6
    swapped = {**tensors, "b.weight": tensors["c.weight"], "c.weight": tensors["b.weight"]}
    reshaped = {**tensors, "b.weight": tensors["b.weight"].reshape(4, 8)}
    assert len({original, *(digest_of(fingerprint(other)) for other in (changed, swapped, reshaped))}) == 4


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def flip_a_bit_of_the_digest(file: Path) -> None:
    data = file.read_bytes()
    at = data.index(b'"digest":"') + 10
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def damage_the_header(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:8] + b"[" + data[9:])


def grow_the_header(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(b"\xff" * 8 + data[8:])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    "damage", [flip_a_bit, truncate, empty, Path.unlink, damage_the_header, grow_the_header], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("seen", [False, True], ids=["first-look", "seen-before"])
def test_a_damaged_shard_is_noticed(
    tmp_path: Path, tensors: Tensors, damage: Callable[[Path], None], seen: bool
) -> None:
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    if seen:
        store.check(1)
    file = shard(store, 1)
    damage(file)
    with pytest.raises(BadData, match=file.name) as raised:
        store.check(1)
    if damage in (flip_a_bit, truncate) and not seen:
        assert "tensor 'a.weight'" in raised.value.sentence
    if not seen:
        assert not list(store.folders.root.glob("v*")), "a folder of damaged weights is to be seen"


@pytest.mark.parametrize("damage", [flip_a_bit_of_the_digest, truncate, empty, Path.unlink], ids=lambda d: d.__name__)
def test_a_damaged_manifest_is_noticed(tmp_path: Path, tensors: Tensors, damage: Callable[[Path], None]) -> None:
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    damage(store.path(1))
    for read in (store.check, store.load, store.folder, store.manifest):
        with pytest.raises(BadData, match="version 1"):
            read(1)


def test_a_manifest_cannot_name_a_file_elsewhere(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path / "weights")
    manifest = store.publish(1, tensors)
    content = store.path(1).read_bytes()
    store.path(1).write_bytes(content.replace(manifest.shards[0].file.encode(), b"../../secret.safetensors"))
    with pytest.raises(BadData, match="names a file that is no shard"):
        store.load(1)


def test_another_versions_file_is_noticed(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    store.publish(2, {name: tensor + 1 for name, tensor in tensors.items()})
    shard(store, 1).write_bytes(shard(store, 2).read_bytes())
    with pytest.raises(BadData, match="differs from its manifest at tensor 'a.weight'"):
        store.check(1)


def test_a_damaged_folder_is_made_again(tmp_path: Path, tensors: Tensors) -> None:
    """What lies in the cache is not the store's word."""
    store = WeightsStore(tmp_path)
    manifest = store.publish(1, tensors)
    file = store.folder(1) / "model.safetensors"
    content = file.read_bytes()
    file.unlink()  # it is a link to the shard
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert store.check(1) == manifest
    assert fingerprint(store.load(1)) == manifest.tensors


def test_a_repeated_step_replaces_its_version(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    written = shard(store, 1).stat().st_ino, store.path(1).stat().st_ino
    store.load(1)
    WeightsStore(tmp_path).publish(1, tensors)
    assert (shard(store, 1).stat().st_ino, store.path(1).stat().st_ino) == written
    again = store.publish(1, {name: tensor + 1 for name, tensor in tensors.items()})
    assert store.check(1) == again
    assert fingerprint(store.load(1)) == again.tensors


def test_pruning_keeps_the_newest(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path)
    for version in range(5):
        store.publish(version, {name: tensor + version for name, tensor in tensors.items()})
    store.prune(4, keep=2)
    assert store.versions() == [3, 4]
    assert {file.name for file in store.shards.iterdir()} == {shard(store, version).name for version in (3, 4)}


def test_pruning_keeps_what_is_needed(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path)
    for version in range(6):
        store.publish(version, {name: tensor + version for name, tensor in tensors.items()})
    store.prune(5, keep=2, needed={1, 77})
    assert store.versions() == [1, 4, 5]
    assert all(store.check(version) for version in store.versions())


def test_pruning_after_a_rollback_keeps_the_current_version(tmp_path: Path, tensors: Tensors) -> None:
    """Training that resumes at an earlier step must not lose that version to the later ones still lying there."""
    store = WeightsStore(tmp_path)
    for version in (2, 7, 8, 9):
        store.publish(version, tensors)
    store.prune(2, keep=2)
    assert store.versions() == [2, 7, 8, 9]


def test_a_version_is_not_lost_to_the_pruning_of_one_with_the_same_weights(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path)
    for version in range(4):
        store.publish(version, tensors)
    store.prune(3, keep=2)
    assert store.versions() == [2, 3]
    assert len(list(store.shards.iterdir())) == 1
    assert store.check(3)


def test_nothing_is_pruned_for_a_damaged_manifest(tmp_path: Path, tensors: Tensors) -> None:
    """It may name any shard."""
    store = WeightsStore(tmp_path)
    for version in range(3):
        store.publish(version, {name: tensor + version for name, tensor in tensors.items()})
    good = store.path(1).read_bytes()
    truncate(store.path(1))
    store.prune(2, keep=2)
    store.path(1).write_bytes(good)
    assert store.check(1) and store.check(2)


def test_pruning_an_empty_store_is_fine(tmp_path: Path) -> None:
    WeightsStore(tmp_path / "none").prune(4, keep=2)


def test_an_unwritable_store_is_one_sentence(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(BadConfig, match=r"version 1 cannot be written.*storage\.scratch"):
        WeightsStore(tmp_path / "weights").publish(1, tensors)


def test_a_version_whose_removal_was_cut_short_can_be_made_again(tmp_path: Path, tensors: Tensors) -> None:
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    store.path(1).unlink()
    assert store.versions() == []
    manifest = store.publish(1, tensors)
    assert store.check(1) == manifest


def test_shards_without_a_manifest_are_swept(tmp_path: Path, tensors: Tensors) -> None:
    """A publication that died between the two left them."""
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    store.path(1).unlink()
    store.publish(2, {name: tensor + 1 for name, tensor in tensors.items()})
    assert len(list(store.shards.iterdir())) == 2
    store.prune(2, keep=4)
    assert [file.name for file in store.shards.iterdir()] == [shard(store, 2).name]
    assert store.versions() == [2]
