"""The loop on real SGLang servers: engines join, leave and die while it runs, and every group is counted once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.role import PARENT, Inputs
from components.tracking.server import Server
from configs.run import RunConfig
from pipelines.execution import audit_run
from tests.rl_loop.loop_run import SMALL, LoopRun

LIMIT_S = 400.0


@pytest.fixture
def make_run(
    make_config: Callable[..., RunConfig], mlflow_server: Server, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LoopRun]:
    def make(**sections: Any) -> LoopRun:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.uri)
        monkeypatch.setattr("tests.rl_loop.loop_run.LIMIT_S", LIMIT_S)
        merged: dict[str, Any] = {key: dict(value) for key, value in SMALL.items()}
        merged["rollout"] |= {"engine": "sglang", "max_new_tokens": 16}
        for section, content in sections.items():
            merged[section] = {**merged.get(section, {}), **content} if isinstance(content, dict) else content
        return LoopRun(make_config(**merged), mlflow_server.uri)

    return make


class Fleet:
    """A loop, and engines that somebody adds to it."""

    def __init__(self, run: LoopRun) -> None:
        self.run = run
        self.loop = run.start()
        self._children: list[subprocess.Popen[bytes]] = []

    def inputs(self) -> Inputs:
        given = self.run.executor_input["inputs"]["parameterValues"]
        url = (self.run.layout.scratch / "redis_url").read_text().split()[0]
        return Inputs(url, given["data"], given["checkpoint"])

    def add(self, worker: str) -> subprocess.Popen[bytes]:
        """Start one more rollout worker."""
        import os

        child = subprocess.Popen(
            [sys.executable, "-m", "components.rollout.main", "--config", str(self.run.layout.scratch / "config.json"),
             "--worker", worker, *self.inputs().arguments()],
            env={**os.environ, PARENT: str(os.getpid())}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._children.append(child)
        return child

    def wait(self, condition: Callable[[], bool]) -> None:
        self.run.wait(condition, self.loop)

    def generated(self, worker: str, after: float = 0.0) -> bool:
        """Whether a worker handed in groups since a time."""
        spans = self.run.events("span")
        return any(e["role"] == worker and e["kind"] == "generate" and e["start"] > after for e in spans)

    def scheduler(self, worker: str) -> psutil.Process:
        """The server process that computes for a worker."""
        process = self.run.role(worker)
        return next(one for one in process.children(recursive=True) if "scheduler" in " ".join(one.cmdline()))

    def close(self) -> None:
        for process in (*self._children, self.loop):
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def make_fleet(make_run: Callable[..., LoopRun]) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(**sections: Any) -> Fleet:
        made.append(Fleet(make_run(**sections)))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


def stop(fleet: Fleet) -> None:
    """Have the loop leave, and see that every group is accounted for."""
    fleet.loop.send_signal(signal.SIGTERM)
    code, words = fleet.run.finish(fleet.loop)
    assert code == 75, words
    config = fleet.run.config
    (fleet.run.layout.scratch / "run.json").write_text(config.to_json())
    result = audit_run(config.name, Path(config.storage.scratch))
    assert result.findings == []
    assert result.groups_durable == result.durable_updates * config.train.batch_groups > 0


def test_engines_join_leave_and_die_while_the_loop_runs(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(
        train={"steps": 100_000, "checkpoint_every": 50},
        loop={"no_progress_s": 240},
        weights={"transfer": "collective", "transfer_timeout_s": 10, "deltas": 4},
    )
    run = fleet.run
    run.wait_for_steps(3, fleet.loop)
    assert not any(event["engines"] > 1 for event in run.events("span") if event["kind"] == "transfer")

    joiner = fleet.add("rollout-1")
    fleet.wait(lambda: fleet.generated("rollout-1"))
    loads = [event for event in run.events("span") if event["role"] == "rollout-1" and event["kind"] == "load"]
    assert loads[0]["transfer"] == "pull", "a joiner reads from the store"
    proofs = [event for event in run.events("verified") if event["worker"] == "rollout-1"]
    first = min(e["start"] for e in run.events("span") if e["role"] == "rollout-1" and e["kind"] == "generate")
    assert proofs and proofs[0]["time"] <= first, "it worked before it had proven its version"
    fleet.wait(lambda: any(e["engines"] == 2 for e in run.events("span") if e["kind"] == "transfer"))

    joiner.send_signal(signal.SIGTERM)
    _, errors = joiner.communicate(timeout=60)
    assert joiner.returncode == 75, errors.decode()
    assert "was told to leave; its work was handed back" in errors.decode().splitlines()[-1]

    killed = time.time()
    fleet.scheduler("rollout-0").kill()
    fleet.wait(lambda: bool(run.events("engine_broken")))
    fleet.wait(lambda: fleet.generated("rollout-0", after=killed + 1))
    again = [event for event in run.events("verified") if event["worker"] == "rollout-0" and event["time"] > killed]
    assert again, "a server that was started anew served without a proof"
    assert not run.events("restart"), "its worker mended it"
    stop(fleet)


def test_a_whole_run(make_run: Callable[..., LoopRun]) -> None:
    run = make_run(train={"steps": 6, "checkpoint_every": 3}, rollout={"update": "abort"})
    code, words = run.finish(run.start())
    assert (code, words) == (0, "")
    (run.layout.scratch / "run.json").write_text(run.config.to_json())
    assert audit_run(run.config.name, Path(run.config.storage.scratch)).findings == []
    gaps = [event["metrics"].get("train/train_rollout_logprob_abs_diff", 0.0) for event in run.events("step")]
    assert 0 < max(gaps) < 1e-5, "trainer and engine compute different log-probabilities"
    assert len(run.events("evaluation")) >= 2
