"""The loop with a policy that several processes train, on one node and on two."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from configs.run import RunConfig
from pipelines.execution import audit_run
from tests.rl_loop.loop_run import LIMIT_S, LoopRun
from tests.rl_loop.test_loop import MakeRun, check_accounts, make_run  # noqa: F401


def test_killed_ranks_cost_nothing(make_run: MakeRun) -> None:  # noqa: F811
    """Any of them: training restarts as a whole, from its last checkpoint."""
    run = make_run(train={"steps": 12, "checkpoint_every": 4, "ranks": 2, "expert_parallel": 2})
    process = run.start()
    run.wait(lambda: bool(followers(run)), process)
    leader, (orphan,) = run.role("train"), followers(run)
    leader.kill()
    psutil.wait_procs([orphan], timeout=20)
    assert not orphan.is_running()
    run.wait_for_steps(5, process)
    followers(run)[0].kill()
    code, words = run.finish(process)
    assert (code, words) == (0, "")
    by_leader, by_follower = run.events("restart")
    assert "train was killed by SIGKILL" in by_leader["sentence"]
    assert "rank 1 was killed by SIGKILL" in by_follower["sentence"]
    check_accounts(run, 12)
    figures = run.events("step")[-1]["metrics"]
    assert figures["train/moe/max_load"] >= 1 >= figures["train/moe/min_load"]
    assert run.events("dispatch")[0]["reason"].startswith("all_to_all")


def test_a_node_that_is_told_to_leave_has_training_hand_back_its_work(
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Two nodes of one rank, which share nothing but the store, as pods do."""
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "0")
    monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("PET_MASTER_PORT", str(free_port()))
    run = make_run(train={"steps": 500, "checkpoint_every": 100, "ranks": 2, "expert_parallel": 2})
    process = run.start()
    run.wait(lambda: (run.layout.scratch / "roles.json").exists(), process)
    with second_node(run, tmp_path) as node:
        run.wait_for_steps(2, process)
        node.send_signal(signal.SIGTERM)
        assert node.wait(LIMIT_S) == 75
    run.wait(lambda: bool(run.events("restart")), process)
    assert run.events("restart")[0]["exit_code"] == 75
    process.send_signal(signal.SIGTERM)
    assert run.finish(process)[0] == 75
    step = run.events("checkpoint")[-1]["version"]
    assert step == run.events("step")[-1]["step"]
    assert len(run.layout.store.list(f"checkpoints/step-{step:06d}/trainer/optimizer")) == 2
    (run.layout.scratch / "run.json").write_text(run.config.to_json())
    result = audit_run(run.config.name, Path(run.config.storage.scratch))
    assert result.findings == []
    assert result.groups_durable == step * run.config.train.batch_groups


def followers(run: LoopRun) -> list[psutil.Process]:
    """The living ranks besides the first."""
    try:
        return run.role("train").children()
    except (OSError, psutil.NoSuchProcess):
        return []


@contextmanager
def second_node(run: LoopRun, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of another node, which sees the run's store and a scratch folder of its own."""
    storage = run.config.storage.model_copy(update={"scratch": str(folder / "second")})
    config = folder / "second.json"
    config.write_text(RunConfig.model_validate({**run.config.model_dump(), "storage": storage}).to_json())
    given = run.executor_input["inputs"]["parameterValues"]
    node = subprocess.Popen(
        [sys.executable, "-m", "components.train.main", "--config", str(config), "--redis", "", "--worker", "train",
         "--data", given["data"], "--checkpoint", given["checkpoint"]],
        env={**os.environ, "PET_NODE_RANK": "1"},
    )  # fmt: skip
    try:
        yield node
    finally:
        node.kill()
        node.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
