"""A small loop with every real part, started as KFP starts the step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from components.reward.verifiers import Completion
from components.stage_data.rows import SourceRow
from components.stage_data.split import MANIFEST, split_rows, write_splits
from components.stage_data.tasks import task_rows
from components.storage.layout import RunLayout
from components.tracking.run import open_run
from components.train.catalogue import TrainerState, latest_checkpoint
from components.warm_start.tokenizer import character_tokenizer
from components.weights.policy import new_policy, save_policy
from configs.run import RunConfig

SMALL = {
    "model": {"hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 32, "context_length": 32},
    "rollout": {"group_size": 4, "groups_per_call": 4, "max_new_tokens": 4, "lease_s": 20},
    "reward": {"verifier": "tests.rl_loop.loop_run:even"},
    "evaluate": {"rows": 16, "every": 4},
}
LIMIT_S = 180.0


def even(completions: list[Completion], answer: str) -> list[float]:
    """Something a fresh policy is rewarded for now and then."""
    return [float(c.text[:1] in ("0", "2", "4", "6", "8")) for c in completions]


def moody(completions: list[Completion], answer: str) -> list[float]:
    """Fails on every other single completion, which is what an evaluation asks about."""
    if len(completions) == 1 and int(answer) % 2:
        raise ValueError("cannot judge this")
    return [float(number % 2 == 0) for number, _ in enumerate(completions)]


def stuck(completions: list[Completion], answer: str) -> list[float]:
    """Never answers for a group; does for a single completion, which is what an evaluation asks about."""
    if len(completions) > 1:
        time.sleep(3600)
    return [0.0]


class LoopRun:
    """One run's loop, started as often as the test asks."""

    def __init__(self, config: RunConfig, tracking_uri: str) -> None:
        self.config = config
        self.layout = RunLayout(config)
        os.environ["MLFLOW_TRACKING_URI"] = tracking_uri
        rows = [SourceRow(row, f"row {number}") for number, row in enumerate(task_rows("add2r", 300, 0), 1)]
        store = self.layout.store.child("data")
        write_splits(store, split_rows(rows, 0.1, "test"), "test")
        tokenizer = character_tokenizer("0123456789+=")
        start = Path(config.storage.scratch) / f"{config.name}-start"
        save_policy(new_policy(config.model, tokenizer.get_vocab_size(), config.seed), tokenizer, start)
        parameters = {"data": f"{store.uri}/{MANIFEST}", "checkpoint": start.as_uri(), "tracking_run": open_run(config)}
        folder = self.layout.scratch / "kfp"
        self.executor_input = {
            "inputs": {"parameterValues": {"config": config.to_json(), **parameters}},
            "outputs": {
                "parameters": {"policy": {"outputFile": str(folder / "policy")}},
                "artifacts": {n: {"artifacts": [{"name": n, "uri": str(folder / n)}]} for n in ("metrics", "report")},
                "outputFile": str(folder / "executor_output.json"),
            },
        }

    def start(self) -> subprocess.Popen[str]:
        """Start the step."""
        self._before = len(self.events())
        return subprocess.Popen(
            [sys.executable, "-m", "components.rl_loop.main", json.dumps(self.executor_input)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for the step; its exit code and the last line it wrote to standard error."""
        _, errors = process.communicate(timeout=LIMIT_S)
        lines = [line for line in errors.splitlines() if line.strip()]
        return process.returncode, lines[-1] if lines else ""

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Events so far, of one kind or all."""
        if not self.layout.events.exists():
            return []
        found = []
        for line in self.layout.events.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # the line being written
        return [event for event in found if not kind or event["event"] == kind]

    def wait_for_steps(self, count: int, process: subprocess.Popen[str]) -> None:
        """Wait until training has made `count` updates since the last `start`."""
        self.wait(lambda: sum(e["event"] == "step" for e in self.events()[self._before :]) >= count, process)

    def wait(self, condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        """Wait for something to become true while the step runs."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert process.poll() is None, f"the loop ended early: {process.communicate()[1]}"
            assert time.monotonic() < end, "the loop did not get there"
            time.sleep(0.02)

    def role(self, worker: str) -> psutil.Process:
        """The living process of a role."""
        rows = json.loads((self.layout.scratch / "roles.json").read_text())
        return psutil.Process(next(row["pid"] for row in rows if row["role"] == worker))

    def final_weights(self) -> str:
        """Digest of the newest durable policy."""
        name = latest_checkpoint(self.layout)
        state = json.loads(self.layout.store.read(f"checkpoints/{name}/trainer/state.json"))
        return TrainerState(**state).weights
