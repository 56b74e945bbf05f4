"""A checkpoint is everything a trainer is, and never half there."""

from __future__ import annotations

import os
import shutil
import subprocess
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from components.storage.layout import RunLayout
from components.train.catalogue import TrainerState, latest_checkpoint, prune_checkpoints
from components.train.checkpoint import restore, save_checkpoint
from components.train.known_dispatch import keep_dispatch, with_known_dispatch
from components.train.ranks import Ranks
from components.train.trainer import Trainer
from components.warm_start.tokenizer import character_tokenizer
from components.weights.policy import load_policy, save_policy
from configs.failure import BadConfig, BadData
from configs.run import RunConfig
from tests.train.test_trainer import digest, policy, sampled

Make = Callable[..., RunConfig]
TOKENIZER = character_tokenizer("0123456789+=")


def layout_of(config: RunConfig) -> RunLayout:
    layout = RunLayout(config)
    layout.scratch.mkdir(parents=True, exist_ok=True)
    return layout


def save(trainer: Trainer, layout: RunLayout) -> str:
    return save_checkpoint(trainer, TOKENIZER, layout, TrainerState(trainer.step, 10 * trainer.step, digest(trainer)))


def test_training_goes_on_bit_for_bit(make_config: Make, tmp_path: Path) -> None:
    config = make_config()
    layout = layout_of(config)
    trainer = Trainer(policy(), config)
    batches = [sampled(trainer, 8, seed=seed) for seed in range(4)]
    for batch in batches[:2]:
        trainer.update(batch)
    save(trainer, layout)
    restored, state = restore(layout, config, tmp_path / "not needed")
    assert state == TrainerState(2, 20, digest(trainer))
    assert digest(restored) == digest(trainer)
    for batch in batches[2:]:
        assert trainer.update(batch) == restored.update(batch)
    assert digest(restored) == digest(trainer)


def test_a_run_without_checkpoint_starts_from_the_start_policy(make_config: Make, tmp_path: Path) -> None:
    config = make_config()
    save_policy(policy(seed=7), TOKENIZER, tmp_path / "start")
    trainer, state = restore(layout_of(config), config, tmp_path / "start")
    assert state is None and trainer.step == 0
    assert digest(trainer) == digest(Trainer(policy(seed=7), config))


def test_anyone_can_load_a_checkpoint(make_config: Make) -> None:
    layout = layout_of(make_config())
    trainer = Trainer(policy(), layout.config)
    save(trainer, layout)
    folder = layout.store.local("checkpoints/step-000000")
    assert folder is not None
    assert digest(Trainer(load_policy(folder), layout.config)) == digest(trainer)


def test_only_complete_checkpoints_count_and_old_ones_go(make_config: Make) -> None:
    layout = layout_of(make_config())
    trainer = Trainer(policy(), layout.config)
    for step in (1, 2, 3):
        trainer.step = step
        save(trainer, layout)
    layout.store.write("checkpoints/step-000009/model.safetensors", b"torn off")
    assert latest_checkpoint(layout) == "step-000003"
    prune_checkpoints(layout, keep=2)
    assert not layout.store.list("checkpoints/step-000001/")
    assert latest_checkpoint(layout) == "step-000003"


def test_a_damaged_checkpoint_is_one_sentence(make_config: Make, tmp_path: Path) -> None:
    layout = layout_of(make_config())
    save(Trainer(policy(), layout.config), layout)
    file = layout.store.local("checkpoints/step-000000/trainer/optimizer/shard-00001-model-00001-of-00001.safetensors")
    assert file is not None
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadData):
        restore(layout, layout.config, tmp_path)


@pytest.mark.parametrize(
    ("failure", "told"), [(OSError(28, "No space left on device"), BadConfig), (ValueError("a defect"), ValueError)]
)
def test_only_what_befalls_files_is_called_a_full_disk(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, failure: Exception, told: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr("torch.distributed.checkpoint.HuggingFaceStorageWriter.write_data", fail)
    layout = layout_of(make_config())
    with pytest.raises(told):
        save(Trainer(policy(), layout.config), layout)


@pytest.mark.parametrize(
    ("failure", "told"), [(OSError(5, "Input/output error"), BadData), (ValueError("a defect"), ValueError)]
)
def test_only_what_befalls_files_is_called_damage(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: Exception, told: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise failure

    layout = layout_of(make_config())
    save(Trainer(policy(), layout.config), layout)
    monkeypatch.setattr("torch.distributed.checkpoint.HuggingFaceStorageReader.read_data", fail)
    with pytest.raises(told):
        restore(layout, layout.config, tmp_path)


def test_a_checkpoint_of_an_earlier_version_is_named_as_such(make_config: Make, tmp_path: Path) -> None:
    layout = layout_of(make_config())
    save(Trainer(policy(), layout.config), layout)
    folder = tmp_path / "earlier"
    layout.store.download("checkpoints/step-000000", folder)
    shutil.rmtree(folder / "trainer" / "optimizer")
    (folder / "trainer" / "optimizer.safetensors").write_bytes(b"")
    layout.store.upload(folder, "checkpoints/step-000000")
    with pytest.raises(
        BadData, match="written by an earlier version.*start a new run from its policy by model.checkpoint"
    ):
        restore(layout, layout.config, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_costs_the_new_checkpoint_only(make_config: Make, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], check=True)
    try:
        layout = layout_of(make_config(storage={"root": str(disk), "scratch": str(disk)}))
        trainer = Trainer(policy(), layout.config)
        save(trainer, layout)
        saved = digest(trainer)
        trainer.update(sampled(trainer, 8))
        (disk / "filler").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 200_000))
        with pytest.raises(BadConfig) as failure:
            save(trainer, layout)
        assert "\n" not in failure.value.sentence
        (disk / "filler").unlink()
        restored, _ = restore(layout, layout.config, tmp_path)
        assert digest(restored) == saved
        assert not [path for path in layout.scratch.iterdir() if path.name.startswith(".checkpoint-")]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_the_way_tokens_travel_is_chosen_once_a_run(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another way adds in another order; a repeated step is to come to the same bits."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = make_config(train={"ranks": 4, "expert_parallel": 2})
    layout, ranks = layout_of(config), Ranks(0, 4)
    monkeypatch.setattr(ranks, "spread", lambda content: content)
    assert with_known_dispatch(config, layout, ranks).kernels.dispatch == "auto"
    dispatcher = types.SimpleNamespace(name="hierarchical")
    keep_dispatch(types.SimpleNamespace(dispatcher=dispatcher), config, layout, ranks)  # type: ignore[arg-type]
    assert with_known_dispatch(config, layout, ranks).kernels.dispatch == "hierarchical"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert with_known_dispatch(config, layout, ranks).kernels.dispatch == "auto"
    assert with_known_dispatch(make_config(), layout, Ranks()).kernels.dispatch == "auto"
