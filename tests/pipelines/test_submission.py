"""What is sent to a cluster, and how its answers are read; no cluster is needed for either."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from components.cluster.api import Access, Cluster
from configs.failure import BadConfig, BadData, Failure
from configs.run import RunConfig
from pipelines.pods import last_line, trouble
from pipelines.submission import differences, find_images, prepare_schedule, retry_name, same_or_refuse
from pipelines.targets.argo.nodes import execution_state
from tests.pipelines.command import tandem
from tests.pipelines.submitted import BUCKET, QUICKSTART, images_file, submission


def test_a_run_is_made_fit_for_pods(tmp_path: Path) -> None:
    made = submission(tmp_path, "train.steps=50")
    assert made.config.loop.roles == "kubernetes"
    assert made.config.storage.scratch == "/scratch"
    assert made.config.storage.root == "s3://bucket/runs"
    assert made.config.kubernetes.images == made.images
    assert made.config.train.steps == 50
    assert made.pipeline_root == "s3://bucket/runs/artifacts"
    assert RunConfig.from_json(made.arguments()["config"]) == made.config


def test_equal_submissions_have_equal_digests(tmp_path: Path) -> None:
    assert submission(tmp_path).digest == submission(tmp_path).digest
    assert submission(tmp_path).digest != submission(tmp_path, "seed=1").digest


def test_a_schedule_leaves_the_runs_name_open(tmp_path: Path) -> None:
    plan = prepare_schedule(QUICKSTART, (BUCKET,), None, images_file(tmp_path))
    assert plan.name == "quickstart"
    assert json.loads(plan.arguments("{{workflow.name}}")["config"])["name"] == "{{workflow.name}}"
    with pytest.raises(BadConfig, match="at most 24"):
        prepare_schedule(QUICKSTART, (BUCKET,), "a" * 25, images_file(tmp_path))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.uri=/data/x.jsonl", "data.uri is /data/x.jsonl, a place on this machine"),
        ("model.checkpoint=file:///x", "model.checkpoint is file:///x"),
        (
            "tracking.uri=http://localhost:5000",
            "tracking.uri is http://localhost:5000, which in a pod means the pod itself",
        ),
        ("loop.redis_url=redis://127.0.0.1:6379/0", "loop.redis_url"),
        ("storage.endpoint_url=http://127.0.0.1:9000", "storage.endpoint_url"),
        ("storage.root=/shared/runs", "share no disk"),
        ("storage.root=file:///shared/runs", "share no disk"),
        ("storage.root=s3://", "names no bucket"),
        ("storage.root=s3:///x", "storage.root is 's3:///x', which names no bucket"),
        ("storage.root=s3://UPPER_bucket!!/x", "no bucket is called 'UPPER_bucket!!'"),
        ("storage.root=s3://ab/x", "no bucket is called 'ab'"),
        ("storage.root=s3://a..b/x", "no bucket is called 'a..b'"),
        ("data.uri=s3:///x.jsonl", "data.uri is 's3:///x.jsonl', which names no bucket"),
        ("model.checkpoint=s3://-x-/y", "model.checkpoint is 's3://-x-/y', but no bucket"),
    ],
)
def test_places_that_pods_cannot_reach_are_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        submission(tmp_path, override)


def test_images_come_from_the_file_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig()
    with pytest.raises(BadConfig, match="build them with `make images`"):
        find_images(config, None)
    with pytest.raises(BadConfig, match="no such file"):
        find_images(config, Path("absent.json"))
    for content, words in (
        ("[]", "no list of images"),
        ("{", "no list of images"),
        ('{"control": "x"}', "'train' is missing"),
    ):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(BadConfig, match=words):
            find_images(config, Path("bad.json"))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "built.json").write_text(images_file(tmp_path).read_text())
    assert find_images(config, None).control == "localhost/tandem/control:1"


def test_differing_fields_are_named() -> None:
    one, other = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3}, "d": [2]}
    assert differences(json.dumps(one), json.dumps(other)) == ["a.c 2, here 3", "d [1], here [2]"]
    assert differences("", "{}") == []


def test_retries_are_numbered() -> None:
    assert retry_name("x", ["x"]) == "x-r1"
    assert retry_name("x", ["x", "x-r1", "x-r10", "x-rest"]) == "x-r11"


# ---- what the cluster answers


def workflow(phase: str, nodes: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "first-r1",
            "creationTimestamp": "2026-11-30T10:00:00Z",
            "labels": {"tandem.run": "first"},
            "annotations": {"tandem.run/config": "abc"},
        },
        "spec": {"arguments": {"parameters": [{"name": "config", "value": '{"name": "first"}'}]}, **spec},
        "status": {"phase": phase, "startedAt": "2026-11-30T10:00:01Z", "nodes": {node["id"]: node for node in nodes}},
    }


def node(
    name: str, phase: str, ended: str = "", code: str = "", message: str = "", kind: str = "Pod"
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": f"first-{name}", "displayName": name, "type": kind, "phase": phase, "startedAt": "2026-11-30T10:00:02Z",
        "finishedAt": ended or None, "message": message,
    }  # fmt: skip
    return made | ({"outputs": {"exitCode": code}} if code else {})


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": f"pod-{name}", "annotations": {"workflows.argoproj.io/node-id": f"first-{name}"}},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"memory": "64Mi"}}}]},
        "status": status,
    }


def container(**state: Any) -> dict[str, Any]:
    return {"name": "main", "image": "localhost/x:1", "state": state}


def test_a_failed_step_tells_its_own_sentence_and_code() -> None:
    nodes = [
        node("root", "Failed", "2026-11-30T10:00:09Z", kind="DAG"),
        node("stage-data(0)", "Failed", "2026-11-30T10:00:05Z", "65", "Error (exit code 65)"),
        node("stage-data(1)", "Failed", "2026-11-30T10:00:08Z", "65", "Error (exit code 65)"),
        node("release", "Succeeded", "2026-11-30T10:00:09Z"),
    ]
    nodes[2]["startedAt"] = "2026-11-30T10:00:06Z"
    asked = []

    def words(name: str, prefix: str) -> str:
        asked.append((name, prefix))
        return "stage_data: the file has no rows; give one that has"

    state = execution_state(workflow("Failed", nodes), [pod("stage-data(1)")], words)
    assert (state.name, state.run, state.state, state.digest) == ("first-r1", "first", "failed", "abc")
    assert asked == [("pod-stage-data(1)", "stage_data: ")]
    failure = state.failure()
    assert isinstance(failure, BadData)
    assert failure.sentence == "stage_data: the file has no rows; give one that has"
    assert [step.name for step in state.steps] == ["release", "stage-data(0)", "stage-data(1)"]


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (
            {"containerStatuses": [container(terminated={"reason": "OOMKilled"})]},
            "OOMKilled (exit code 137)",
            "its limit of 64Mi",
        ),
        ({"reason": "Evicted", "message": "the node was low on memory"}, "", "removed from its node .the node was low"),
        ({}, "pod deleted", "preflight: pod deleted"),
    ],
    ids=["memory", "evicted", "deleted"],
)
def test_a_step_that_could_not_speak_is_spoken_for(status: dict[str, Any], message: str, words: str) -> None:
    failed = node("preflight", "Error", "2026-11-30T10:00:05Z", message=message)
    state = execution_state(workflow("Failed", [failed]), [pod("preflight", **status)], lambda name, prefix: "")
    failure = state.failure()
    assert type(failure) is Failure
    import re

    assert re.search(words, failure.sentence), failure.sentence


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"containerStatuses": [container(waiting={"reason": reason, "message": message})]}


def unscheduled(reason: str, message: str = "") -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]}


@pytest.mark.parametrize(
    ("status", "words", "lasting"),
    [
        (
            waiting("ImagePullBackOff", "not found"),
            "image localhost/x:1 cannot be pulled (ImagePullBackOff: not found)",
            True,
        ),
        (waiting("CreateContainerConfigError", "no secret x"), "cannot start (no secret x)", True),
        (
            unscheduled("Unschedulable", "0/1 nodes: Insufficient cpu"),
            "finds no node: 0/1 nodes: Insufficient cpu",
            False,
        ),
        (unscheduled("SchedulingGated"), "waits for a queue to admit it", False),
    ],
    ids=["image", "secret", "nodes", "queue"],
)
def test_a_pod_that_does_not_start_says_why(status: dict[str, Any], words: str, lasting: bool) -> None:
    found = trouble(pod("x", **status))
    assert found is not None
    assert (found.sentence, found.lasting) == (words, lasting)
    state = execution_state(workflow("Running", [node("x", "Pending")]), [pod("x", **status)])
    assert (state.steps[0].state, state.steps[0].words, state.steps[0].lasting) == ("pending", words, lasting)


def test_a_pod_that_runs_has_no_trouble() -> None:
    assert trouble(pod("x", phase="Running", containerStatuses=[container(running={})])) is None
    assert trouble({"metadata": {"name": "new"}}) is None


def test_a_stopped_workflow_is_canceled_and_a_new_one_pending() -> None:
    assert execution_state(workflow("Failed", [], shutdown="Stop")).state == "canceled"
    fresh = workflow("Running", [])
    del fresh["status"]
    assert execution_state(fresh, []).state == "pending"


def test_nodes_that_argo_left_standing_are_told_by_their_pods() -> None:
    handler = node("exit-handler-1.onExit", "Running") | {"templateName": "comp-release"}
    nodes = [handler, node("rl-loop(0)", "Running")]
    stopped = execution_state(
        workflow("Failed", nodes, shutdown="Stop"), [pod("exit-handler-1.onExit", phase="Succeeded")]
    )
    assert {step.name: step.state for step in stopped.steps} == {"release": "succeeded", "rl-loop(0)": "canceled"}


def test_packed_nodes_are_unpacked() -> None:
    packed = workflow("Running", [])
    nodes = {"a": node("preflight", "Running")}
    packed["status"] = {
        "phase": "Running",
        "compressedNodes": base64.b64encode(gzip.compress(json.dumps(nodes).encode())).decode(),
    }
    assert [step.name for step in execution_state(packed, []).steps] == ["preflight"]


def test_the_last_line_is_the_steps_own() -> None:
    log = "2026Z preflight: no bucket\n2026Z \n2026Z launcher: ended with 64\n"
    assert last_line(log, "preflight: ") == "preflight: no bucket"
    assert last_line(log) == "launcher: ended with 64"
    assert last_line("") == ""
    argo = '2026Z time=2026-11-30T11:56:09Z level=INFO msg="sub-process exited" error="exit status 143" argo=true\n'
    assert last_line(f"2026Z my own words\n{argo}2026Z Error: exit status 143\n") == "my own words"


def test_a_name_is_the_same_run_only_with_the_same_configuration(tmp_path: Path) -> None:
    made = submission(tmp_path)
    from dataclasses import replace

    found = replace(execution_state(workflow("Running", [])), digest=made.digest)
    same_or_refuse(made, found)
    with pytest.raises(BadConfig, match="choose another --name"):
        same_or_refuse(made, replace(found, digest="other"))


# ---- the command line without a cluster


def test_mistakes_at_the_door(tmp_path: Path) -> None:
    run = (str(QUICKSTART), "-s", BUCKET, "--images", str(images_file(tmp_path)))
    (tmp_path / "config").write_text("apiVersion: v1\nkind: Config\nclusters: []\ncontexts: []\nusers: []\n")
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("submit", str(QUICKSTART)), 64, "share no disk"),
        (("submit", *run, "--context", "x", "--kubeconfig", "config"), 64, "is not in the kubeconfig"),
        (("submit", *run, "--kubeconfig", "absent"), 64, "names no cluster"),
        (("submit", *run, "--target", "kubeflow"), 64, "give --host"),
        (("submit", *run, "--host", "http://x"), 64, "--target kubeflow"),
        (("submit", *run, "--target", "volcano"), 64, "volcano"),
        (("schedule", *run, "--cron", "every day"), 64, "not five"),
        (("install", "--render"), 64, "make images"),
        (("install", "--render", "--no-mlflow", "-n", "kube-system"), 64, "belongs to Kubernetes"),
        (("install", "--render", "--no-mlflow", "-n", "kubeflow"), 64, "add --kubeflow"),
        (("diff", "a.yaml", "b.yaml"), 64, "a.yaml"),
        *(((command, name), 64, f"'{name}' is no name") for command in ("status", "logs", "cancel", "retry", "unschedule")
          for name in ("", "a b", "a/b", "../x")),
        *((("status", name), 64, "is no name") for name in ("A", "x-", "a,b=c", "é", "a\n", "x" * 64)),
        *(((*command, "-n", name), 64, f"'{name}' is no namespace") for name in ("", "a/b", "x?y", "Tandem")
          for command in (("executions",), ("install", "--render", "--no-mlflow"))),
    ]  # fmt: skip
    for arguments, code, words in cases:
        done = tandem(tmp_path, *arguments, KUBECONFIG=str(tmp_path / "none"))
        assert (done.code, words in done.err) == (code, True), f"{arguments}: {done.err}"
        assert "Traceback" not in done.err


def test_a_cluster_that_does_not_answer_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {token: t}}]\n"
    )
    with pytest.raises(Failure, match="cluster 'c' does not answer at http://127.0.0.1:9") as told:
        Cluster("tandem", "c", file).allowed(Access("get", "", "pods"))
    assert told.value.exit_code == 69
