"""The loop with every role a real process, left alone, killed, stopped and resumed."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.experience.redis_server import RedisServer
from components.tracking.server import Server
from configs.run import RunConfig
from pipelines.execution import audit_run
from tests.rl_loop.loop_run import SMALL, LoopRun

MakeRun = Callable[..., LoopRun]


@pytest.fixture
def make_run(make_config: Callable[..., RunConfig], mlflow_server: Server, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    def make(**sections: Any) -> LoopRun:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.uri)
        merged: dict[str, Any] = {key: dict(value) for key, value in SMALL.items()}
        for section, content in sections.items():
            merged[section] = {**merged.get(section, {}), **content} if isinstance(content, dict) else content
        return LoopRun(make_config(**merged), mlflow_server.uri)

    return make


def check_accounts(run: LoopRun, steps: int) -> None:
    """The audit, from the run's own Redis file, balances; every update is durable."""
    config = run.config
    (run.layout.scratch / "run.json").write_text(config.to_json())
    result = audit_run(config.name, Path(config.storage.scratch))
    assert result.findings == []
    assert result.durable_updates == steps
    assert result.groups_durable == steps * config.train.batch_groups
    assert result.groups_in_flight == 0


def test_a_run_left_alone(make_run: MakeRun, mlflow_server: Server) -> None:
    run = make_run(train={"steps": 8, "checkpoint_every": 3})
    code, words = run.finish(run.start())
    assert (code, words) == (0, "")
    check_accounts(run, 8)
    output = json.loads((run.layout.scratch / "kfp" / "executor_output.json").read_text())
    assert output["parameterValues"]["policy"].endswith("checkpoints/step-000008")
    metrics = output["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    assert metrics["verified_updates"] == 8
    assert metrics["staleness_max"] <= 1
    assert (run.layout.scratch / "kfp" / "report").read_text().startswith("<!doctype html>")
    # No engine generated with a version before it was verified to hold it.
    proven: set[tuple[str, int]] = set()
    for event in sorted(run.events(), key=lambda event: event["time"]):
        if event["event"] == "verified":
            proven.add((event["worker"], event["version"]))
        elif event["event"] == "span" and event["kind"] == "generate":
            assert (event["role"], event["version"]) in proven
    assert [event["step"] for event in run.events("step")] == list(range(1, 9))
    # Trainer and sampler compute the same probabilities.
    assert all(event["metrics"].get("train/train_rollout_logprob_abs_diff", 0.0) < 1e-5 for event in run.events("step"))
    from mlflow import MlflowClient

    history = MlflowClient(mlflow_server.uri).get_metric_history(
        run.executor_input["inputs"]["parameterValues"]["tracking_run"], "rollout/raw_reward"
    )
    assert sorted(point.step for point in history) == list(range(1, 9))


def test_killed_workers_cost_nothing(make_run: MakeRun, s3_uri: str) -> None:
    """With everything durable on S3."""
    run = make_run(train={"steps": 60}, rollout={"workers": 2}, storage={"root": s3_uri})
    process = run.start()
    for count, worker in ((3, "rollout-0"), (12, "reward"), (20, "rollout-1"), (28, "broadcast")):
        run.wait_for_steps(count, process)
        run.role(worker).kill()
    code, words = run.finish(process)
    assert (code, words) == (0, "")
    assert sorted(event["restarted"] for event in run.events("restart")) == [
        "broadcast",
        "reward",
        "rollout-0",
        "rollout-1",
    ]
    check_accounts(run, 60)


def test_resume_is_lossless_to_the_bit(make_run: MakeRun) -> None:
    """Killed, stopped and resumed, a synchronous run ends with the very weights of one left alone."""
    settings: dict[str, Any] = {"train": {"steps": 30, "checkpoint_every": 8}, "loop": {"max_staleness": 0}}
    undisturbed = make_run(**settings)
    assert undisturbed.finish(undisturbed.start())[0] == 0

    run = make_run(**settings)
    process = run.start()
    run.wait_for_steps(2, process)
    run.role("train").kill()  # before the first checkpoint: it starts over, with the recorded batches
    run.wait_for_steps(12, process)
    process.send_signal(signal.SIGTERM)
    code, words = run.finish(process)
    assert code == 75
    assert f"tandem run --resume {run.config.name}" in words
    process = run.start()
    run.wait_for_steps(3, process)
    run.role("train").kill()
    code, words = run.finish(process)
    assert (code, words) == (0, "")
    assert [event["restarted"] for event in run.events("restart")] == ["train", "train"]
    check_accounts(run, 30)
    assert run.final_weights() == undisturbed.final_weights()


def test_a_killed_loop_leaves_no_process_behind_and_can_be_resumed(make_run: MakeRun) -> None:
    run = make_run(train={"steps": 8, "checkpoint_every": 2})
    process = run.start()
    run.wait_for_steps(3, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 5
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [child.cmdline() for child in alive] == []
    code, words = run.finish(run.start())
    assert (code, words) == (0, "")
    check_accounts(run, 8)


def test_roles_do_not_outlive_a_loop_that_is_killed_while_they_start(
    make_run: MakeRun, redis_server: RedisServer
) -> None:
    """With a Redis of its own life, nothing else would end them."""
    run = make_run(train={"steps": 500}, loop={"redis_url": redis_server.url})
    process = run.start()
    run.wait(lambda: (run.layout.scratch / "roles.json").exists(), process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [child.cmdline() for child in alive] == []


def test_a_killed_redis_is_named_at_once_and_the_run_can_be_resumed(make_run: MakeRun) -> None:
    run = make_run(train={"steps": 30})
    process = run.start()
    run.wait_for_steps(3, process)
    psutil.Process(int((run.layout.scratch / "redis_url").read_text().split()[1])).kill()
    code, words = run.finish(process)
    assert code == 69
    assert "redis" in words.lower()
    code, words = run.finish(run.start())
    assert (code, words) == (0, "")
    check_accounts(run, 30)


def test_a_verifier_that_fails_on_held_out_prompts_costs_no_worker(make_run: MakeRun) -> None:
    run = make_run(train={"steps": 6}, reward={"verifier": "tests.rl_loop.loop_run:moody"})
    code, words = run.finish(run.start())
    assert (code, words) == (0, "")
    assert run.events("restart") == []
    assert 0 < run.events("evaluation")[0]["exact_match"] < 1


def test_a_loop_that_stands_still_names_the_role(make_run: MakeRun) -> None:
    run = make_run(reward={"verifier": "tests.rl_loop.loop_run:stuck", "timeout_s": 600}, loop={"no_progress_s": 30})
    code, words = run.finish(run.start())
    assert code == 69
    # A loaded machine looks a little later.
    assert re.search(r"no progress for [34]\d s: reward stopped", words)
    assert "generated groups wait for it" in words


def test_a_users_mistake_in_a_role_is_told_at_once(make_run: MakeRun) -> None:
    run = make_run(reward={"verifier": "tests.rl_loop.loop_run:absent"})
    code, words = run.finish(run.start())
    assert code == 64
    assert words.startswith("rl_loop: reward: reward.verifier 'tests.rl_loop.loop_run:absent' cannot be imported")
    assert run.events("restart") == []


def test_a_role_that_keeps_dying_ends_the_run(make_run: MakeRun) -> None:
    run = make_run(train={"steps": 500}, loop={"max_restarts": 1})
    process = run.start()
    for _ in range(2):
        run.wait(lambda: _alive(run), process)
        run.role("broadcast").kill()
        time.sleep(1.5)
    code, words = run.finish(process)
    assert code == 70
    assert "broadcast was killed by SIGKILL once more after 1 restarts" in words


def _alive(run: LoopRun) -> bool:
    try:
        return run.role("broadcast").is_running()
    except (OSError, psutil.NoSuchProcess):
        return False
