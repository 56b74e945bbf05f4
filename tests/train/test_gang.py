"""How the ranks of a node are started, meet, and are blamed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from components.storage.layout import RunLayout
from components.train.gang import Gang, listener, meeting_point
from components.train.ranks import Ranks
from configs.failure import BadConfig, ServiceGone
from configs.run import RunConfig

Make = Callable[..., RunConfig]
LIMIT_S = 60
NODES = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "0"}
SET_BY_GANG = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This is the first of two nodes."""
    for name, value in (NODES | dict.fromkeys(SET_BY_GANG, "")).items():
        monkeypatch.setenv(name, value)
    yield


def test_ranks_that_do_not_meet_are_one_sentence_and_leave_no_process(make_config: Make, nodes: None) -> None:
    """The second node never comes."""
    config = make_config(train={"ranks": 2}, kubernetes={"ready_s": 2.0})
    with pytest.raises(ServiceGone, match="rank 0 did not meet the other 1 ranks of training within 2 s"):
        Gang(config, RunLayout(config), [])
    assert not torch.distributed.is_initialized()


def test_a_rank_that_fails_before_they_meet_is_the_one_to_blame(make_config: Make, nodes: None) -> None:
    config = make_config(train={"ranks": 4}, kubernetes={"ready_s": 20.0})
    layout = RunLayout(config)
    given = ["--config", "/nowhere.json", "--redis", "", "--data", "", "--checkpoint", ""]
    gang = subprocess.run(
        [sys.executable, "-c", f"from tests.train.test_gang import open_gang; open_gang({config.to_json()!r}, {given!r})"],
        timeout=LIMIT_S, capture_output=True, text=True,
    )  # fmt: skip
    assert gang.returncode == 70
    assert (
        gang.stderr.strip().splitlines()[-1].startswith("rank 1 ended with exit code 70; its last words: FileNotFound")
    )
    assert "Traceback" not in gang.stderr and (layout.logs / "train-1.err").exists()


def open_gang(config: str, given: list[str]) -> None:
    from components.role import ended_by

    read = RunConfig.from_json(config, "")
    ended_by(lambda: Gang(read, RunLayout(read), given).let_go())


def test_a_signal_ends_ranks_that_are_meeting(make_config: Make, tmp_path: Path) -> None:
    """A node whose first rank never answers."""
    config = tmp_path / "config.json"
    config.write_text(make_config(train={"ranks": 2}).to_json())
    with listener(0) as silent:
        silent.settimeout(LIMIT_S)
        node = subprocess.Popen(
            [sys.executable, "-m", "components.train.follower", "--config", str(config), "--redis", "", "--data", "",
             "--checkpoint", ""],
            env={**os.environ, **NODES, "PET_NODE_RANK": "1", "PET_MASTER_PORT": str(silent.getsockname()[1])},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            connection, _ = silent.accept()
            node.send_signal(signal.SIGTERM)
            _, words = node.communicate(timeout=LIMIT_S)
            connection.close()
        finally:
            node.kill()
    assert node.returncode == 75
    assert words.strip().splitlines()[-1].startswith("training was told to leave before its ranks had met")


@pytest.mark.parametrize(
    ("ends", "blamed"),
    [
        (["exit 69", "sleep 2.5; exit 70"], 2),
        (["kill -9 $$", "exit 64"], 2),
        (["exit 70", "exit 65"], 2),
        (["exit 69", "kill -9 $$"], 2),
        (["exit 70", "exit 69"], 1),
        (["exit 0", "exit 1"], 2),
    ],
)
def test_the_rank_to_blame_is_the_one_the_others_died_of(make_config: Make, ends: list[str], blamed: int) -> None:
    config = make_config()
    gang = Gang(config, RunLayout(config), [])
    gang._logs.mkdir(parents=True)
    for rank, end in enumerate(ends, 1):
        gang._log(rank, "err").write_text("words\n")
        gang._children[rank] = subprocess.Popen(["bash", "-c", end])
    with pytest.raises(Exception, match=f"rank {blamed} .*its last words: words"):
        with gang:
            raise RuntimeError("gloo: connection closed")


def test_every_rank_has_a_gpu_of_its_own_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks.on_node(0, 4, 3, 4).device.type == "cpu"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert Ranks.on_node(0, 1, 0, 1).device == torch.device("cuda", 0)
    assert Ranks.on_node(3, 4, 1, 2).device == torch.device("cuda", 1)
    with pytest.raises(BadConfig, match="puts 3 ranks on this node, which has 2 GPUs"):
        Ranks.on_node(0, 6, 0, 3)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_are_reached_by_either_kind_of_address(make_config: Make, address: str) -> None:
    config = make_config(kubernetes={"ready_s": 20.0})
    first = meeting_point(address, 0, config, listens=True, everywhere=True)
    first.set("key", "value")
    assert meeting_point(address, first.port, config).get("key") == b"value"


def test_a_meeting_that_cannot_be_reached_is_one_sentence(make_config: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ServiceGone, match=rf"rank 0 of training was not reached at 127.0.0.1:{port} within 2 s"):
        meeting_point("127.0.0.1", port, make_config(kubernetes={"ready_s": 2.0}))
