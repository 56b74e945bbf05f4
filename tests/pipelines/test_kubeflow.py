"""The real kfp client against a double of Kubeflow's API (kubeflow_double.py); no Kubeflow is involved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.failure import BadConfig, ServiceGone
from configs.run import RunConfig
from pipelines.submission import prepare_schedule
from pipelines.targets import kubeflow
from pipelines.targets.kubeflow import KubeflowTarget
from tests.pipelines.command import tandem
from tests.pipelines.kubeflow_double import KubeflowDouble
from tests.pipelines.submitted import BUCKET, QUICKSTART, images_file, submission


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeflowDouble]:
    monkeypatch.setattr(kubeflow, "POLL_S", 0.01)
    double = KubeflowDouble()
    yield double
    double.stop()


@pytest.fixture
def target(double: KubeflowDouble) -> KubeflowTarget:
    return KubeflowTarget(double.host, "tandem")


def test_a_run_is_uploaded_once_and_started(target: KubeflowTarget, double: KubeflowDouble, tmp_path: Path) -> None:
    first = target.submit(submission(tmp_path))
    second = target.submit(submission(tmp_path, name="second"))
    assert (first.name, second.name) == ("first", "second")
    assert len(double.pipelines) == 1
    assert len(double.versions) == 2, "the first upload's, named after the pipeline, and ours"
    run = next(iter(double.runs.values()))
    assert run["runtime_config"]["pipeline_root"] == "s3://bucket/runs/artifacts"
    config = RunConfig.from_json(run["runtime_config"]["parameters"]["config"])
    assert config.loop.roles == "kubernetes"
    assert config.kubernetes.images is not None
    assert first.link == f"{double.host}/#/runs/details/{run['run_id']}"
    version = double.versions[run["pipeline_version_reference"]["pipeline_version_id"]]
    images = {one["container"]["image"] for one in version["pipeline_spec"]["deploymentSpec"]["executors"].values()}
    assert images <= {"localhost/tandem/control:1", "localhost/tandem/train:1"}


def test_a_changed_pipeline_is_a_new_version(target: KubeflowTarget, double: KubeflowDouble, tmp_path: Path) -> None:
    target.submit(submission(tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    made = submission(other, "kubernetes.pull_policy=Always", name="second")
    target.submit(made)
    assert len(double.versions) == 2
    changed = type(made)(made.config, made.images.model_copy(update={"control": "localhost/tandem/control:2"}))
    target._upload(changed)
    assert len(double.versions) == 3


def test_a_name_submitted_again_finds_its_execution(
    target: KubeflowTarget, double: KubeflowDouble, tmp_path: Path
) -> None:
    first = target.submit(submission(tmp_path))
    assert target.submit(submission(tmp_path)).link == first.link
    assert len(double.runs) == 1
    with pytest.raises(BadConfig, match=r"exists with another configuration \(train.steps 500, here 7\)"):
        target.submit(submission(tmp_path, "train.steps=7"))


def test_states_steps_and_failures(target: KubeflowTarget, double: KubeflowDouble, tmp_path: Path) -> None:
    target.submit(submission(tmp_path))
    run_id = next(iter(double.runs))
    double.set_state(run_id, "RUNNING", tasks={"preflight": "SUCCEEDED", "stage-data": "RUNNING"})
    state = target.status("first")
    assert (state.state, state.over) == ("running", False)
    assert [(step.name, step.state) for step in state.steps] == [("preflight", "succeeded"), ("stage-data", "running")]
    double.set_state(run_id, "FAILED", error="stage-data exited")
    failure = target.status("first").failure()
    assert failure is not None
    assert failure.sentence == "stage-data exited"


def test_a_canceled_run_is_over_and_can_be_retried(
    target: KubeflowTarget, double: KubeflowDouble, tmp_path: Path
) -> None:
    """kfp's own wait would go on until its time is over."""
    target.submit(submission(tmp_path))
    with pytest.raises(BadConfig, match="is still pending"):
        target.retry("first")
    state = target.cancel("first", now=False)
    assert (state.state, state.over) == ("canceled", True)
    assert target.cancel("first", now=False).state == "canceled"
    assert target.retry("first").state == "running"
    double.set_state(next(iter(double.runs)), "SUCCEEDED")
    with pytest.raises(BadConfig, match="nothing to retry"):
        target.retry("first")


def test_lists_go_over_all_pages(target: KubeflowTarget, double: KubeflowDouble, tmp_path: Path) -> None:
    for number in range(5):
        target.submit(submission(tmp_path, name=f"run-{number}"))
    assert [state.name for state in target.executions()] == [f"run-{number}" for number in (4, 3, 2, 1, 0)]


