"""The gang: the training ranks of this node, started, watched and ended by the first of them.

`components.train.main` is one process a node. It is the node's first rank itself and starts the others; where a node
stands among the nodes it learns from the variables that torchrun takes (`PET_NNODES`, `PET_NODE_RANK`,
`PET_MASTER_ADDR`, `PET_MASTER_PORT`), without which it is alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from socket import create_server
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from components.role import PARENT, die_with_parent
from components.storage.layout import RunLayout
from components.train.ranks import LIMIT, Ranks
from configs.failure import (
    BAD_CONFIG,
    BAD_DATA,
    DEFECT,
    DONE,
    SERVICE_GONE,
    TOLD_TO_LEAVE,
    Failure,
    ServiceGone,
    failure_of,
)
from configs.run import RunConfig

LOOK_S = 0.1
SETTLE_S = 1.0
"""Seconds after the first death in which other ranks may die of it, so that the one to blame is known."""
PATIENCE_S = 10.0
"""Seconds more for the one to blame to die, where those that died so far only lost others."""
END_S = 20.0
"""Seconds the other ranks may take to end once they were let go."""


class Node(NamedTuple):
    """This node among those of the gang."""

    nodes: int
    number: int
    address: str
    """Where rank 0 listens."""
    port: int
    """0 for a free one."""

    @classmethod
    def from_environment(cls) -> Node:
        """As torchrun's variables tell."""
        given = os.environ.get
        return cls(
            int(given("PET_NNODES", "1")),
            int(given("PET_NODE_RANK", "0")),
            given("PET_MASTER_ADDR", "127.0.0.1"),
            int(given("PET_MASTER_PORT", "0")),
        )


class Gang:
    """This node's ranks, for as long as the context lasts.

    Attributes:
        ranks: This process among all.

    Args:
        config: Tells how many ranks there are.
        layout: Logs of the other ranks are `logs/train-<rank>.log` and `.err`.
        arguments: Command line that the other ranks are started with.

    Raises:
        Failure: the ranks did not meet, or this node cannot have so many.
    """

    def __init__(self, config: RunConfig, layout: RunLayout, arguments: Sequence[str]) -> None:
        node = Node.from_environment()
        self.width = config.train.ranks // node.nodes
        self.ranks = Ranks.on_node(node.number * self.width, config.train.ranks, 0, self.width)
        self._logs, self._arguments = layout.logs, arguments
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._settled = threading.Event()
        self._let_go = False
        if self.ranks.alone:
            return
        layout.logs.mkdir(parents=True, exist_ok=True)
        with _leaving_at_once(self._kill):
            try:
                self._meet(node, config)
            except BaseException as error:
                # The context does not begin, so nothing ends it.
                self._settled.set()
                cause = None
                if isinstance(error, RuntimeError):
                    cause = self._cause(SETTLE_S) or unmet(error, self.ranks, config)
                self._kill()
                if cause is None:
                    raise
                raise cause from None

    def _meet(self, node: Node, config: RunConfig) -> None:
        """Start this node's other ranks and meet them and those of the other nodes."""
        store = meeting_point(node.address, node.port, config, listens=self.ranks.rank == 0, everywhere=node.nodes > 1)
        os.environ |= {
            "RANK": str(self.ranks.rank),
            "WORLD_SIZE": str(self.ranks.size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(self.width),
            "MASTER_ADDR": node.address,
            "MASTER_PORT": str(store.port),
        }
        for place in range(1, self.width):
            self._children[self.ranks.rank + place] = self._start(place)
        threading.Thread(target=self._watch, daemon=True).start()
        meet(self.ranks, store, config)

    def let_go(self) -> None:
        """The other ranks are about to end, and may."""
        self._let_go = True
        self._settled.set()

    def __enter__(self) -> Gang:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settled.set()
        try:
            if isinstance(error, RuntimeError) and (cause := self._cause(SETTLE_S) or lost(error, self.ranks)):
                raise cause from None
            if self._let_go:
                self._await_end()
        finally:
            self._kill()

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        rank = self.ranks.rank + place
        own = {"RANK": str(rank), "LOCAL_RANK": str(place), PARENT: str(os.getpid())}
        # Last words are those of this life.
        with open(self._log(rank, "log"), "ab") as out, open(self._log(rank, "err"), "wb") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "components.train.follower", *self._arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **own}, preexec_fn=_die_at_once,
            )  # fmt: skip

    def _log(self, rank: int, kind: str) -> Path:
        return self._logs / f"train-{rank}.{kind}"

    def _watch(self) -> None:
        """End this process if another rank dies while it is at something that the death does not end."""
        while not self._settled.wait(LOOK_S):
            if any(child.poll() is not None for child in self._children.values()):
                if self._settled.wait(SETTLE_S):
                    return
                cause = self._cause(0.0)
                assert cause is not None
                if self._settled.is_set():
                    return
                self._kill()
                print(cause.sentence, file=sys.stderr, flush=True)
                os._exit(cause.exit_code)

    def _cause(self, seconds: float) -> Failure | None:
        """The failure of the rank that died first, as far as can be told; None if none died within `seconds`."""
        end = time.monotonic() + seconds
        dead: dict[int, int] = {}
        while len(dead) < len(self._children):
            dead |= {rank: code for rank, child in self._children.items() if (code := child.poll()) is not None}
            # Those that only lost the others say so, by the code of a service that is gone.
            only_lost = bool(dead) and set(dead.values()) == {SERVICE_GONE}
            if time.monotonic() >= end + PATIENCE_S * only_lost:
                break
            time.sleep(LOOK_S)
        for rank, code in sorted(dead.items(), key=lambda item: _blame(item[1])):
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return failure_of(max(code, 0) or DEFECT, f"rank {rank} {how}; its last words: {self._last_words(rank)}")
        return None

    def _last_words(self, rank: int) -> str:
        lines = [line for line in self._log(rank, "err").read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"it left none; see {self._log(rank, 'log')}"

    def _await_end(self) -> None:
        end = time.monotonic() + END_S
        for rank, child in self._children.items():
            try:
                child.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"note: rank {rank} was let go and did not end within {END_S:.0f} s; it was killed", flush=True)

    def _kill(self) -> None:
        for child in list(self._children.values()):
            child.kill()
            child.wait()


