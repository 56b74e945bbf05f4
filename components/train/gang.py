"""The gang: the training ranks of this node, started, watched and ended by the first of them.

`components.train.main` is one process a node. It is the node's first rank itself and starts the others; where a node
stands among the nodes it learns from the variables that torchrun takes (`PET_NNODES`, `PET_NODE_RANK`,
`PET_MASTER_ADDR`, `PET_MASTER_PORT`), without which it is alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from socket import create_server
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from components.role import PARENT, die_with_parent
from components.storage.layout import RunLayout
from components.train.ranks import Ranks
from configs.failure import BAD_CONFIG, BAD_DATA, DEFECT, DONE, SERVICE_GONE, Failure, ServiceGone, failure_of
from configs.run import RunConfig

LOOK_S = 0.1
SETTLE_S = 1.0
"""Seconds after the first death in which other ranks may die of it, so that the one to blame is known."""
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
        ServiceGone: the ranks did not meet.
    """

    def __init__(self, config: RunConfig, layout: RunLayout, arguments: Sequence[str]) -> None:
        node = Node.from_environment()
        self.width = config.train.ranks // node.nodes
        self.ranks = Ranks(node.number * self.width, config.train.ranks, 0)
        self._logs, self._arguments = layout.logs, arguments
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._settled = threading.Event()
        self._let_go = False
        if self.ranks.alone:
            return
        layout.logs.mkdir(parents=True, exist_ok=True)
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
        with _default_signals():
            self.ranks.open(store, config.kernels if config.train.expert_parallel > 1 else None)

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
                self._kill()
                print(cause.sentence, file=sys.stderr, flush=True)
                os._exit(cause.exit_code)

    def _cause(self, seconds: float) -> Failure | None:
        """The failure of the rank that died first, as far as can be told; None if none died within `seconds`."""
        end = time.monotonic() + seconds
        dead: dict[int, int] = {}
        while len(dead) < len(self._children):
            dead |= {rank: code for rank, child in self._children.items() if (code := child.poll()) is not None}
            if time.monotonic() >= end:
                break
            time.sleep(LOOK_S)
        # Those that only lost the others say so, by the code of a service that is gone.
        order = [BAD_CONFIG, BAD_DATA, DEFECT, DONE, SERVICE_GONE]
        for rank, code in sorted(dead.items(), key=lambda item: order.index(item[1]) if item[1] in order else -1):
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
        for child in self._children.values():
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
            return dist.TCPStore(address, port, None, False, timedelta(seconds=limit))
        socket = create_server(("" if everywhere else address, port))
        return dist.TCPStore(
            address, socket.getsockname()[1], None, True, timedelta(seconds=limit), wait_for_workers=False,
            master_listen_fd=socket.detach(),
        )  # fmt: skip
    except (OSError, dist.DistError) as error:
        where = f"{address}:{port}"
        if listens:
            raise ServiceGone(f"rank 0 cannot listen at {where} ({error}); free the port") from None
        raise ServiceGone(
            f"rank 0 of training was not reached at {where} within {limit:.0f} s ({_first_line(error)}); see what holds"
            " its pod up"
        ) from None


def lost(error: RuntimeError, ranks: Ranks) -> Failure | None:
    """What an error of a collective means: another rank is gone; None if it is some other error."""
    if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
        return None
    return ServiceGone(f"rank {ranks.rank} lost the other ranks ({_first_line(error)})")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _default_signals() -> Iterator[None]:
    """While ranks meet, a process waits where no handler runs, and has nothing to hand back: a signal ends it."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _die_at_once() -> None:
    die_with_parent(signal.SIGKILL)
