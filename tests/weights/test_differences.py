"""Versions stored as differences are the very versions, however long the way back to a whole one is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.weights.store import WeightsStore, fingerprint
from configs.failure import BadData

Tensors = dict[str, torch.Tensor]


def start() -> Tensors:
    random = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(40, 50, generator=random),
        "b": torch.randn(3000, generator=random).bfloat16(),
        "c": torch.arange(7),
        "none": torch.empty(0, 4),
    }


def stepped(tensors: Tensors, seed: int) -> Tensors:
    """A few elements of every tensor moved a little."""
    random = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in tensors.items():
        chosen = torch.rand(tensor.shape, generator=random) < 0.05
        moved[name] = torch.where(chosen, (tensor * 1.01).to(tensor.dtype) + tensor.new_ones(()), tensor)
    return moved


def published(store: WeightsStore, versions: range) -> dict[int, Tensors]:
    """Versions of a run, each a step from the one before."""
    tensors = start()
    made = {}
    for version in versions:
        made[version] = tensors
        store.publish(version, tensors)
        tensors = stepped(tensors, version)
    return made


def bases(store: WeightsStore) -> list[int | None]:
    manifests = [store.manifest(version) for version in store.versions()]
    return [manifest.base.version if manifest.base else None for manifest in manifests]


@pytest.mark.parametrize("order", [range(8), reversed(range(8)), (5, 2, 7, 0)], ids=["up", "down", "mixed"])
def test_every_version_is_what_was_published(tmp_path: Path, order: list[int]) -> None:
    store = WeightsStore(tmp_path, deltas=3)
    made = published(store, range(8))
    assert bases(store) == [None, 0, 1, 2, None, 4, 5, 6]
    for version in order:
        reader = WeightsStore(tmp_path)
        assert fingerprint(reader.load(version)) == fingerprint(made[version])
        assert reader.check(version).digest == store.manifest(version).digest


def test_without_deltas_every_version_is_whole(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path)
    published(store, range(3))
    assert bases(store) == [None, None, None]


def test_a_difference_is_smaller_and_counts_its_tensors_whole(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=4)
    published(store, range(2))
    whole, difference = store.manifest(0), store.manifest(1)
    assert difference.bytes == whole.bytes
    assert difference.stored_bytes < whole.stored_bytes / 3


def test_a_difference_that_is_not_worthwhile_is_stored_whole(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=4)
    published(store, range(1))
    store.publish(1, {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in start().items()})
    assert bases(store) == [None, None]
    assert store.check(1)


def test_another_model_under_the_next_number_is_stored_whole(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=4)
    tensors = published(store, range(1))[0]
    store.publish(1, {**tensors, "a": tensors["a"].reshape(50, 40)})
    store.publish(2, {name: tensor for name, tensor in tensors.items() if name != "c"})
    assert bases(store) == [None, None, None]
    assert store.check(2)


def test_a_version_without_changes_costs_nothing(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=4)
    tensors = published(store, range(1))[0]
    manifest = store.publish(1, tensors)
    assert (manifest.stored_bytes, manifest.base and manifest.base.version) == (0, 0)
    assert fingerprint(WeightsStore(tmp_path).load(1)) == manifest.tensors


def test_training_that_goes_on_in_place_does_not_change_the_base(tmp_path: Path) -> None:
    """The trainer publishes views of the memory it goes on writing to."""
    store = WeightsStore(tmp_path, deltas=4)
    tensors = start()
    for version in range(3):
        store.publish(version, tensors)
        tensors["a"][version, 0] += 1
    assert bases(store) == [None, 0, 1]
    assert store.load(2)["a"][:3, 0].tolist() == [*(start()["a"][:2, 0] + 1).tolist(), start()["a"][2, 0].item()]


def test_the_first_version_of_a_process_is_whole(tmp_path: Path) -> None:
    made = published(WeightsStore(tmp_path, deltas=9), range(3))
    again = WeightsStore(tmp_path, deltas=9)
    again.publish(3, stepped(made[2], 2))
    again.publish(4, stepped(made[2], 4))
    assert bases(again) == [None, 0, 1, None, 3]


def test_repeated_steps_after_a_crash_write_nothing_and_keep_the_bound(tmp_path: Path) -> None:
    made = published(WeightsStore(tmp_path, deltas=2), range(3))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*") if path.is_file()}
    again = WeightsStore(tmp_path, deltas=2)
    again.publish(1, made[1])
    again.publish(2, made[2])
    assert before.items() <= {path: path.stat().st_mtime_ns for path in before if path.exists()}.items()
    again.publish(3, stepped(made[2], 2))
    assert bases(again) == [None, 0, 1, None]


def test_repeated_steps_that_come_to_other_weights_replace_theirs(tmp_path: Path) -> None:
    made = published(WeightsStore(tmp_path, deltas=9), range(5))
    again = WeightsStore(tmp_path, deltas=9)
    again.publish(2, made[2])
    again.publish(3, stepped(made[2], 77))
    reader = WeightsStore(tmp_path)
    assert fingerprint(reader.load(3)) == fingerprint(stepped(made[2], 77))
    with pytest.raises(BadData, match="the difference from 3 with digest .* holds another version 3"):
        reader.load(4)


def test_pruning_keeps_what_differences_lead_back_to(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=3)
    made = published(store, range(11))
    store.prune(10, keep=2, needed={2})
    assert store.versions() == [0, 1, 2, 8, 9, 10]
    for version in store.versions():
        assert fingerprint(WeightsStore(tmp_path).load(version)) == fingerprint(made[version])
    store.prune(10, keep=2)
    assert store.versions() == [8, 9, 10]
    named = {shard.file for version in store.versions() for shard in store.manifest(version).shards}
    assert {file.name for file in store.shards.iterdir()} == named


def test_the_next_version_costs_one_difference(tmp_path: Path) -> None:
    """From the folder of the one before: nothing further back is looked at, so it may be gone."""
    store = WeightsStore(tmp_path, deltas=9)
    made = published(store, range(6))
    reader = WeightsStore(tmp_path)
    reader.folder(4)
    for version in range(5):
        store.path(version).unlink()
    assert fingerprint(reader.load(5)) == fingerprint(made[5])


def shard(store: WeightsStore, version: int) -> Path:
    return store.shards / store.manifest(version).shards[0].file


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, empty, Path.unlink], ids=lambda d: d.__name__)
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_damage_anywhere_on_the_way_is_noticed(tmp_path: Path, damage: Callable[[Path], None], broken: int) -> None:
    store = WeightsStore(tmp_path, deltas=9)
    published(store, range(3))
    file = shard(store, broken)
    damage(file)
    with pytest.raises(BadData, match=file.name) as raised:
        store.check(2)
    if damage is truncate:
        assert "tensor '" in raised.value.sentence
    assert not list(store.folders.root.glob("v*"))


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, empty, Path.unlink], ids=lambda d: d.__name__)
def test_damage_to_a_difference_whose_folder_is_there_is_noticed(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Another machine may have to read it from the store."""
    store = WeightsStore(tmp_path, deltas=9)
    published(store, range(3))
    store.folder(2)
    damage(shard(store, 2))
    with pytest.raises(BadData, match="version 2"):
        store.check(2)


