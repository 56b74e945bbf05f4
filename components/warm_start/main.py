"""Builds a new policy and warms it up on the dataset's answers, so that reinforcement learning finds rewards to follow."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import torch

from components.stage_data.split import read_manifest, read_split
from components.step import Step, run_step
from components.tracking.run import Tracker, tracking_uri
from components.warm_start.supervised import Progress, warm_up
from components.warm_start.tokenizer import character_tokenizer
from components.weights.policy import new_policy, save_policy


def warm_start(step: Step) -> None:
    """Train the start policy and store it under `start/`."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config, data = step.config, step.parameters["data"]
    tokenizer = character_tokenizer(read_manifest(data, config.storage)["prompt_characters"])
    model = new_policy(config.model, tokenizer.get_vocab_size(), config.seed)
    train = read_split(data, "train", config.storage)
    held_out = read_split(data, "eval", config.storage)[: config.evaluate.rows]
    looks: list[Progress] = []
    step.layout.scratch.mkdir(parents=True, exist_ok=True)
    with open(step.layout.events, "a", buffering=1, encoding="utf-8") as events:

        def report(progress: Progress) -> None:
            looks.append(progress)
            event = {
                "time": time.time(),
                "run": config.name,
                "role": "warm_start",
                "event": "warm_start",
                "version": None,
            }
            events.write(
                json.dumps(event | progress._asdict() | {"target": config.warm_start.target_exact_match}) + "\n"
            )

        reached = warm_up(model, tokenizer, train, held_out, config, report)
    step.layout.save_events()
    with tempfile.TemporaryDirectory(dir=step.layout.scratch) as folder:
        save_policy(model, tokenizer, Path(folder) / "start")
        step.store.upload(Path(folder) / "start", "start")
    now = time.time()
    tracker = Tracker(tracking_uri(config), step.parameters["tracking_run"])
    tracker.log_metrics([("warm_start/exact_match", look.exact_match, look.step, now) for look in looks])
    step.finish(
        parameters={"checkpoint": f"{step.layout.uri}/start"},
        metrics={"exact_match": reached.exact_match, "steps": float(reached.step)},
    )


if __name__ == "__main__":
    run_step("warm_start", warm_start)
