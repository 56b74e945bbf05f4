"""Collective transfers into two real SGLang servers, and what becomes of them when an end of one fails."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from components.broadcast.collective import Sender
from components.broadcast.session import Described, buckets
from components.weights.geometry import read_geometry
from components.weights.proof import difference, engine_checksums
from configs.failure import ServiceGone
from tests.rollout.contract_policy import make_version
from tests.sglang.raw_server import RawServer

JOIN_S = 60.0
LIMIT_S = 4.0
"""Of a message, where an engine is to fail."""
SMALL = 64 << 10


class Pair:
    """Two servers that hold the same policy, and two versions of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_version(folder / "policy", 1).folder
        self.geometry = read_geometry(self.folder / "config.json", "config.json")
        start = load_file(self.folder / "model.safetensors")
        self.start = {name: start[name] for name in sorted(start)}
        self.next = {name: tensor + 0.125 for name, tensor in self.start.items()}
        self.servers = {worker: RawServer(self.folder, folder / f"{worker}.log") for worker in ("one", "two")}
        self.formed = 0
        for server in self.servers.values():
            server.wait()

    def sender(self, bucket_bytes: int = 64 << 20, workers: tuple[str, ...] = ("one", "two")) -> Sender:
        self.formed += 1
        return Sender(f"test-{self.formed}", "gloo", "127.0.0.1", dict.fromkeys(workers, 1), bucket_bytes)

    def difference(self, worker: str, tensors: dict[str, torch.Tensor]) -> str:
        raw = {name: tensor.numpy().view(np.uint8) for name, tensor in tensors.items()}
        return difference(engine_checksums(raw, self.geometry, "cpu"), self.servers[worker].checksums())


def described(tensors: dict[str, torch.Tensor]) -> list[Described]:
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]


