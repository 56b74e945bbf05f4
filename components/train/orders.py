"""Orders: what rank 0, which alone speaks to Redis and the weights store, has the other ranks take part in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import torch
from tokenizers import Tokenizer

from components.experience.group import Group
from components.storage.layout import RunLayout
from components.train.catalogue import TrainerState
from components.train.checkpoint import save_checkpoint
from components.train.trainer import Trainer
from configs.failure import DONE


class Order(msgspec.Struct):
    """One order."""

    kind: Literal["listen", "update", "gather", "checkpoint", "end"]
    groups: list[Group] = []
    """Of an update."""
    state: TrainerState | None = None
    """Of a checkpoint."""
    exit_code: int = DONE
    """Of an end."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Order).decode


class Command:
    """The trainer in the hands of rank 0: what it does, all ranks do.

    Args:
        trainer: Rank 0's.
        tokenizer: Goes into checkpoints.
        layout: Places of the run.
    """

    def __init__(self, trainer: Trainer, tokenizer: Tokenizer, layout: RunLayout) -> None:
        self.trainer, self.tokenizer, self.layout = trainer, tokenizer, layout

    def told_to_leave(self) -> bool:
        """Whether any other rank was told to leave; also what keeps idle ranks from waiting too long for one another."""
        if self.trainer.ranks.alone:
            return False
        self._give(Order("listen"))
        return bool(self.trainer.ranks.total(torch.zeros(1)))

    def update(self, groups: list[Group]) -> dict[str, float]:
        """One policy update; returns its metrics."""
        self._give(Order("update", groups))
        return self.trainer.update(groups)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The policy under checkpoint names."""
        self._give(Order("gather"))
        return self.trainer.tensors()

    def checkpoint(self, state: TrainerState) -> str:
        """Make the current step durable; returns its URI."""
        self._give(Order("checkpoint", state=state))
        return save_checkpoint(self.trainer, self.tokenizer, self.layout, state)

    def end(self, exit_code: int = DONE) -> None:
        """Let the other ranks go."""
        self._give(Order("end", exit_code=exit_code))

    def _give(self, order: Order) -> None:
        if not self.trainer.ranks.alone:
            self.trainer.ranks.spread(_encode(order))


def follow(trainer: Trainer, tokenizer: Tokenizer, layout: RunLayout, leaving: Callable[[], bool]) -> int:
    """Do what rank 0 orders until it lets this rank go.

    Args:
        trainer: This rank's.
        leaving: Whether this process was told to leave; rank 0 is told, and decides.

    Returns:
        The exit code.
    """
    while True:
        order = _decode(trainer.ranks.spread())
        if order.kind == "listen":
            trainer.ranks.total(torch.tensor([float(leaving())]))
        elif order.kind == "update":
            trainer.update(order.groups)
        elif order.kind == "gather":
            trainer.tensors()
        elif order.kind == "checkpoint":
            assert order.state is not None
            save_checkpoint(trainer, tokenizer, layout, order.state)
        else:
            return order.exit_code
