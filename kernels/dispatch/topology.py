"""Topology: which ranks of an expert-parallel group share a node, since links inside a node are the cheap ones."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

import torch.distributed as dist

NODE = "TANDEM_NODE"
"""Variable with the label of the node a rank runs on; it decides before everything else."""


class Topology(NamedTuple):
    """One expert-parallel group."""

    group: dist.ProcessGroup
    rank: int
    """This process's rank in the group."""
    nodes: tuple[tuple[int, ...], ...]
    """Ranks of the group by node, ascending; nodes in the order of their first rank."""

    @property
    def size(self) -> int:
        """Ranks in the group (W)."""
        return sum(map(len, self.nodes))

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return next(index for index, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def node_of(self) -> tuple[int, ...]:
        """Index of the node of each rank."""
        places = {rank: index for index, ranks in enumerate(self.nodes) for rank in ranks}
        return tuple(places[rank] for rank in range(self.size))

    @property
    def local(self) -> int:
        """This rank's place within its node."""
        return self.nodes[self.node].index(self.rank)

    @property
    def uniform(self) -> bool:
        """Whether every node has equally many ranks, each node's consecutive."""
        width = len(self.nodes[0])
        flat = [rank for ranks in self.nodes for rank in ranks]
        return flat == list(range(self.size)) and all(len(ranks) == width for ranks in self.nodes)


def topology_of(group: dist.ProcessGroup) -> Topology:
    """The topology of a group; every rank of it must call this together.

    Ranks with the same label share a node: TANDEM_NODE if set, else the node's number by torchrun's LOCAL_WORLD_SIZE
    and RANK, else the host name.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    labels: list[str] = [""] * size
    dist.all_gather_object(labels, _label(), group=group)
    nodes: dict[str, list[int]] = {}
    for each, label in enumerate(labels):
        nodes.setdefault(label, []).append(each)
    return Topology(group, rank, tuple(tuple(ranks) for ranks in nodes.values()))


def _label() -> str:
    if label := os.environ.get(NODE):
        return label
    if width := os.environ.get("LOCAL_WORLD_SIZE"):
        return str(int(os.environ.get("RANK", str(dist.get_rank()))) // int(width))
    return socket.gethostname()
