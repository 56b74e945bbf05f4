"""Which dispatcher: a cost model names the candidates, a measurement on this model's shapes decides between them.

The model counts bytes and exchanges a level (node to node, and inside a node) for evenly spread routing, and divides by
the measured links. It is only trusted to leave out what cannot win. The plain path is always measured too, and kept
unless another one is faster by more than the noise, so that the choice can cost little and never much.
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist

from configs.kernels import KernelsConfig
from kernels.dispatch.all_to_all import AllToAll
from kernels.dispatch.contract import Dispatcher
from kernels.dispatch.hierarchical import Hierarchical
from kernels.dispatch.topology import Topology
from kernels.links import Links, measure_links, timed

WORTH_A_LOOK = 1.5
"""A candidate is measured if the model puts it within this factor of the best."""
NOISE = 0.03
"""The plain path is kept unless another is faster by more than this fraction."""
LEAST_ROUNDS, MOST_ROUNDS, ENOUGH_S = 4, 16, 2.0
"""Rounds of a measurement: between these, until the seconds are spent."""
SCALE_BLOCK = 128


class Shapes(NamedTuple):
    """What a dispatch carries."""

    tokens: int
    """Tokens a rank (T)."""
    hidden: int
    """H."""
    experts: int
    """E."""
    top: int
    """K."""
    dtype: torch.dtype


class Choice(NamedTuple):
    """A dispatcher and why."""

    dispatcher: Dispatcher
    reason: str
    """One sentence."""
    figures: dict[str, float]
    """Links, and for every candidate the predicted and, if taken, the measured seconds of a dispatch with its combine
    (measured: forward and backward, as training does it)."""


def choose_dispatcher(kernels: KernelsConfig, topology: Topology, shapes: Shapes, device: torch.device) -> Choice:
    """The dispatcher that `kernels.dispatch` asks for; collective over the group, the same on every rank.

    Raises:
        BadConfig: the one that is named cannot work here.
    """
    if kernels.dispatch != "auto":
        dispatcher = open_dispatcher(kernels.dispatch, kernels, topology, shapes)
        return Choice(dispatcher, f"{kernels.dispatch}: kernels.dispatch names it", {})
    names, without = _possible(kernels, topology, device)
    if len(names) == 1:
        dispatcher = open_dispatcher(names[0], kernels, topology, shapes)
        return Choice(dispatcher, f"{names[0]}: nothing else is possible on {_where(topology)}{without}", {})
    links = measure_links(topology, device)
    predicted = {name: _predict(name, kernels, topology, shapes, links) for name in names}
    best = min(predicted.values())
    looked = [name for name in names if name == AllToAll.name or predicted[name] <= WORTH_A_LOOK * best]
    opened = {name: open_dispatcher(name, kernels, topology, shapes) for name in looked}
    measured = _measure(opened, topology, shapes, device)
    plain = measured[AllToAll.name]
    winner = min(looked, key=measured.__getitem__)
    if measured[winner] > plain * (1 - NOISE):
        winner = AllToAll.name
    for name, dispatcher in opened.items():
        if name != winner:
            dispatcher.close()
    figures = {f"links/{name}": value for name, value in links._asdict().items()}
    figures |= {f"predicted_s/{name}": value for name, value in predicted.items()}
    figures |= {f"measured_s/{name}": value for name, value in measured.items()}
    return Choice(opened[winner], _reason(winner, predicted, measured, topology) + without, figures)


def open_dispatcher(name: str, kernels: KernelsConfig, topology: Topology, shapes: Shapes) -> Dispatcher:
    """One dispatcher by its name; collective over the group.

    Raises:
        BadConfig: it cannot work here.
    """
    if name == Hierarchical.name:
        return Hierarchical(topology, shapes.experts, wire=kernels.wire, chunks=kernels.chunks)
    if name == "deep_ep":
        from kernels.dispatch.deep_ep import DeepEP

        return DeepEP(topology, shapes.experts, kernels)
    return AllToAll(topology, shapes.experts)


def _possible(kernels: KernelsConfig, topology: Topology, device: torch.device) -> tuple[list[str], str]:
    """Candidates, and in words why DeepEP is none; the same on every rank."""
    names = [AllToAll.name]
    # On one node there is nothing to save: two levels would be the plain path with more work.
    if len(topology.nodes) > 1 and topology.uniform:
        names.append(Hierarchical.name)
    if device.type != "cuda" or topology.size == 1:
        return names, ""
    from kernels.dispatch.deep_ep import why_not

    objections: list[str] = [""] * topology.size
    dist.all_gather_object(objections, why_not(kernels, topology), group=topology.group)
    for rank, objection in enumerate(objections):
        if objection:
            return names, f"; without deep_ep, as rank {rank} says: {objection}"
    return [*names, "deep_ep"], ""


class Traffic(NamedTuple):
    """Bytes that one rank sends in a dispatch and its combine, rows only."""

    inter: float
    """To other nodes."""
    intra: float
    """To other ranks of its node."""


def expected_traffic(name: str, wire: str, topology: Topology, shapes: Shapes) -> Traffic:
    """What a backend sends under evenly spread routing, at the mean.

    Args:
        wire: As `kernels.wire`.
    """
    # The widest node, so that all ranks come to the same figures.
    nodes, ranks = len(topology.nodes), max(map(len, topology.nodes))
    row = shapes.hidden * shapes.dtype.itemsize
    if name == AllToAll.name:
        spread = shapes.tokens * shapes.top * 2 * row
        return Traffic(spread * (nodes - 1) / nodes, spread * (ranks - 1) / (nodes * ranks))
    crossing = 2 * row
    if wire == "fp8":
        crossing = shapes.hidden + 4 * math.ceil(shapes.hidden / SCALE_BLOCK) + 2 * shapes.hidden
    # A token goes once to every other node that has an expert of it, and from where it arrives, as from where it began,
    # once to every other rank there that has one.
    copies = (nodes - 1) * _hit(shapes, nodes)
    handed = nodes * (ranks - 1) * _hit(shapes, nodes * ranks)
    return Traffic(shapes.tokens * copies * crossing, shapes.tokens * handed * 2 * row)


def _predict(name: str, kernels: KernelsConfig, topology: Topology, shapes: Shapes, links: Links) -> float:
    """Seconds of one dispatch and its combine under evenly spread routing: bytes over rates, and three exchanges a level."""
    traffic = expected_traffic(name, kernels.wire, topology, shapes)
    seconds = 3 * links.inter_s + (3 * links.intra_s if name != AllToAll.name else 0.0)
    if links.inter_bytes_s:
        seconds += traffic.inter * max(map(len, topology.nodes)) / links.inter_bytes_s
    if links.intra_bytes_s:
        seconds += traffic.intra / links.intra_bytes_s
    return seconds


def _hit(shapes: Shapes, parts: int) -> float:
    """Chance that a token has an expert in one of `parts` equal parts of all experts."""
    share = shapes.experts // parts
    return 1 - math.comb(shapes.experts - share, shapes.top) / math.comb(shapes.experts, shapes.top)


def _measure(
    opened: dict[str, Dispatcher], topology: Topology, shapes: Shapes, device: torch.device
) -> dict[str, float]:
    """Median seconds of a dispatch with its combine, forward and backward, over the slowest rank, the candidates in turn."""
    random = torch.Generator().manual_seed(topology.rank)
    x = torch.randn(shapes.tokens, shapes.hidden, generator=random).to(device, shapes.dtype)
    chosen = torch.rand(shapes.tokens, shapes.experts, generator=random).topk(shapes.top).indices.to(device)
    weights = torch.full(chosen.shape, 1 / shapes.top, device=device)

    def once(dispatcher: Dispatcher) -> None:
        there = dispatcher.dispatch(x.detach().requires_grad_(), chosen, weights)
        dispatcher.combine(there.x, there.route).backward(x)

    rounds: list[dict[str, float]] = []
    spent, random_order = 0.0, Random(0)
    # All ranks see the same seconds, so all stop at the same round; the first one warms up.
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and spent < ENOUGH_S):
        # What one leaves in the wires' queues meets the next, so every round has an order of its own, the same on all ranks.
        order = random_order.sample(list(opened), len(opened))
        rounds.append({name: timed(partial(once, opened[name]), topology, device) for name in order})
        spent += sum(rounds[-1].values())
    return {name: statistics.median(each[name] for each in rounds[1:]) for name in opened}


def _where(topology: Topology) -> str:
    nodes = len(topology.nodes)
    return f"{nodes} node{'s' * (nodes > 1)} with {topology.size} rank{'s' * (topology.size > 1)}"


def _reason(winner: str, predicted: dict[str, float], measured: dict[str, float], topology: Topology) -> str:
    took = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in measured.items())
    left = [f"{name} (predicted {1e3 * predicted[name]:.1f} ms)" for name in predicted if name not in measured]
    without = f"; not measured: {', '.join(left)}" if left else ""
    return f"{winner}: fastest on {_where(topology)}: {took}{without}"
