"""Sessions, messages, and the sending end with receivers that are processes of their own (SGLang's: tests/sglang)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch
import xxhash

from components.broadcast.collective import Sender
from components.broadcast.session import Described, Session, buckets
from configs.failure import ServiceGone

JOIN_S = 120.0
WORKERS = ("rollout-0", "rollout-1", "rollout-2")
TENSORS = {f"tensor-{number}": torch.randn(1000 + number) for number in range(6)}
BUCKET = 8192
MESSAGES = 3


def sizes() -> list[int]:
    described: list[Described] = [(name, "float32", list(tensor.shape)) for name, tensor in TENSORS.items()]
    return [sum(TENSORS[name].nbytes for name, _, _ in message) for message in buckets(described, BUCKET)]


def sums() -> list[str]:
    data, found = b"".join(tensor.numpy().tobytes() for tensor in TENSORS.values()), []
    for size in sizes():
        found.append(xxhash.xxh3_64_hexdigest(data[:size]))
        data = data[size:]
    return found


class Receivers:
    """Processes that take messages."""

    def __init__(self, session: Session, expected: list[int]) -> None:
        self.processes = {
            worker: subprocess.Popen(
                [sys.executable, "-m", "tests.broadcast.receiver", msgspec.json.encode(session).decode(), worker,
                 json.dumps(expected)],
                stdout=subprocess.PIPE, text=True,
            )
            for worker in session.ranks
        }  # fmt: skip

    def lines(self, worker: str) -> list[str]:
        """What one printed, once it has ended."""
        return self.processes[worker].communicate(timeout=60)[0].split("\n")[:-1]

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender("test", "gloo", "127.0.0.1", dict.fromkeys(WORKERS, 1), BUCKET)
    yield sender
    sender.close()


def test_engines_get_every_byte_and_fail_one_by_one(sender: Sender) -> None:
    receivers = Receivers(sender.session, [*sizes(), *sizes(), 1000])
    stopped, dead = receivers.processes["rollout-0"], receivers.processes["rollout-2"]
    try:
        assert sender.join(JOIN_S) == set(WORKERS)
        assert sender.send(TENSORS, JOIN_S) == set(WORKERS)
        assert len(sizes()) == MESSAGES
        stopped.send_signal(signal.SIGSTOP)
        dead.kill()
        dead.wait()
        assert sender.send(TENSORS, 2.0) == {"rollout-1"}
        assert sender.lost.keys() == {"rollout-0", "rollout-2"}
        assert sender.workers == {"rollout-1": 1}
        sender.close()  # while one waits for one message more
        assert receivers.lines("rollout-1") == [*sums(), *sums(), "left alone"]
        stopped.send_signal(signal.SIGCONT)
        assert receivers.lines("rollout-0")[-1] == "left alone"
    finally:
        receivers.kill()


def test_an_engine_that_does_not_come_is_left_out() -> None:
    sender = Sender("test", "gloo", "127.0.0.1", {"rollout-0": 1}, BUCKET)
    with pytest.raises(ServiceGone, match="no engine is left .rollout-0 did not join within 1 s"):
        sender.join(1.0)
    sender.close()


def test_places() -> None:
    ranks = {"b": 2, "a": 1}
    alone = Session("s", "host", 1, "gloo", ranks, 8)
    assert alone.place("a") == ("s-a", 1, 2) and alone.place("b") == ("s-b", 1, 3)
    together = Session("s", "host", 1, "nccl", ranks, 8)
    assert together.place("a") == ("s", 1, 4) and together.place("b") == ("s", 2, 4)


def test_buckets() -> None:
    tensors: list[Described] = [
        ("a", "float32", [2]), ("b", "float32", [1]), ("c", "bfloat16", [1]), ("d", "bfloat16", [100]), ("e", "bfloat16", [1])
    ]  # fmt: skip
    names = [[name for name, _, _ in message] for message in buckets(tensors, 12)]
    assert names == [["a", "b"], ["c"], ["d"], ["e"]]
    assert buckets([], 12) == []
