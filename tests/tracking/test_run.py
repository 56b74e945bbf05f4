import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.tracking.client import open_client, tracking_uri
from components.tracking.run import RUN_TAG, Tracker, flattened, open_run
from components.tracking.server import Server
from configs.failure import BadConfig, ServiceGone
from configs.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]


def run_config(server: Server, name: str, **fields: object) -> RunConfig:
    return RunConfig.model_validate({"name": name, "tracking": {"uri": server.uri}, **fields})


def test_open_run_finds_the_run_of_the_same_name_and_place(mlflow_server: Server) -> None:
    config = run_config(mlflow_server, "twice")
    first = open_run(config, {"git.commit": "abc"})
    assert open_run(config) == first
    tracker = Tracker(mlflow_server.uri, first)
    tracker.end("FAILED")
    assert open_run(config) == first
    run = tracker.client.get_run(first)
    assert run.info.status == "RUNNING"
    assert run.data.tags[RUN_TAG] == "twice" and run.data.tags["git.commit"] == "abc"
    tracker.end()
    assert open_run(config) == first, "a finished run that is resumed stays one run"
    elsewhere = config.model_copy(update={"storage": config.storage.model_copy(update={"root": "elsewhere"})})
    assert open_run(elsewhere) != first


def test_open_run_adopts_the_run_it_was_given_and_neither_pops_nor_ends_it(
    mlflow_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = open_run(run_config(mlflow_server, "parent"))
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    assert open_run(run_config(mlflow_server, "child")) == given
    assert os.environ["MLFLOW_RUN_ID"] == given
    assert open_client(mlflow_server.uri).get_run(given).info.status == "RUNNING"


def test_open_run_names_a_run_id_the_server_does_not_know(
    mlflow_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with pytest.raises(BadConfig, match="MLFLOW_RUN_ID 0{32} is no run"):
        open_run(run_config(mlflow_server, "lost"))


def test_no_tracking_server_is_a_mistake_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(BadConfig, match="tracking.uri is empty"):
        tracking_uri(RunConfig())


def test_changed_parameters_of_a_resumed_run_become_tags(mlflow_server: Server) -> None:
    config = run_config(mlflow_server, "params", train={"steps": 10})
    tracker = Tracker(mlflow_server.uri, open_run(config))
    tracker.log_config(config)
    tracker.log_config(run_config(mlflow_server, "params", train={"steps": 20}))
    data = tracker.client.get_run(tracker.run_id).data
    assert len(data.params) == len(flattened(config.model_dump(mode="json")))
    assert data.params["train.steps"] == "10"
    changed = {key: value for key, value in data.tags.items() if key.startswith("config.changed.")}
    assert changed == {"config.changed.train.steps": "20"}


def test_more_metrics_than_one_call_takes(mlflow_server: Server) -> None:
    tracker = Tracker(mlflow_server.uri, open_run(run_config(mlflow_server, "chunks")))
    now = time.time()
    tracker.log_metrics([("train/loss", 1 / (step + 1), step, now) for step in range(1001)])
    history = tracker.client.get_metric_history(tracker.run_id, "train/loss")
    assert sorted(point.step for point in history) == list(range(1001))


def test_two_processes_log_to_one_run_which_stays_open(mlflow_server: Server) -> None:
    run_id = open_run(run_config(mlflow_server, "shared"))
    program = (
        "import sys, time; from components.tracking.run import Tracker;"
        "Tracker(sys.argv[1], sys.argv[2]).log_metrics([(sys.argv[3], 1.0, 1, time.time())])"
    )
    command = [sys.executable, "-c", program, mlflow_server.uri, run_id]
    subprocess.run([*command, "perf/tokens"], check=True, cwd=ROOT)
    tracker = Tracker(mlflow_server.uri, run_id)
    tracker.log_metrics([("train/loss", 2.0, 1, time.time())])
    run = tracker.client.get_run(run_id)
    assert run.data.metrics == {"perf/tokens": 1.0, "train/loss": 2.0}
    assert run.info.status == "RUNNING"


def test_samples_are_capped_over_all_calls(mlflow_server: Server, tmp_path: Path) -> None:
    tracker = Tracker(mlflow_server.uri, open_run(run_config(mlflow_server, "samples")))
    rows = [{"prompt": f"{n}+1=", "completion": "2"} for n in range(4)]
    assert [tracker.log_samples(rows, cap=6) for _ in range(3)] == [4, 2, 0]
    local = tracker.client.download_artifacts(tracker.run_id, "samples.json", str(tmp_path))
    assert Path(local).read_text().count("+1=") == 6


def test_artifacts_travel_through_the_server(mlflow_server: Server, tmp_path: Path) -> None:
    tracker = Tracker(mlflow_server.uri, open_run(run_config(mlflow_server, "artifacts")))
    (tmp_path / "report.html").write_text("<p>done</p>")
    tracker.log_file(tmp_path / "report.html", "report")
    tracker.log_text("notes/one.txt", "first")
    paths = {item.path for item in tracker.client.list_artifacts(tracker.run_id, "report")}
    assert paths == {"report/report.html"}
    assert (mlflow_server.log.parent / "artifacts").is_dir()


def test_a_dead_server_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    config = RunConfig.model_validate({"tracking": {"uri": "http://127.0.0.1:9"}})
    with pytest.raises(ServiceGone, match=r"http://127.0.0.1:9 does not answer; check that it runs"):
        open_run(config)
    with pytest.raises(ServiceGone):
        Tracker(config.tracking.uri, "0" * 32).log_metrics([("train/loss", 1.0, 1, 0.0)])


def test_importing_the_tracker_does_not_import_mlflow() -> None:
    program = "import sys, components.tracking.run; sys.exit('mlflow' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