def meeting_point(
    address: str, port: int, config: RunConfig, listens: bool = False, everywhere: bool = False
) -> dist.TCPStore:
    """The store through which ranks find one another.

    Args:
        listens: Whether this is rank 0, which holds it.
        everywhere: Whether it listens on every interface: pods reach one another by names that may come late.

    Raises:
        ServiceGone: it cannot be reached.
    """
    limit = config.kubernetes.ready_s
    try:
        if not listens:
            # It tries twice, each time for as long as it is given.
            return dist.TCPStore(address, port, None, False, timedelta(seconds=limit / 2))
        listening = listener(port) if everywhere else create_server((address, port))
        return dist.TCPStore(
            address, listening.getsockname()[1], None, True, timedelta(seconds=limit), wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
    except (OSError, dist.DistError) as error:
        where = f"{address}:{port}"
        if listens:
            raise ServiceGone(f"rank 0 cannot listen at {where} ({error}); free the port") from None
        raise ServiceGone(
            f"rank 0 of training was not reached at {where} within {limit:.0f} s ({_first_line(error)}); see what holds"
            " its pod up"
        ) from None


def meet(ranks: Ranks, store: dist.Store, config: RunConfig) -> None:
    """Have this process meet the other ranks, within the time that a pod may take to start.

    Raises:
        Failure, RuntimeError: as `Ranks.open`.
    """
    limit = timedelta(seconds=config.kubernetes.ready_s)
    patience = LIMIT + timedelta(seconds=config.loop.checkpoint_s)
    ranks.open(store, config.kernels if config.train.expert_parallel > 1 else None, limit, patience)


def listener(port: int) -> socket.socket:
    """A socket that listens on every interface, by IPv6 as well as by IPv4 where this machine has both.

    Args:
        port: 0 for a free one.

    Raises:
        OSError: the port is taken.
    """
    if socket.has_dualstack_ipv6():
        return create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return create_server(("", port))


def lost(error: RuntimeError, ranks: Ranks) -> Failure | None:
    """What an error of a collective means: another rank is gone; None if it is some other error."""
    if not _of_others(error):
        return None
    return ServiceGone(f"rank {ranks.rank} lost the other ranks ({_first_line(error)})")


def unmet(error: RuntimeError, ranks: Ranks, config: RunConfig) -> Failure | None:
    """What an error while ranks meet means: not all came; None if it is some other error."""
    if not _of_others(error):
        return None
    return ServiceGone(
        f"rank {ranks.rank} did not meet the other {ranks.size - 1} ranks of training within"
        f" {config.kubernetes.ready_s:.0f} s ({_first_line(error)}); see what holds their pods up"
    )


def _of_others(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _blame(code: int) -> int:
    """Place of an exit code among those of dead ranks: the lower, the likelier it is the one that others died of."""
    order = [BAD_CONFIG, BAD_DATA, None, DEFECT, TOLD_TO_LEAVE, DONE, SERVICE_GONE]
    return order.index(code if code in order else None)


@contextmanager
def _leaving_at_once(first: Callable[[], None]) -> Iterator[None]:
    """While ranks meet, a process waits where no handler runs, and has nothing to hand back: a signal ends it.

    Not by the signal's default action: the first process of a pod has none.

    Args:
        first: Called before the end, by a thread.
    """
    given, taken = socket.socketpair()
    taken.setblocking(False)

    def leave() -> None:
        while number := given.recv(1):
            if number[0] in (signal.SIGTERM, signal.SIGINT):
                first()
                print(
                    "training was told to leave before its ranks had met; nothing was begun",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(TOLD_TO_LEAVE)

    watching = threading.Thread(target=leave, daemon=True)
    before = signal.set_wakeup_fd(taken.fileno(), warn_on_full_buffer=False)
    watching.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        taken.close()
        watching.join()
        given.close()


def _die_at_once() -> None:
    die_with_parent(signal.SIGKILL)