def test_a_missing_base_is_one_sentence(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=9)
    published(store, range(3))
    store.path(1).unlink()
    with pytest.raises(BadData, match=r"v000002.json: version 2 is the difference from 1, but .*v000001.json"):
        store.load(2)


def test_a_base_put_there_anew_under_the_same_number_is_noticed(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=9)
    made = published(store, range(2))
    WeightsStore(tmp_path).publish(0, stepped(made[0], 5))
    with pytest.raises(BadData, match="version 1 is the difference from 0 with digest"):
        store.load(1)


def test_a_difference_from_a_later_version_is_refused(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=9)
    published(store, range(2))
    content = store.path(1).read_bytes()
    store.path(1).write_bytes(content.replace(b'"base":{"version":0', b'"base":{"version":1'))
    with pytest.raises(BadData, match="no earlier one"):
        store.load(1)


def test_a_damaged_folder_on_the_way_is_not_built_upon(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=9)
    made = published(store, range(3))
    file = store.folder(1) / "model.safetensors"
    flip_a_bit(file)
    reader = WeightsStore(tmp_path)
    assert fingerprint(reader.load(2)) == fingerprint(made[2])


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def runs(draw: st.DrawFn) -> list[Tensors]:
    """Versions of any tensors, with any bits, and any share of them changed from one to the next."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = {
        f"t{number}": (draw(st.sampled_from(DTYPES)), tuple(draw(st.lists(st.integers(0, 9), max_size=3))))
        for number in range(draw(st.integers(1, 5)))
    }

    def bits(dtype: torch.dtype, shape: tuple[int, ...]) -> np.ndarray:
        raw = random.integers(0, 2 if dtype == torch.bool else 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        return raw.reshape(-1, dtype.itemsize)

    versions: list[dict[str, np.ndarray]] = [{name: bits(*shape) for name, shape in shapes.items()}]
    for _ in range(draw(st.integers(1, 4))):
        share = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
        following = {}
        for name, before in versions[-1].items():
            chosen = random.random(len(before)) < share
            following[name] = np.where(chosen[:, None], bits(*shapes[name]), before)
        versions.append(following)

    def tensor(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if not raw.size:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(raw.reshape(-1).copy()).view(dtype).reshape(shape)

    return [{name: tensor(raw, *shapes[name]) for name, raw in version.items()} for version in versions]


@settings(max_examples=60, deadline=None)
@given(versions=runs(), deltas=st.integers(0, 3), limit=st.sampled_from([1, 64, 1 << 20]))
def test_any_run_comes_back(
    tmp_path_factory: pytest.TempPathFactory, versions: list[Tensors], deltas: int, limit: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    store = WeightsStore(folder, deltas=deltas, shard_bytes=limit)
    for version, tensors in enumerate(versions):
        store.publish(version, tensors)
    for version, tensors in enumerate(versions):
        reader = WeightsStore(folder, shard_bytes=limit)
        assert fingerprint(reader.load(version)) == fingerprint(tensors) == reader.check(version).tensors
    shutil.rmtree(folder)


def test_a_base_that_was_lost_is_not_built_upon(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=9)
    made = published(store, range(2))
    shutil.rmtree(tmp_path)
    store.publish(2, stepped(made[1], 1))
    assert store.manifest(2).base is None
    assert store.check(2)