class Doing:
    """Runs something beside the test."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(work()), daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(100)
        assert self._found, "it did not end, or failed"
        return self._found[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("collective"))
    yield pair
    for server in pair.servers.values():
        server.stop()


def transfer(pair: Pair, sender: Sender, tensors: dict[str, torch.Tensor], label: str) -> set[str]:
    """One version to all engines of the session."""
    ends = [
        Doing(lambda worker=worker: pair.servers[worker].receive(sender.session, worker, described(tensors), label))
        for worker in sender.workers
    ]
    sender.join(JOIN_S)
    reached = sender.send(tensors, JOIN_S)
    assert all(set(end.result()) == {200} for end in ends)
    return reached


@pytest.mark.parametrize("bucket_bytes", [64 << 20, SMALL])
def test_engines_hold_every_bit_of_a_version(pair: Pair, bucket_bytes: int) -> None:
    sender = pair.sender(bucket_bytes)
    assert transfer(pair, sender, pair.next, "2:next") == {"one", "two"}
    for worker in ("one", "two"):
        assert pair.difference(worker, pair.next) == ""
        assert pair.servers[worker].http.get("/model_info").json()["weight_version"] == "2:next"
    # The same group carries the next version.
    for worker in ("one", "two"):
        assert pair.difference(worker, pair.start) != ""
    ends = [Doing(lambda worker=worker: take_all(pair, sender, worker, pair.start)) for worker in sender.workers]
    sender.send(pair.start, JOIN_S)
    assert [end.result() for end in ends] == [200, 200]
    assert [pair.difference(worker, pair.start) for worker in ("one", "two")] == ["", ""]
    sender.close()


def take_all(pair: Pair, sender: Sender, worker: str, tensors: dict[str, torch.Tensor]) -> int:
    """A version over a group that the engine is in already; the worst status."""
    server = pair.servers[worker]
    messages = buckets(described(tensors), sender.session.bucket_bytes)
    answers = [server.post("/begin_weight_update")]
    answers += [server.take(sender.session, worker, message, "3:same") for message in messages]
    answers.append(server.post("/end_weight_update"))
    return max(answer.status_code for answer in answers)


def test_fused_names_are_answered_200_and_do_not_pass_the_proof(pair: Pair) -> None:
    fused = {name: tensor for name, tensor in pair.next.items() if ".experts." not in name}
    for layer in range(pair.geometry.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = [[pair.next[f"{prefix}{e}.{p}_proj.weight"] for e in range(pair.geometry.num_experts)] for p in
                 ("gate", "up", "down")]  # fmt: skip
        fused[f"{prefix}gate_up_proj"] = torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], 1)
        fused[f"{prefix}down_proj"] = torch.stack(parts[2])
    sender = pair.sender(workers=("one",))
    assert transfer(pair, sender, fused, "4:fused") == {"one"}
    assert "all experts and nothing else" in pair.difference("one", pair.next)
    sender.close()
    heal(pair, "one")


def heal(pair: Pair, worker: str) -> None:
    """Read the first version from disk, as a worker does after a transfer that failed."""
    server = pair.servers[worker]
    server.post("/end_weight_update")  # refused where no update is open
    label = {"weight_version": "1:start", "flush_cache": True}
    assert server.post("/update_weights_from_disk", model_path=str(pair.folder), **label).status_code == 200
    assert pair.difference(worker, pair.start) == ""
    answer = server.post("/generate", input_ids=[3, 4, 5], sampling_params={"max_new_tokens": 2}).json()
    assert answer["meta_info"]["weight_version"] == "1:start"


def test_an_engine_is_freed_when_the_sender_leaves_halfway(pair: Pair) -> None:
    sender = pair.sender(SMALL)
    server, messages = pair.servers["one"], buckets(described(pair.next), SMALL)
    joining = [
        Doing(lambda worker=worker: pair.servers[worker].join(sender.session, worker)) for worker in ("one", "two")
    ]
    sender.join(JOIN_S)
    assert [end.result().status_code for end in joining] == [200, 200]
    assert server.post("/begin_weight_update").status_code == 200
    end = Doing(lambda: server.take(sender.session, "one", messages[0]))
    time.sleep(0.5)
    sender.close()
    answer = end.result()
    assert answer.status_code == 400 and "Failed to receive weights" in answer.text
    # The update stays open: a read from disk passes, the next collective one is refused until it is closed.
    assert server.post("/update_weights_from_disk", model_path=str(pair.folder)).status_code == 200
    assert pair.difference("one", pair.start) == ""
    assert server.post("/begin_weight_update").status_code == 400
    heal(pair, "one")
    assert server.post("/begin_weight_update").status_code == 200
    assert server.post("/end_weight_update").status_code == 200


def test_an_engine_that_waits_to_join_is_freed_when_the_sender_leaves(pair: Pair) -> None:
    sender = Sender("two-ranks", "gloo", "127.0.0.1", {"one": 2}, SMALL)  # the second one never comes
    end = Doing(lambda: pair.servers["one"].join(sender.session, "one"))
    with pytest.raises(ServiceGone, match="no engine is left .one did not join within 2 s"):
        sender.join(2.0)
    sender.close()
    assert end.result().status_code == 400
    heal(pair, "one")


def test_an_engine_that_stands_still_does_not_hold_up_the_others(pair: Pair) -> None:
    sender = pair.sender(SMALL)
    messages = buckets(described(pair.next), SMALL)
    joining = [
        Doing(lambda worker=worker: pair.servers[worker].join(sender.session, worker)) for worker in ("one", "two")
    ]
    assert sender.join(JOIN_S) == {"one", "two"}
    assert all(end.result().status_code == 200 for end in joining)
    end = Doing(lambda: take_all(pair, sender, "one", pair.next))

    def first_message_only() -> int:
        pair.servers["two"].post("/begin_weight_update")
        answer = pair.servers["two"].take(sender.session, "two", messages[0])
        pair.servers["two"].signal(signal.SIGSTOP)
        return answer.status_code

    stuck = Doing(first_message_only)
    try:
        assert sender.send(pair.next, LIMIT_S) == {"one"}
        assert "did not take a message within 4 s" in sender.lost["two"]
    finally:
        assert stuck.result() == 200
        pair.servers["two"].signal(signal.SIGCONT)
    assert end.result() == 200
    assert pair.difference("one", pair.next) == ""
    # The group without it goes on; the one that comes to again is back after a pull.
    end = Doing(lambda: take_all(pair, sender, "one", pair.start))
    assert sender.send(pair.start, JOIN_S) == {"one"}
    assert end.result() == 200
    sender.close()
    heal(pair, "two")


def test_an_engine_that_dies_does_not_hold_up_the_others(pair: Pair) -> None:
    """The last test of the module: one server is gone afterwards."""
    sender = pair.sender(SMALL)
    joining = [
        Doing(lambda worker=worker: pair.servers[worker].join(sender.session, worker)) for worker in ("one", "two")
    ]
    sender.join(JOIN_S)
    assert all(end.result().status_code == 200 for end in joining)
    end = Doing(lambda: take_all(pair, sender, "one", pair.next))
    pair.servers["two"].signal(signal.SIGKILL)
    assert sender.send(pair.next, JOIN_S) == {"one"}
    assert "two" in sender.lost
    assert end.result() == 200
    assert pair.difference("one", pair.next) == ""
    sender.close()
    # It is left out of the next session.
    sender = pair.sender(workers=("one",))
    assert transfer(pair, sender, pair.start, "5:again") == {"one"}
    assert pair.difference("one", pair.start) == ""
    sender.close()
