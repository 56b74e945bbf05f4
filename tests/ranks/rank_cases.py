"""What several ranks do in the tests of training together; one process a rank runs all cases, one after the other.

Started as `python -m tests.ranks.rank_cases FOLDER RANK`; the folder holds `cases.json`, the batches and the start policy,
and gets a `<case>.pt` each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from components.experience.group import Group
from components.storage.layout import RunLayout
from components.train import gathering
from components.train.catalogue import TrainerState
from components.train.checkpoint import restore, save_checkpoint
from components.train.ranks import Ranks
from components.train.trainer import Trainer
from configs.run import RunConfig
from tests.train.test_checkpoint import TOKENIZER


class Case(msgspec.Struct):
    """One policy trained by some ranks: restored from the newest checkpoint of its run, or begun."""

    name: str
    config: dict[str, Any]
    batches: list[str]
    nodes: int = 1
    save: bool = False
    message_bytes: int = gathering.MESSAGE_BYTES

    @property
    def ranks(self) -> int:
        """How many train together."""
        return int(self.config["train"]["ranks"])


def run_case(case: Case, ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    """Update with each batch, perhaps save; returns what rank 0 has after each."""
    node = ranks.rank * case.nodes // ranks.size
    # Nodes share the store alone.
    storage = {"root": str(folder / "store"), "scratch": str(folder / f"scratch-{node}")}
    config = RunConfig.model_validate({**case.config, "storage": storage})
    layout = RunLayout(config)
    layout.scratch.mkdir(parents=True, exist_ok=True)
    trainer, _ = restore(layout, config, folder / "start", ranks)
    results = []
    for batch in case.batches:
        metrics = trainer.update(msgspec.msgpack.decode((folder / batch).read_bytes(), type=list[Group]))
        weights = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
        results.append({"metrics": metrics, "weights": weights, "gradients": whole_gradients(trainer)})
    if case.save:
        save_checkpoint(trainer, TOKENIZER, layout, TrainerState(trainer.step, 0, ""))
        assert not list(layout.scratch.glob(".checkpoint-*")) or ranks.rank
    return results


def whole_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The last minibatch's gradients, as they were applied, whole."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None, name
        gradient: Any = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()
    return found


def main() -> None:
    """Be one rank in every case that has it."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    for case in msgspec.json.decode((folder / "cases.json").read_bytes(), type=list[Case]):
        if rank >= case.ranks:
            continue
        width = case.ranks // case.nodes
        os.environ |= {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(width)}
        ranks = Ranks(rank, case.ranks, rank % width)
        gathering.MESSAGE_BYTES = case.message_bytes
        ranks.open(dist.FileStore(str(folder / f"{case.name}.meet"), case.ranks))
        results = run_case(case, ranks, folder)
        if rank == 0:
            torch.save(results, folder / f"{case.name}.pt")
        ranks.close()


if __name__ == "__main__":
    main()
