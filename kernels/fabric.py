"""An emulated fabric: network namespaces as nodes, joined by a bridge, every node's wire shaped to a rate (Linux, root).

What is in one namespace shares its loopback, as the ranks of one node share their memory; what leaves it passes a token
bucket each way. Byte counts at the interfaces are what a real network card would count.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from types import TracebackType

from configs.failure import BadConfig

INTERFACE = "eth0"
"""Name of a node's wire inside its namespace."""
BURST, QUEUE = "256kb", "100ms"
"""Depth of the token bucket, and the longest a packet may wait in it."""
COMMAND_S = 10.0


class EmulatedFabric:
    """Namespaces joined by a bridge; a context manager that leaves nothing behind.

    Args:
        nodes: Namespaces.
        mbit_s: Rate of one node's wire in each direction, in Mbit/s.

    Raises:
        BadConfig: this user, or this machine, cannot make it.
    """

    def __init__(self, nodes: int, mbit_s: float) -> None:
        self.nodes = nodes
        self.mbit_s = mbit_s
        # Interface names have at most 15 letters; the process id keeps two fabrics apart.
        self._name = f"td{os.getpid()}"
        self._made = ExitStack()

    def __enter__(self) -> EmulatedFabric:
        if os.geteuid() != 0:
            raise BadConfig("--fabric emulated makes network namespaces, for which it must be root; run it with sudo")
        for command in ("ip", "tc"):
            if shutil.which(command) is None:
                raise BadConfig(f"--fabric emulated needs the command {command}; install iproute2")
        with ExitStack() as unmade:
            self._make(unmade)
            self._made = unmade.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made.close()

    def address(self, node: int) -> str:
        """IPv4 address of a node."""
        return f"10.77.{node // 200}.{10 + node % 200}"

    def command(self, node: int) -> list[str]:
        """Prefix of a command that is to run on a node."""
        return ["ip", "netns", "exec", self._namespace(node)]

    def _make(self, unmade: ExitStack) -> None:
        bridge = f"{self._name}b"
        _run("ip", "link", "add", bridge, "type", "bridge")
        unmade.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "link", "set", bridge, "up")
        for node in range(self.nodes):
            space, outer = self._namespace(node), f"{self._name}v{node}"
            _run("ip", "netns", "add", space)
            unmade.callback(_run, "ip", "netns", "del", space)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", INTERFACE, "netns", space)
            # By itself a wire goes with its namespace, but some time later.
            unmade.callback(_run, "ip", "link", "del", outer)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(node)}/16", "dev", INTERFACE)
            _run("ip", "-n", space, "link", "set", INTERFACE, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            shape = ["root", "tbf", "rate", f"{self.mbit_s:g}mbit", "burst", BURST, "latency", QUEUE]
            _run("tc", "-n", space, "qdisc", "add", "dev", INTERFACE, *shape)
            _run("tc", "qdisc", "add", "dev", outer, *shape)

    def _namespace(self, node: int) -> str:
        return f"{self._name}n{node}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise BadConfig(f"`{' '.join(command)}` failed: {done.stderr.strip()}; this kernel cannot emulate the fabric")
