"""Ranks: the processes that train one policy together, seen from one of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from configs.failure import BadConfig
from configs.kernels import KernelsConfig
from kernels.dispatch.deep_ep_environment import make_ready

LIMIT = timedelta(minutes=30)
"""How long a rank waits for another that lives, beside the time that one may take to fetch or store a checkpoint. One that
died is noticed at once, and one that hangs by the loop, whose limits are shorter."""


class Ranks:
    """This process and the others; a lone process is the one rank of a group that needs no exchange.

    Attributes:
        rank: This process, from 0.
        size: Processes (R).
        local: Place of this process on its node, from 0; the first fetches and stores for the others there.
        device: Where this rank computes: on a GPU of its own if there are GPUs, a lone rank only if `on_node` made it.
    """

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local
        self.device = torch.device("cpu")
        if size > 1 and torch.cuda.is_available():
            self.device = torch.device("cuda", local)

    @classmethod
    def on_node(cls, rank: int, size: int, local: int, width: int) -> Ranks:
        """This process among the ranks of a node, each with a GPU of its own where there are GPUs.

        Args:
            rank: This process.
            size: Ranks of all nodes.
            local: Its place on the node.
            width: Ranks of this node.

        Raises:
            BadConfig: the node has GPUs, but fewer than ranks.
        """
        made, found = cls(rank, size, local), torch.cuda.device_count()
        if found:
            if width > found:
                raise BadConfig(
                    f"train.ranks puts {width} ranks on this node, which has {found} GPUs; lower it, or raise"
                    " kubernetes.train.nodes or kubernetes.train.gpus"
                )
            made.device = torch.device("cuda", local)
        return made

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self.size == 1

    def open(
        self,
        store: dist.Store,
        kernels: KernelsConfig | None = None,
        limit: timedelta = LIMIT,
        patience: timedelta = LIMIT,
    ) -> None:
        """Meet the other ranks: gloo among CPUs, nccl among GPUs besides.

        Args:
            store: One that all ranks reach.
            kernels: How tokens will travel to experts; None if there is no expert parallelism.
            limit: How long they may take to come.
            patience: How long ranks wait for one another afterwards.

        Raises:
            BadConfig: the environment contradicts `kernels`.
            RuntimeError: they did not come.
        """
        backend = "cpu:gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if kernels is not None:
                make_ready(kernels)
            backend += ",cuda:nccl"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
        dist.set_timeout(patience)

    def close(self) -> None:
        """Leave the others."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        if not self.alone:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait until every rank is here."""
        if not self.alone:
            dist.barrier()

    def spread(self, content: bytes = b"") -> bytes:
        """What rank 0 gives, at every rank."""
        if self.alone:
            return content
        size = torch.tensor([len(content)])
        dist.broadcast(size, 0)
        if not size:
            return b""
        data = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(data, 0)
        return data.numpy().tobytes()

    def collect(self, value: Any) -> list[Any]:
        """What each rank gives, at every rank, in their order."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of a minibatch that this rank takes; may be none."""
        return rows[self.rank :: self.size]
