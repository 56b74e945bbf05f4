"""The optimizer's moments in a folder of safetensors files, written and read by any number of ranks.

torch.distributed.checkpoint writes every rank's shards with their places in the whole tensors, so that another number of
ranks, or another way to divide the experts, reads what it needs. Names are those of the parameters, fused as
transformers keeps them, with `.exp_avg`, `.exp_avg_sq` and `.step`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from components.train.ranks import Ranks


def save_moments(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, folder: Path) -> None:
    """Write this rank's moments into a folder; collective.

    Args:
        folder: Made if absent; ranks on one node give the same one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _quiet():
        dcp.save(_moments(model, optimizer), storage_writer=writer, no_dist=ranks.alone)


def load_moments(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, folder: Path) -> None:
    """Read this rank's moments from a folder with the files of all ranks that wrote; collective.

    Raises:
        CheckpointException, OSError: a file is missing or damaged.
    """
    with _quiet():
        dcp.load(_moments(model, optimizer), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=ranks.alone)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's own tensors by name; zeros, which are what it starts from, before its first step."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if not state:
            zeros = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            state |= {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **zeros}
        tensors |= {f"{name}.{kind}": value for kind, value in state.items()}
    return tensors


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's remarks, such as that a lone process has no process group."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
