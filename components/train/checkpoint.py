"""Durable checkpoints: a Hugging Face folder anyone can load, with the trainer's state beside it.

`checkpoints/step-000050/` holds config.json, model.safetensors and the tokenizer, and in `trainer/` the optimizer's
moments (`optimizer/`, a safetensors file a rank), the random state and state.json. It is complete once its
`_digests.json` is there. Any number of ranks reads what any other number wrote.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.distributed.checkpoint.api import CheckpointException

from components.storage.digest import DIGESTS, FileDigest, digest_file, encode_digests, folder_files
from components.storage.layout import RunLayout
from components.train.catalogue import TrainerState, latest_checkpoint
from components.train.known_dispatch import keep_dispatch, with_known_dispatch
from components.train.moments import load_moments, save_moments
from components.train.ranks import Ranks
from components.train.trainer import Trainer
from components.weights.policy import load_policy, save_policy
from configs.failure import BadConfig, BadData
from configs.run import RunConfig


def save_checkpoint(trainer: Trainer, tokenizer: Tokenizer, layout: RunLayout, state: TrainerState) -> str:
    """Write a checkpoint of the trainer durably; returns its URI. Collective.

    Args:
        tokenizer, state: Only rank 0's count.

    Raises:
        BadConfig: the place cannot take it; earlier checkpoints are untouched.
    """
    ranks = trainer.ranks
    name = f"step-{trainer.step:06d}"
    tensors = trainer.tensors()
    try:
        with _staging(layout, ranks) as staging:
            folder = staging / name
            save_moments(trainer.model, trainer.optimizer, ranks, folder / "trainer" / "optimizer")
            if ranks.rank == 0:
                save_policy(trainer.model, tokenizer, folder, tensors)
                save_file({"random_state": torch.get_rng_state()}, folder / "trainer" / "random.safetensors")
                (folder / "trainer" / "state.json").write_bytes(msgspec.json.encode(state))
            _upload(folder, f"checkpoints/{name}", layout, ranks)
    except (OSError, SafetensorError, CheckpointException) as error:
        raise BadConfig(
            f"checkpoint {name} cannot be written below {layout.scratch} ({_reason_of_files(error)}); free space there and run"
            f" `tandem run --resume {layout.config.name}`: earlier checkpoints are untouched"
        ) from None
    return f"{layout.uri}/checkpoints/{name}"


def restore(
    layout: RunLayout, config: RunConfig, start: Path, ranks: Ranks | None = None
) -> tuple[Trainer, TrainerState | None]:
    """A trainer as the newest checkpoint left it, or at step 0 with the start policy. Collective.

    Args:
        start: Hugging Face folder of the policy the run starts from.
        ranks: Those that train together.

    Raises:
        BadData: a checkpoint is damaged.
    """
    ranks = ranks or Ranks()
    config = with_known_dispatch(config, layout, ranks)
    # One rank looks, so that all see the same.
    name = ranks.spread((latest_checkpoint(layout) or "").encode() if ranks.rank == 0 else b"").decode()
    if not name:
        trainer = Trainer(load_policy(start), config, ranks)
        keep_dispatch(trainer.dispatch, config, layout, ranks)
        return trainer, None
    folder = layout.scratch / "restored"
    if ranks.local == 0:
        shutil.rmtree(folder, ignore_errors=True)
        layout.store.download(f"checkpoints/{name}", folder)
    ranks.wait()
    if (folder / "trainer" / "optimizer.safetensors").exists():
        raise BadData(
            f"checkpoint {name} was written by an earlier version, whose optimizer state this one does not read; start a"
            f" new run from its policy by model.checkpoint: {layout.uri}/checkpoints/{name}"
        )
    trainer = Trainer(load_policy(folder), config, ranks)
    keep_dispatch(trainer.dispatch, config, layout, ranks)
    try:
        state = msgspec.json.decode((folder / "trainer" / "state.json").read_bytes(), type=TrainerState)
        load_moments(trainer.model, trainer.optimizer, ranks, folder / "trainer" / "optimizer")
        torch.set_rng_state(load_file(folder / "trainer" / "random.safetensors")["random_state"])
    except (OSError, KeyError, SafetensorError, msgspec.DecodeError, CheckpointException) as error:
        raise BadData(
            f"checkpoint {name}: the trainer's state cannot be read ({_reason_of_files(error)}); fetch it again, or start a"
            " new run from an earlier one by model.checkpoint"
        ) from None
    trainer.step = state.step
    ranks.wait()
    if ranks.local == 0:
        shutil.rmtree(folder)
    return trainer, state


@contextmanager
def _staging(layout: RunLayout, ranks: Ranks) -> Iterator[Path]:
    """A folder for the files of this node's ranks, gone afterwards."""
    if ranks.rank == 0:
        with tempfile.TemporaryDirectory(dir=layout.scratch, prefix=".checkpoint-") as made:
            ranks.spread(Path(made).name.encode())
            yield Path(made)
            return
    folder = layout.scratch / ranks.spread().decode()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        # Rank 0's own node is tidied by rank 0, when all have uploaded.
        if ranks.local == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _upload(folder: Path, key: str, layout: RunLayout, ranks: Ranks) -> None:
    """Put the folders of all nodes together at `key`, its digests last."""
    leaders = sum(place == 0 for place in ranks.collect(ranks.local))
    if leaders == 1:
        if ranks.rank == 0:
            layout.store.upload(folder, key)
        ranks.wait()
        return
    if ranks.rank == 0:
        layout.store.delete(key)
    ranks.wait()
    digests: dict[str, FileDigest] = {}
    if ranks.local == 0:
        names = list(folder_files(folder))
        with ThreadPoolExecutor(layout.config.storage.max_concurrency) as threads:
            for _ in threads.map(lambda name: layout.store.upload(folder / name, f"{key}/{name}"), names):
                pass
            digests = dict(zip(names, threads.map(lambda name: digest_file(folder / name), names), strict=True))
    everywhere = ranks.collect(digests)
    if ranks.rank == 0:
        together = {name: digest for each in everywhere for name, digest in each.items()}
        layout.store.write(f"{key}/{DIGESTS}", encode_digests(together))
    ranks.wait()


def _reason_of_files(error: BaseException) -> str:
    """What went wrong with files, on one line; of ranks' failures, the first.

    Raises:
        BaseException: a rank failed otherwise, in whatever way it did.
    """
    if isinstance(error, CheckpointException):
        failures = [failure for failure, _ in error.failures.values()]
        if others := [each for each in failures if not isinstance(each, OSError | SafetensorError)]:
            raise others[0] from error
        error = failures[0] if failures else error
    return " ".join(str(error).split())
