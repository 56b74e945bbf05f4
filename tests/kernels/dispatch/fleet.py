"""A fleet: long-lived processes that form one world and run the same function together, again and again.

To start a process that has torch costs seconds; a case of a property costs milliseconds.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernels.dispatch.contract import Dispatcher
from kernels.dispatch.topology import Topology

LIMIT_S = 120.0
"""Seconds that a fleet may take for one call."""
GRACE_S = 5.0
"""Seconds that the other ranks have once one has failed."""

_processes = multiprocessing.get_context("forkserver")
# The last is what a first collective loads: seconds of it, which each process would otherwise spend by itself.
_processes.set_forkserver_preload([__name__, "kernels.dispatch.hierarchical", "torch.fx.experimental.symbolic_shapes"])

Factory = Callable[[Topology, int], Dispatcher]


class Member:
    """What a function that a fleet runs is given: its place, and dispatchers that live as long as the fleet."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._dispatchers: dict[Any, Dispatcher] = {}

    def topology(self, width: int) -> Topology:
        """The world as nodes of `width` ranks."""
        nodes = tuple(tuple(range(first, first + width)) for first in range(0, self.world, width))
        assert dist.group.WORLD is not None
        return Topology(dist.group.WORLD, self.rank, nodes)

    def dispatcher(self, factory: Factory, width: int, num_experts: int) -> Dispatcher:
        """The dispatcher of this fleet for these settings; made once."""
        # Each call unpickles a factory of its own.
        key = (pickle.dumps(factory), width, num_experts)
        if key not in self._dispatchers:
            self._dispatchers[key] = factory(self.topology(width), num_experts)
        return self._dispatchers[key]


class Fleet:
    """`world` processes; started when first needed, and anew after one of them failed.

    With another backend than gloo, each has a GPU of its own.
    """

    def __init__(self, world: int, backend: str = "gloo", limit_s: float = LIMIT_S) -> None:
        self.world = world
        self.backend = backend
        self.limit_s = limit_s
        self._members: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(member, *args)` returns on each rank."""
        if not self._members:
            self._start()
        for _, pipe in self._members:
            pipe.send((function, args))
        try:
            return self._gather(function.__name__)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the processes."""
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members = []
        if self._folder:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store")
        for rank in range(self.world):
            ours, theirs = _processes.Pipe()
            place = (rank, self.world, self.backend, str(store))
            process = _processes.Process(target=_serve, args=(theirs, *place), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def _gather(self, what: str) -> list[Any]:
        """Every rank's answer; the failures of all, if some failed, and of those that then hang, where they stand."""
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._members)}
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + self.limit_s
        while ranks and (ready := wait(list(ranks), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = ranks.pop(pipe)
                try:
                    failed, answers[rank] = pipe.recv()
                except EOFError:
                    self._members[rank][0].join(5)
                    failed = f"ended with code {self._members[rank][0].exitcode}"
                if failed:
                    failures[rank] = failed
                    # The others wait for what this one will never send.
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not ranks and not failures:
            return [answers[rank] for rank in range(self.world)]
        for rank in ranks.values():
            os.kill(self._members[rank][0].pid, signal.SIGUSR1)
            failures[rank] = f"did not finish within {self.limit_s:.0f} s or {GRACE_S:.0f} s after another failed"
        time.sleep(0.5 if ranks else 0)
        raise AssertionError("\n".join(f"rank {rank} in {what}: {failures[rank]}" for rank in sorted(failures)))


def _serve(pipe: Connection, rank: int, world: int, backend: str, store: str) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    if backend != "gloo":
        torch.cuda.set_device(rank)
    files = dist.FileStore(store, world)
    dist.init_process_group(backend, store=files, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT_S))
    member = Member(rank, world)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("", function(member, *args)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
