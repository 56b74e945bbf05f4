"""A version in the weights store is whole, or it is not believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from components.weights.store import WeightsStore, digest_of, fingerprint
from configs.failure import BadConfig, BadData


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    fused = torch.randn(2, 8, 4, generator=random)
    return {"b.weight": fused[0], "c.weight": fused[1], "a.weight": torch.randn(3, generator=random).bfloat16()}


def test_what_is_published_is_loaded(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    store = WeightsStore(tmp_path)
    manifest = store.publish(7, tensors)
    loaded = store.load(7)
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert store.check(7) == manifest
    assert digest_of(fingerprint(loaded)) == manifest.digest
    assert manifest.bytes == 2 * 8 * 4 * 4 + 3 * 2


def test_the_digest_sees_every_change(tensors: dict[str, torch.Tensor]) -> None:
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


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, empty, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_damage_is_noticed(
    tmp_path: Path, tensors: dict[str, torch.Tensor], damage: Callable[[Path], None], name: str
) -> None:
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    damage(store.path(1) / name)
    with pytest.raises(BadData, match="version 1"):
        store.check(1)


def test_another_versions_file_is_noticed(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    store.publish(2, {name: tensor + 1 for name, tensor in tensors.items()})
    (store.path(1) / "model.safetensors").write_bytes((store.path(2) / "model.safetensors").read_bytes())
    with pytest.raises(BadData, match="differs from its manifest at tensor 'a.weight'"):
        store.check(1)


def test_a_repeated_step_replaces_its_version(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    written = (store.path(1) / "model.safetensors").stat().st_ino
    store.publish(1, tensors)
    assert (store.path(1) / "model.safetensors").stat().st_ino == written
    again = store.publish(1, {name: tensor + 1 for name, tensor in tensors.items()})
    assert store.check(1) == again


def test_pruning_keeps_the_newest(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    store = WeightsStore(tmp_path)
    for version in range(5):
        store.publish(version, tensors)
    store.prune(4, keep=2)
    assert store.versions() == [3, 4]


def test_pruning_after_a_rollback_keeps_the_current_version(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Training that resumes at an earlier step must not lose that version to the later ones still lying there."""
    store = WeightsStore(tmp_path)
    for version in (2, 7, 8, 9):
        store.publish(version, tensors)
    store.prune(2, keep=2)
    assert store.versions() == [2, 7, 8, 9]


def test_an_unwritable_store_is_one_sentence(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(BadConfig, match=r"version 1 cannot be written.*storage\.scratch"):
        WeightsStore(tmp_path / "weights").publish(1, tensors)


def test_a_version_whose_removal_was_cut_short_can_be_made_again(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    store = WeightsStore(tmp_path)
    store.publish(1, tensors)
    (store.path(1) / "manifest.json").unlink()
    assert store.versions() == []
    manifest = store.publish(1, tensors)
    assert store.check(1) == manifest
