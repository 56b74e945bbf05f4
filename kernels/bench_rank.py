"""One rank of `tandem bench dispatch`: every case, the backends in turn."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from configs.failure import Failure
from configs.kernels import KernelsConfig
from kernels.bench_routing import routing
from kernels.dispatch.choose import Choice, Shapes, choose_dispatcher, open_dispatcher
from kernels.dispatch.contract import Dispatcher
from kernels.dispatch.deep_ep_environment import make_ready
from kernels.dispatch.topology import Topology, topology_of
from kernels.links import timed

LEAST_ROUNDS, MOST_ROUNDS, ENOUGH_S = 4, 40, 4.0
"""Rounds of a case: between these, until the seconds are spent; the first one warms up."""
SILENT_S = 300.0


class Plan(msgspec.Struct):
    """What all ranks measure."""

    hidden: int
    experts: int
    tops: list[int]
    tokens: list[int]
    """Tokens a rank."""
    routings: list[str]
    backends: list[str]
    """`all_to_all`, `hierarchical`, `hierarchical_fp8`, `deep_ep`, `auto`; the first is the reference."""
    dtype: str = "bfloat16"
    """Type of the activations."""
    kernels: dict[str, Any] = {}
    """`kernels` of a run, for `auto`."""
    chunks: int = 0
    interface: str = ""
    """Network interface whose byte counter tells what left this node; empty: count the payload."""
    store: str = ""
    """File the ranks meet by; empty: as torchrun's variables say."""


class Case(msgspec.Struct):
    """One backend under one routing; figures of the whole group."""

    backend: str
    nodes: int
    topk: int
    tokens: int
    hidden: int
    routing: str
    inter_node_bytes: int
    """Bytes that left all nodes in one dispatch and its combine."""
    payload_bytes: int
    """The same as the backend counts it: without headers and acknowledgements."""
    busiest_bytes: int
    """What the busiest node sent, or received if that was more."""
    seconds: float
    """Median of a dispatch and its combine, over the slowest rank."""


class Rank:
    """This process's part in the measurement."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        cuda = torch.cuda.is_available()
        limit = timedelta(seconds=SILENT_S)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            if {"auto", "deep_ep"} & set(plan.backends):
                make_ready(KernelsConfig())
        place = f"file://{plan.store}" if plan.store else "env://"
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", place, limit, world_size=size, rank=rank)
        assert dist.group.WORLD is not None
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.topology: Topology = topology_of(dist.group.WORLD)

    def run(self) -> Iterator[dict[str, Any]]:
        """Measure every case; yields choices and cases as they come (the same on every rank)."""
        for top in self.plan.tops:
            for tokens in self.plan.tokens:
                shapes = Shapes(tokens, self.plan.hidden, self.plan.experts, top, getattr(torch, self.plan.dtype))
                opened: dict[str, Dispatcher] = {}
                for name in self.plan.backends:
                    if name == "auto":
                        choice = choose_dispatcher(self._kernels(), self.topology, shapes, self.device)
                        opened[name] = choice.dispatcher
                        yield {"choice": _choice(choice, top, tokens)}
                    else:
                        opened[name] = self._open(name, shapes)
                for kind in self.plan.routings:
                    for case in self._cases(kind, shapes, opened):
                        yield {"case": msgspec.to_builtins(case)}
                for dispatcher in opened.values():
                    dispatcher.close()

    def _kernels(self) -> KernelsConfig:
        given = {"dispatch": "auto", "chunks": self.plan.chunks}
        return KernelsConfig.model_validate({**self.plan.kernels, **given})

    def _open(self, name: str, shapes: Shapes) -> Dispatcher:
        plain, _, wire = name.partition("_fp8")
        fp8 = plain != name
        kernels = KernelsConfig(wire="fp8" if fp8 else "same", chunks=self.plan.chunks)
        return open_dispatcher(plain, kernels, self.topology, shapes)

    def _cases(self, kind: str, shapes: Shapes, opened: dict[str, Dispatcher]) -> list[Case]:
        random = torch.Generator().manual_seed(1000 + self.topology.rank)
        nodes = len(self.topology.nodes)
        x = torch.randn(shapes.tokens, shapes.hidden, generator=random).to(self.device, shapes.dtype)
        chosen, weights = routing(kind, shapes.tokens, shapes.experts, shapes.top, nodes, random)
        chosen, weights = chosen.to(self.device), weights.to(self.device)

        def once(dispatcher: Dispatcher) -> None:
            there = dispatcher.dispatch(x, chosen, weights)
            dispatcher.combine(there.x, there.route)

        seconds: dict[str, list[float]] = {name: [] for name in opened}
        sent: dict[str, tuple[int, int, int]] = {}
        spent, done, order = 0.0, 0, Random(0)
        while done < LEAST_ROUNDS or (done < MOST_ROUNDS and spent < ENOUGH_S):
            # What one leaves in the wires' queues meets the next, so every round has an order of its own.
            for name in order.sample(list(opened), len(opened)):
                dispatcher = opened[name]
                before = self._counters(dispatcher)
                seconds[name].append(timed(partial(once, dispatcher), self.topology, self.device))
                # Bytes of the first round include connections being made.
                if done == 1:
                    sent[name] = self._sent(self._counters(dispatcher) - before)
                spent += seconds[name][-1]
            done += 1
        return [
            Case(
                name, nodes, shapes.top, shapes.tokens, shapes.hidden, kind, *sent[name], statistics.median(took[1:])
            )  # fmt: skip
            for name, took in seconds.items()
        ]

    def _counters(self, dispatcher: Dispatcher) -> torch.Tensor:
        """int64 [3]: bytes out of and into this node by its interface, bytes this rank's dispatcher sent to other nodes."""
        dist.barrier(self.topology.group)
        payload = dispatcher.inter_node_bytes
        counted = [0, 0]
        if not self.plan.interface:
            counted = [payload, 0]
        elif self.topology.local == 0:  # one rank speaks for the node
            counters = Path(f"/sys/class/net/{self.plan.interface}/statistics")
            counted = [int((counters / f"{way}_bytes").read_text()) for way in ("tx", "rx")]
        return torch.tensor([*counted, payload], dtype=torch.int64, device=self.device)

    def _sent(self, bytes_here: torch.Tensor) -> tuple[int, int, int]:
        """Bytes of the whole group: out of all nodes, out by the backends' count, and through the busiest node."""
        node = torch.zeros(len(self.topology.nodes), 3, dtype=torch.int64, device=self.device)
        node[self.topology.node] = bytes_here
        dist.all_reduce(node, group=self.topology.group)
        return int(node[:, 0].sum()), int(node[:, 2].sum()), int(node[:, :2].max())


def _choice(choice: Choice, top: int, tokens: int) -> dict[str, Any]:
    return {
        "backend": choice.dispatcher.name, "topk": top, "tokens": tokens, "reason": choice.reason, **choice.figures
    }  # fmt: skip


def main() -> None:
    """Measure, and write a JSON line a result if this is rank 0; a failure is its sentence and its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        rank = Rank(msgspec.json.decode(given.plan.read_bytes(), type=Plan))
        with open(given.output if rank.topology.rank == 0 else os.devnull, "w") as out:
            for line in rank.run():
                print(json.dumps(line), file=out, flush=True)
    except Failure as failure:
        print(failure.sentence, file=sys.stderr, flush=True)
        # Other ranks may be in an exchange with this one, which an orderly end would wait for.
        os._exit(failure.exit_code)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
