"""Links: what the wires between the ranks of a group give, measured in a second, for the cost model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from kernels.dispatch.topology import Topology

SMALL, LARGE = 1024, 1 << 20
"""Bytes a rank sends to all its peers together in a measured exchange."""
ROUNDS = 5


class Links(NamedTuple):
    """Measured while all ranks send at once, as they do in a dispatch; 0 where a level does not exist."""

    inter_bytes_s: float
    """Bytes a second that leave one node, all its ranks together."""
    intra_bytes_s: float
    """Bytes a second that one rank hands to others of its node."""
    inter_s: float
    """Seconds an exchange between nodes takes however little it carries."""
    intra_s: float
    """The same inside a node."""


def measure_links(topology: Topology, device: torch.device) -> Links:
    """Exchange a small and a large message on each level; collective over the group.

    Level by level, with everyone silent on the other: between nodes a rank sends to its counterparts on other nodes,
    inside a node to the others there.
    """
    rank, nodes = topology.rank, topology.nodes
    place = topology.local
    counterparts = [ranks[place] for ranks in nodes if rank not in ranks and place < len(ranks)]
    neighbours = [peer for peer in nodes[topology.node] if peer != rank]
    inter_s, inter = _level(topology, counterparts, device) if len(nodes) > 1 else (0.0, 0.0)
    intra_s, intra = _level(topology, neighbours, device) if len(nodes) < topology.size else (0.0, 0.0)
    return Links(inter * max(map(len, nodes)), intra, inter_s, intra_s)


def _level(topology: Topology, peers: list[int], device: torch.device) -> tuple[float, float]:
    """Seconds of an empty exchange with these peers, and bytes a second of a rank; the same on every rank."""
    small, large = (_exchange_s(topology, peers, size, device) for size in (SMALL, LARGE))
    # Noise may make the small one the slower.
    return small, (LARGE - SMALL) / max(large - small, 0.05 * large)


def _exchange_s(topology: Topology, peers: list[int], size: int, device: torch.device) -> float:
    """Median seconds of an exchange of `size` bytes a rank; a rank without peers takes part with none."""
    split = [0] * topology.size
    for peer in peers:
        split[peer] = size // len(peers)
    sent = torch.zeros(sum(split), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    exchange = partial(dist.all_to_all_single, received, sent, split, split, group=topology.group)
    return statistics.median([timed(exchange, topology, device) for _ in range(ROUNDS + 1)][1:])


def timed(work: Callable[[], object], topology: Topology, device: torch.device) -> float:
    """Seconds that `work` takes on the slowest rank when all begin together; collective, the same on every rank."""
    _settle(device)
    dist.barrier(topology.group)
    start = time.perf_counter()
    work()
    _settle(device)
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX, group=topology.group)
    return float(took)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