def test_a_schedule_names_each_run_anew(target: KubeflowTarget, double: KubeflowDouble, tmp_path: Path) -> None:
    plan = prepare_schedule(QUICKSTART, (BUCKET,), "weekly", images_file(tmp_path))
    made = target.schedule(plan, "0 3 * * 1", "")
    assert (made.name, made.cron, made.enabled) == ("weekly", "0 3 * * 1", True)
    recurring = next(iter(double.recurring.values()))
    assert recurring["trigger"]["cron_schedule"]["cron"] == "0 0 3 * * 1"
    assert recurring["no_catchup"] is True
    run = double.fire(recurring["recurring_run_id"])
    assert RunConfig.from_json(run["runtime_config"]["parameters"]["config"]).name == "weekly-20261207-030000"
    assert target.status("weekly-20261207-030000").schedule == recurring["recurring_run_id"]


def test_a_schedule_is_replaced_and_removed(target: KubeflowTarget, double: KubeflowDouble, tmp_path: Path) -> None:
    plan = prepare_schedule(QUICKSTART, (BUCKET,), "weekly", images_file(tmp_path))
    target.schedule(plan, "0 3 * * 1", "")
    target.schedule(plan, "0 4 * * 1", "UTC")
    assert [one.cron for one in target.schedules()] == ["0 4 * * 1"]
    with pytest.raises(BadConfig, match="CRON_SCHEDULE_TIMEZONE"):
        target.schedule(plan, "0 4 * * 1", "Europe/Berlin")
    with pytest.raises(BadConfig, match="no schedule 'daily'; known: weekly"):
        target.unschedule("daily")
    target.unschedule("weekly")
    assert target.schedules() == []


def test_profiles_get_their_namespace(tmp_path: Path) -> None:
    double = KubeflowDouble(multi_user=True)
    try:
        target = KubeflowTarget(double.host, "team-a")
        target.submit(submission(tmp_path))
        assert [state.name for state in target.executions()] == ["first"]
        assert next(iter(double.experiments.values()))["namespace"] == "team-a"
        assert target.schedules() == []
    finally:
        double.stop()


def test_mistakes_are_sentences(target: KubeflowTarget, double: KubeflowDouble, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="has no execution 'nothing'; the newest: none"):
        target.status("nothing")
    with pytest.raises(BadConfig, match="give the cluster behind Kubeflow by --context"):
        list(target.logs("first", "", follow=False))
    with pytest.raises(BadConfig, match="in one way only"):
        target.cancel("first", now=True)
    for status, kind, words in (
        (403, BadConfig, "does not allow"),
        (500, ServiceGone, "failed to"),
        (400, BadConfig, "refuses"),
    ):
        double.failing = status
        with pytest.raises(kind, match=f"{words}.*told to fail"):
            target.submit(submission(tmp_path))


def test_a_login_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    double = KubeflowDouble(login=True)
    try:
        with pytest.raises(BadConfig, match="wants a login"):
            KubeflowTarget(double.host, "tandem").executions()
        monkeypatch.setenv("KFP_TOKEN", "let-me-in")
        assert KubeflowTarget(double.host, "tandem").executions() == []
    finally:
        double.stop()


def test_another_server_is_no_kubeflow(double: KubeflowDouble) -> None:
    with pytest.raises(BadConfig, match="is no Kubeflow Pipelines API"):
        KubeflowTarget(f"{double.host}/elsewhere/", "tandem").executions()
    with pytest.raises(ServiceGone, match="port-forward"):
        KubeflowTarget("http://127.0.0.1:9", "tandem").executions()


def test_the_command_line_submits_and_tells(double: KubeflowDouble, tmp_path: Path) -> None:
    place = ("--target", "kubeflow", "--host", double.host)
    run = (
        "submit",
        str(QUICKSTART),
        "-s",
        BUCKET,
        "--images",
        str(images_file(tmp_path)),
        "--name",
        "mine",
        "--no-follow",
    )
    done = tandem(tmp_path, *run, *place)
    assert done.code == 0, done.err
    assert done.out.startswith("execution mine: pending")
    assert "the cluster behind Kubeflow was not looked at" in done.err
    assert "localhost/tandem/control:1 is in no registry" in done.err and "--push" in done.err
    loaded = tandem(tmp_path, *run, *place, "-s", "kubernetes.pull_policy=Never", "--name", "loaded")
    assert (loaded.code, "in no registry" in loaded.err) == (0, False), loaded.err
    double.set_state(next(iter(double.runs)), "FAILED", error="no room", tasks={"preflight": "FAILED"})
    told = tandem(tmp_path, "status", "mine", "--json", *place)
    assert told.code == 0
    assert json.loads(told.out)["steps"][0]["state"] == "failed"
    watched = tandem(tmp_path, "status", "mine", "--follow", *place)
    assert watched.code == 70
    assert watched.err == "tandem: no room\n"
    listed = tandem(tmp_path, "executions", *place)
    assert "mine" in listed.out and "failed" in listed.out
