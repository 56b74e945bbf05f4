"""Durable checkpoints: a Hugging Face folder anyone can load, with the trainer's state beside it.

`checkpoints/step-000050/` holds config.json, model.safetensors and the tokenizer, and in `trainer/` the optimizer's
moments and the random state (safetensors) and state.json. It is complete once its `_digests.json` is there.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from components.storage.layout import RunLayout
from components.train.catalogue import TrainerState, latest_checkpoint
from components.train.trainer import Trainer
from components.weights.policy import load_policy, save_policy
from configs.failure import BadConfig, BadData
from configs.run import RunConfig


def save_checkpoint(trainer: Trainer, tokenizer: Tokenizer, layout: RunLayout, state: TrainerState) -> str:
    """Write a checkpoint of the trainer durably; returns its URI.

    Raises:
        BadConfig: the place cannot take it; earlier checkpoints are untouched.
    """
    name = f"step-{state.step:06d}"
    try:
        with tempfile.TemporaryDirectory(dir=layout.scratch, prefix=".checkpoint-") as staging:
            folder = Path(staging) / name
            save_policy(trainer.model, tokenizer, folder)
            (folder / "trainer").mkdir()
            save_file(_optimizer_tensors(trainer), folder / "trainer" / "optimizer.safetensors")
            (folder / "trainer" / "state.json").write_bytes(msgspec.json.encode(state))
            layout.store.upload(folder, f"checkpoints/{name}")
    except (OSError, SafetensorError) as error:
        raise BadConfig(
            f"checkpoint {name} cannot be written below {layout.scratch} ({error}); free space there and run"
            f" `tandem run --resume {layout.config.name}`: earlier checkpoints are untouched"
        ) from None
    return f"{layout.uri}/checkpoints/{name}"


def restore(layout: RunLayout, config: RunConfig, start: Path) -> tuple[Trainer, TrainerState | None]:
    """A trainer as the newest checkpoint left it, or at step 0 with the start policy.

    Args:
        start: Hugging Face folder of the policy the run starts from.

    Raises:
        BadData: a checkpoint is damaged.
    """
    name = latest_checkpoint(layout)
    if name is None:
        return Trainer(load_policy(start), config), None
    folder = layout.scratch / "restored"
    shutil.rmtree(folder, ignore_errors=True)
    layout.store.download(f"checkpoints/{name}", folder)
    trainer = Trainer(load_policy(folder), config)
    try:
        state = msgspec.json.decode((folder / "trainer" / "state.json").read_bytes(), type=TrainerState)
        _restore_optimizer(trainer, load_file(folder / "trainer" / "optimizer.safetensors"))
    except (OSError, KeyError, SafetensorError, msgspec.DecodeError) as error:
        raise BadData(
            f"checkpoint {name}: the trainer's state cannot be read ({error}); fetch it again, or start a new run from"
            " an earlier one by model.checkpoint"
        ) from None
    trainer.step = state.step
    shutil.rmtree(folder)
    return trainer, state


def _optimizer_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = {"random_state": torch.get_rng_state()}
    for index, moments in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": value.clone() for name, value in moments.items()}
    return tensors


def _restore_optimizer(trainer: Trainer, tensors: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(tensors.pop("random_state"))
    states: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        states.setdefault(int(index), {})[name] = value
    saved = trainer.optimizer.state_dict()
    trainer.optimizer.load_state_dict({"state": states, "param_groups": saved["param_groups"]})
