"""`tandem run` from the first step to the last, on a task small enough for a test."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

from configs.run import RUNS
from tests.pipelines.command import TANDEM, environment, tandem

KEYS = {
    "exact_match_before", "exact_match_after", "verified_updates", "updates_per_hour", "rollout_tokens_per_s",
    "train_wait_fraction", "staleness_max", "wall_s", "cpu_s", "peak_rss_bytes", "groups_issued", "groups_durable",
    "groups_dropped", "report", "mlflow_run_id",
}  # fmt: skip
SMALL = [
    "-s", "warm_start.target_exact_match=0.02", "-s", "train.steps=24", "-s", "train.checkpoint_every=6",
    "-s", "train.batch_groups=8", "-s", "evaluate.rows=200", "-s", "loop.max_staleness=1", "--plain",
]  # fmt: skip


def test_stopped_resumed_and_audited(tmp_path: Path) -> None:
    """A user's whole way: run, Ctrl-C, resume, audit, report."""
    arguments = [*TANDEM, "run", str(RUNS / "quickstart.yaml"), *SMALL, "--name", "first"]
    process = subprocess.Popen(
        arguments, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run = tmp_path / "runs" / "first"
    end = time.monotonic() + 240
    while not ((run / "events.jsonl").exists() and '"event": "step"' in (run / "events.jsonl").read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the loop did not start"
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "tandem run --resume first" in err
    assert "Traceback" not in out + err
    assert json.loads((run / "steps" / "release.json").read_text())["status"] == "done"

    done = tandem(tmp_path, "run", "--resume", "first", "--plain", "--json", "out/run.json", limit_s=400)
    assert done.code == 0, done.err
    figures = json.loads((tmp_path / "out" / "run.json").read_text())
    assert figures.keys() >= KEYS
    assert figures["verified_updates"] == 24
    assert figures["groups_durable"] == 24 * 8
    assert figures["groups_issued"] == figures["groups_durable"] + figures["groups_dropped"]
    assert figures["staleness_max"] <= 1
    assert "stage_data: done" in done.out
    warm = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if '"warm_start"' in line]
    assert sum(event["step"] == 0 for event in warm) == 1, "the warm start was done again"
    assert Path(figures["report"]).read_text().startswith("<!doctype html>")

    audited = tandem(tmp_path, "audit", "first", "--json", "audit.json")
    assert audited.code == 0, audited.err
    assert json.loads((tmp_path / "audit.json").read_text())["balanced"] is True
    assert tandem(tmp_path, "report", "first").code == 0
