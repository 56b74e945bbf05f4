"""The exchange that proves the transport: runs on two training nodes, both ways at once, and reports what carried it.

torchrun starts it on every node. Each rank sends its share to the rank of its own number on the other node, over NCCL
where there are GPUs and over gloo elsewhere; NCCL's log and the interfaces' byte counters are read around it. Rank 0
prints the report as one line, also when the exchange itself failed: then the log matters most. Should nothing move any
more, the first rank of a pod prints what it knows and where it is stuck, before its time is over.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import psutil
import torch
import torch.distributed as dist

from components.preflight.evidence import MARK, Evidence, Node, Problem, Report, Wanted, carriers, tells, too_few
from components.preflight.fabric_checks import ASK_S, MIB, look_at_host
from components.preflight.fallbacks import judge
from components.preflight.nccl_log import Findings, merge, parse_log
from components.preflight.nic import Counters, read_counters
from configs.failure import BadConfig
from configs.kernels import DeepEPConfig
from kernels.dispatch.deep_ep_environment import prepare

PIECE = 32 * MIB
"""Bytes of one message."""
NODES = 2
TELL_AT = 0.7
"""Share of the limit after which a stuck exchange is reported: preflight needs time to read it."""


class Part(msgspec.Struct, frozen=True):
    """What one rank has to tell."""

    node: Node | None
    """Of the first rank of each pod."""
    rank: int
    findings: Findings
    seconds: float
    error: str


class Watch(threading.Thread):
    """Ends an exchange in which nothing moves any more, with a report of what this rank knows.

    Attributes:
        stage: What is being done, in words.
        folder: With this rank's log of NCCL.

    Args:
        limit_s: Seconds for the whole exchange from the start of this process; the report comes after 0.7 of them.
        wanted: What is to be proven.
        size: Bytes each node sends.
        folder: Becomes the attribute.
    """

    def __init__(self, limit_s: float, wanted: Wanted, size: int, folder: Path) -> None:
        super().__init__(daemon=True)
        self.stage = "meeting the other ranks"
        self._limit_s, self._wanted, self._size, self.folder = limit_s, wanted, size, folder
        self._ended = threading.Event()

    def end(self) -> None:
        """The exchange is over."""
        self._ended.set()

    def run(self) -> None:
        """Wait; report and end the process if it is not over in time."""
        # To import torch has taken some of it already.
        left_s = TELL_AT * self._limit_s - (time.time() - psutil.Process().create_time())
        if self._ended.wait(max(0.0, left_s)):
            return
        rank = int(os.environ["RANK"])
        error = f"it has not ended after {TELL_AT * self._limit_s:.0f} s; rank {rank} is stuck in {self.stage}"
        # Whatever else hangs, fi_info may as well.
        ask_s = min(ASK_S, (1 - TELL_AT) * self._limit_s / 3)
        part = Part(_node(0, Counters({}, {}), ask_s), rank, _findings(self.folder), 0.0, error)
        _tell(conclude(self._wanted, [part], self._size))
        os._exit(1)


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
        watch = Watch(given.limit, wanted, given.mib * MIB, Path(folder))
        if int(os.environ["LOCAL_RANK"]) == 0:
            watch.start()
        # Time is kept for telling what happened, which a stuck exchange would take away.
        dist.init_process_group(backend=_backend(), timeout=timedelta(seconds=given.limit / 2))
        talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=given.limit))
        assert isinstance(talk, dist.ProcessGroup)
        part = _take_part(given.mib * MIB, talk, wanted, watch)
        watch.stage = "hearing what the other ranks found"
        parts: list[Part] = [part] * dist.get_world_size()
        dist.all_gather_object(parts, part, group=talk)
        watch.end()
        if dist.get_rank() == 0:
            _tell(conclude(wanted, parts, given.mib * MIB))
        dist.barrier(group=talk)
    if any(each.error for each in parts):
        # A communicator with work that never ends does not let go of its process.
        os._exit(0)
    dist.destroy_process_group()


def _tell(report: Report) -> None:
    print(MARK + msgspec.json.encode(report).decode(), flush=True)


def conclude(wanted: Wanted, parts: list[Part], size: int) -> Report:
    """The report from what all ranks tell.

    Args:
        wanted: What is to be proven.
        parts: One a rank.
        size: Bytes each node sent.
    """
    nodes = tuple(part.node for part in parts if part.node is not None)
    evidence = Evidence(
        wanted=wanted,
        findings=merge(part.findings for part in parts),
        nodes=nodes,
        unheard=tuple(part.rank for part in parts if not tells(part.findings)),
        without_channel=tuple(part.rank for part in parts if not part.findings.gdrdma),
    )
    errors = sorted({part.error for part in parts if part.error})
    problems = judge(evidence, counted=not errors)
    if errors:
        pods = " and ".join(node.pod for node in nodes)
        sentence = f"the exchange as seen by {pods} failed ({errors[0]}); see NCCL's lines in the report"
        problems.insert(0, Problem("failed", sentence, wanted.efa))
    problems.sort(key=lambda problem: not problem.fails)
    carried = "efa" if evidence.over_efa and not evidence.unheard and not too_few(evidence) else "unknown"
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


def _take_part(size: int, talk: dist.ProcessGroup, wanted: Wanted, watch: Watch) -> Part:
    """This rank's share of an exchange of `size` bytes a node."""
    width = int(os.environ["LOCAL_WORLD_SIZE"])
    if dist.get_world_size() != NODES * width:
        raise SystemExit(f"the exchange is between {NODES} nodes of equally many ranks; start it by torchrun on both")
    first = int(os.environ["LOCAL_RANK"]) == 0
    share, error, seconds = -(-size // width), "", 0.0
    before = after = Counters({}, {})
    try:
        if wanted.gin != "none":
            prepare(DeepEPConfig(gin=wanted.deep_ep_gin))
        watch.stage = "making connections"
        swap(1, talk)  # connections are made now, and not timed
        before = read_counters() if first else before
        watch.stage = "the exchange itself"
        dist.barrier(group=talk)
        start = time.perf_counter()
        swap(share, talk)
        seconds = time.perf_counter() - start
        dist.barrier(group=talk)
        after = read_counters() if first else after
    except (RuntimeError, BadConfig) as failure:
        error = " ".join(str(failure).split())[:300]
    # The counters of a failed exchange are of no use.
    moved = Counters({}, {}) if error else after.since(before)
    node = _node(share * width, moved) if first else None
    return Part(node, dist.get_rank(), _findings(watch.folder), seconds, error)


def _node(sent: int, moved: Counters, ask_s: float = ASK_S) -> Node:
    pod = socket.gethostname()
    host = look_at_host(limit_s=ask_s)
    return Node(pod=pod, node=os.environ.get("NODE_NAME", pod), sent=sent, moved=moved, host=host)


def _findings(folder: Path) -> Findings:
    return parse_log("".join(file.read_text(errors="replace") for file in sorted(folder.iterdir())))


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
