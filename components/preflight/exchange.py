"""The exchange that proves the transport: runs on two training nodes, both ways at once, and reports what carried it.

torchrun starts it on every node. Each rank sends its share to the rank of its own number on the other node, over NCCL
where there are GPUs and over gloo elsewhere; NCCL's log and the interfaces' byte counters are read around it. Rank 0
prints the report as one line, also when the exchange itself failed: then the log matters most.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from components.preflight.evidence import MARK, Evidence, Node, Problem, Report, Wanted, carriers, too_few
from components.preflight.fabric_checks import MIB, look_at_host
from components.preflight.fallbacks import judge
from components.preflight.nccl_log import Findings, merge, parse_log
from components.preflight.nic import Counters, read_counters

PIECE = 32 * MIB
"""Bytes of one message."""
NODES = 2


class Part(msgspec.Struct, frozen=True):
    """What one rank has to tell."""

    node: Node | None
    """Of the first rank of each pod."""
    findings: Findings
    seconds: float
    error: str


def main() -> None:
    """Exchange, judge and report."""
    parser = argparse.ArgumentParser(prog="python -m components.preflight.exchange", description=__doc__)
    parser.add_argument("--mib", type=int, required=True, help="MiB each node sends")
    parser.add_argument("--limit", type=float, required=True, help="seconds for all of it")
    parser.add_argument("--wanted", required=True, help="what is to be proven, as JSON")
    given = parser.parse_args()
    wanted = msgspec.json.decode(given.wanted, type=Wanted)
    with tempfile.TemporaryDirectory(prefix="tandem-nccl-") as folder:
        _log_into(Path(folder))
        # Time is kept for telling what happened, which a stuck exchange would take away.
        dist.init_process_group(backend=_backend(), timeout=timedelta(seconds=given.limit / 2))
        talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=given.limit))
        assert isinstance(talk, dist.ProcessGroup)
        part = _take_part(given.mib * MIB, talk, Path(folder))
        parts: list[Part] = [part] * dist.get_world_size()
        dist.all_gather_object(parts, part, group=talk)
        if dist.get_rank() == 0:
            report = conclude(wanted, parts, given.mib * MIB)
            print(MARK + msgspec.json.encode(report).decode(), flush=True)
        dist.barrier(group=talk)
        if not any(each.error for each in parts):
            dist.destroy_process_group()


def conclude(wanted: Wanted, parts: list[Part], size: int) -> Report:
    """The report from what all ranks tell.

    Args:
        wanted: What is to be proven.
        parts: One a rank.
        size: Bytes each node sent.
    """
    nodes = tuple(part.node for part in parts if part.node is not None)
    evidence = Evidence(wanted=wanted, findings=merge(part.findings for part in parts), nodes=nodes)
    errors = sorted({part.error for part in parts if part.error})
    problems = judge(evidence)
    if errors:
        pods = " and ".join(node.pod for node in nodes)
        sentence = f"the exchange between {pods} failed ({errors[0]}); see NCCL's lines in the report"
        problems.append(Problem("failed", sentence, wanted.efa))
    problems.sort(key=lambda problem: not problem.fails)
    carried = "efa" if evidence.over_efa and not too_few(evidence) else "unknown"
    if not errors and (over := carriers(evidence)):
        carried = f"tcp ({', '.join(sorted({each.rpartition('(')[2].rstrip(')') for each in over.split(', ')}))})"
    seconds = 0.0 if errors else max(part.seconds for part in parts)
    return Report(
        carried_by="unknown" if errors else carried,
        evidence=evidence,
        problems=tuple(problems),
        seconds=round(seconds, 4),
        gib_s=round(size / seconds / 2**30, 3) if seconds else 0.0,
    )


def _backend() -> str:
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return "cpu:gloo,cuda:nccl"


def _log_into(folder: Path) -> None:
    """Have NCCL write its log; whatever the image or the namespace set, this is what gets read."""
    os.environ["NCCL_DEBUG"] = "INFO"
    # ENV tells the type of GIN as NCCL read it.
    os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET,ENV"
    os.environ["NCCL_DEBUG_FILE"] = f"{folder}/nccl.%h.%p"
    # A stuck exchange then raises here, where it can be told, and does not end the process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"


def _take_part(size: int, talk: dist.ProcessGroup, folder: Path) -> Part:
    """This rank's share of an exchange of `size` bytes a node."""
    width = int(os.environ["LOCAL_WORLD_SIZE"])
    if dist.get_world_size() != NODES * width:
        raise SystemExit(f"the exchange is between {NODES} nodes of equally many ranks; start it by torchrun on both")
    first = int(os.environ["LOCAL_RANK"]) == 0
    share, error, seconds = -(-size // width), "", 0.0
    before = after = Counters({}, {})
    try:
        swap(1, talk)  # connections are made now, and not timed
        before = read_counters() if first else before
        dist.barrier(group=talk)
        start = time.perf_counter()
        swap(share, talk)
        seconds = time.perf_counter() - start
        dist.barrier(group=talk)
        after = read_counters() if first else after
    except RuntimeError as failure:
        error = " ".join(str(failure).split())[:300]
    log = "".join(file.read_text(errors="replace") for file in sorted(folder.iterdir()))
    node = None
    if first:
        # The counters of a failed exchange are of no use.
        moved = Counters({}, {}) if error else after.since(before)
        pod = socket.gethostname()
        machine = os.environ.get("NODE_NAME", pod)
        node = Node(pod=pod, node=machine, sent=share * width, moved=moved, host=look_at_host())
    return Part(node, parse_log(log), seconds, error)


def swap(size: int, talk: dist.ProcessGroup) -> None:
    """Send `size` bytes to the rank of this number on the other node, take as many from it, and compare them.

    Raises:
        RuntimeError: the network failed, or brought other bytes than were sent.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    peer = (rank + world // NODES) % world
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number, start in enumerate(range(0, size, PIECE)):
        length = min(PIECE, size - start)
        sent = torch.full((length,), (rank + number) % 251, dtype=torch.uint8, device=device)
        taken = torch.empty_like(sent)
        both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, taken, peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if int((taken != (peer + number) % 251).sum()):
            raise RuntimeError(f"rank {rank} received other bytes than rank {peer} sent")
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
