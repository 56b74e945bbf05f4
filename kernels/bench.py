"""`tandem bench dispatch`: how tokens travel fastest between these ranks, measured backend beside backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from configs.failure import BadConfig, Failure, failure_of
from kernels.bench_rank import Plan, Rank
from kernels.dispatch.topology import NODE
from kernels.fabric import INTERFACE, EmulatedFabric

LIMIT_S = 3600.0


class Layout(NamedTuple):
    """Where the ranks run."""

    fabric: str
    """`emulated`: namespaces with shaped wires; `local`: processes of this machine, which only pretend to be on nodes."""
    nodes: int
    ranks_per_node: int
    mbit_s: float
    """Rate of a node's wire, for `emulated`."""

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node


def measure(plan: Plan, layout: Layout, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure all cases of the plan.

    Args:
        tell: Called with every case, ratios included, and every choice, as they come.

    Returns:
        The setting, `choices` and `cases`. A case's `ratio_bytes` and `ratio_time` say how many times fewer bytes and
        how many times faster than the plan's first backend; `over_wire` is the time over what its bytes take at the rate.

    Raises:
        BadConfig: the fabric cannot be made, or the experts cannot be shared by the ranks.
        Failure: a rank failed.
    """
    _check(plan, layout)
    return _collected(_lines(plan, layout), plan, layout, tell)


def measure_joined(plan: Plan, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The same as one rank among others that torchrun started; only rank 0 tells.

    Raises:
        BadConfig: torchrun did not start this process.
    """
    if "RANK" not in os.environ:
        raise BadConfig(
            "--fabric joined: this process is no rank; start it by `torchrun … --no-python tandem bench dispatch --fabric"
            " joined`"
        )
    rank = Rank(plan)
    width = len(rank.topology.nodes[rank.topology.node])
    layout = Layout("joined", len(rank.topology.nodes), width, 0.0)
    try:
        _check(plan, layout)
        return _collected(rank.run(), plan, layout, tell if rank.topology.rank == 0 else lambda line: None)
    finally:
        dist.destroy_process_group()


def _check(plan: Plan, layout: Layout) -> None:
    ranks = layout.nodes * layout.ranks_per_node
    if plan.experts % ranks:
        raise BadConfig(f"--experts {plan.experts} cannot be shared evenly by {ranks} ranks; give a multiple")
    reachable = plan.experts // layout.nodes * max(1, layout.nodes // 2)
    if "node_limited" in plan.routings and max(plan.tops) > reachable:
        raise BadConfig(
            f"--routing node_limited leaves a token {reachable} experts on half of the nodes, but --topk is"
            f" {max(plan.tops)}; leave it out, or give more --experts"
        )


def _collected(
    lines: Iterator[dict[str, Any]], plan: Plan, layout: Layout, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    figures: dict[str, Any] = {**layout._asdict(), **msgspec.to_builtins(plan)}
    for name in ("interface", "store"):
        del figures[name]
    figures |= {"choices": [], "cases": []}
    reference: dict[str, Any] = {}
    for line in lines:
        if "choice" in line:
            figures["choices"].append(line["choice"])
        else:
            case = line["case"]
            if case["backend"] == plan.backends[0]:
                reference = case
            case |= _ratios(case, reference, layout)
            figures["cases"].append(case)
        tell(line)
    return figures


def _ratios(case: dict[str, Any], reference: dict[str, Any], layout: Layout) -> dict[str, float | None]:
    sent = case["inter_node_bytes"]
    wire = case["busiest_bytes"] * 8 / (layout.mbit_s * 1e6) if layout.fabric == "emulated" else 0.0
    return {
        "ratio_bytes": reference["inter_node_bytes"] / sent if sent else None,
        "ratio_time": reference["seconds"] / case["seconds"],
        "over_wire": case["seconds"] / wire if wire else None,
    }


def _lines(plan: Plan, layout: Layout) -> Iterator[dict[str, Any]]:
    """What rank 0 writes, as it comes."""
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        fabric = None
        if layout.fabric == "emulated":
            fabric = undo.enter_context(EmulatedFabric(layout.nodes, layout.mbit_s))
            plan = msgspec.structs.replace(plan, interface=INTERFACE)
        plan = msgspec.structs.replace(plan, store=str(folder / "store"))
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        processes = undo.enter_context(_ranks(folder, layout, fabric))
        yield from _follow(folder / "lines", processes, folder)


@contextmanager
def _ranks(folder: Path, layout: Layout, fabric: EmulatedFabric | None) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks' processes, killed at the end whatever happens."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(layout.ranks):
            node, local = divmod(rank, layout.ranks_per_node)
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(layout.ranks),
                NODE: str(node),
                "GLOO_SOCKET_IFNAME": INTERFACE if fabric else "lo",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            }
            command = [sys.executable, "-m", "kernels.bench_rank", str(folder / "plan.json"), str(folder / "lines")]
            with open(folder / f"rank-{rank}.err", "wb") as err:
                processes.append(
                    subprocess.Popen((fabric.command(node) if fabric else []) + command, env=environment, stderr=err)
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _follow(file: Path, processes: list[subprocess.Popen[bytes]], folder: Path) -> Iterator[dict[str, Any]]:
    """Lines of a growing file until every process has ended with 0."""
    end = time.monotonic() + LIMIT_S
    position = 0
    while True:
        codes = [process.poll() for process in processes]
        if file.exists():
            with open(file) as lines:
                lines.seek(position)
                while (line := lines.readline()).endswith("\n"):
                    position = lines.tell()
                    yield json.loads(line)
        if all(code == 0 for code in codes):
            return
        for rank, code in enumerate(codes):
            if code:
                words = (folder / f"rank-{rank}.err").read_text(errors="replace").strip().splitlines()
                told = words[-1] if words else f"it ended with {code} and left no words"
                raise failure_of(code, f"rank {rank} of the measurement: {told}")
        if time.monotonic() > end:
            raise Failure(
                f"the measurement took more than {LIMIT_S:.0f} s; ask for fewer --tokens, --topk or --routing"
            )
        time.sleep(0.05)
