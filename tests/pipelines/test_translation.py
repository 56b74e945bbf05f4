"""The Argo Workflow a compiled pipeline becomes, and the refusal of everything the translation does not know."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kfp import compiler, dsl, kubernetes

from configs.failure import BadConfig
from pipelines.compile import POST_TRAINING, POST_TRAINING_ARGO
from pipelines.targets.argo.pod import SCRATCH_VOLUME
from pipelines.targets.argo.translation import cron, dump, translate
from tests.pipelines.shapes import components as c
from tests.pipelines.shapes.refused import REFUSED
from tests.pipelines.shapes.running import AWKWARD, SHAPES, Shape

GOLDENS = Path(__file__).parent / "shapes" / "goldens"
REGENERATE = "TANDEM_REGENERATE"
"""Environment variable that makes this test write the goldens again."""
BY_NAME = {shape.name: shape for shape in SHAPES}


def compiled(pipeline: Any, folder: Path) -> Path:
    path = folder / "pipeline.yaml"
    compiler.Compiler().compile(pipeline, str(path))
    return path


def workflow_of(path: Path, **options: Any) -> dict[str, Any]:
    return translate(path, namespace="shapes", pipeline_root="s3://bucket/root", **options)[1]


def templates(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    workflow = workflow_of(compiled(BY_NAME[name].pipeline, folder))
    return {template["name"]: template for template in workflow["spec"]["templates"]}


def tasks_of(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {task["name"]: task for task in template["dag"]["tasks"]}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("ir")
    return {shape.name: list(yaml.safe_load_all(compiled(shape.pipeline, folder).read_text())) for shape in SHAPES}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes_are_translated_to_their_goldens(shape: Shape, tmp_path: Path) -> None:
    written = dump([workflow_of(compiled(shape.pipeline, tmp_path), arguments=shape.arguments)])
    golden = GOLDENS / f"{shape.name}.yaml"
    # The launcher's digest changes with the launcher, not with the translation.
    name = yaml.safe_load(written)["spec"]["volumes"][0]["configMap"]["name"]
    written = written.replace(name, "tandem-launcher-DIGEST")
    if os.environ.get(REGENERATE):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(written)
    assert written == golden.read_text(), f"set {REGENERATE}=1 to write the goldens again"


@pytest.mark.parametrize(("pipeline", "words"), REFUSED, ids=lambda part: getattr(part, "name", ""))
def test_unknown_constructs_are_refused_by_name(pipeline: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as caught:
        workflow_of(compiled(pipeline, tmp_path))
    sentence = caught.value.sentence
    assert all(word in sentence for word in words), sentence
    assert "; " in sentence and "\n" not in str(caught.value)


def _mappings(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a document has mappings with keys of the IR (not names, and not a user's own values)."""
    named = ("components", "tasks", "executors", "parameters", "artifacts", "platforms", "labels", "annotations")
    found = []
    if isinstance(part, dict):
        if not (path and path[-1] in named):
            found.append(path)
        for key, inner in part.items():
            if key not in ("constant", "defaultValue", "metadata"):
                found += _mappings(inner, (*path, key))
    elif isinstance(part, list):
        for number, inner in enumerate(part):
            found += _mappings(inner, (*path, number))
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_an_unknown_key_anywhere_is_refused(
    data: st.DataObject, documents: dict[str, list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = data.draw(st.sampled_from(sorted(documents)))
    ir = copy.deepcopy(documents[name])
    place = data.draw(st.sampled_from([(number, *path) for number, part in enumerate(ir) for path in _mappings(part)]))
    key = data.draw(st.sampled_from(["unheardOf", "gpuDirect", "notifications"]))
    target = ir
    for step in place:
        target = target[step]
    target[key] = data.draw(st.sampled_from([True, {}, {"a": 1}, "", []]))
    path = tmp_path_factory.mktemp("edited") / "pipeline.yaml"
    path.write_text(yaml.dump_all(ir, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
    with pytest.raises(BadConfig, match=f"'{key}'.* is not translated to Argo"):
        workflow_of(path)


def test_a_task_with_an_unknown_key_is_named(documents: dict[str, list[Any]], tmp_path: Path) -> None:
    ir = copy.deepcopy(documents["retried"])
    ir[0]["deploymentSpec"]["executors"]["exec-flaky"]["container"]["lifecycle"] = {}
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump_all(ir))
    with pytest.raises(BadConfig, match="task 'flaky': 'lifecycle'"):
        workflow_of(path)


def test_the_committed_workflow_is_fresh() -> None:
    fresh = dump(translate(POST_TRAINING, namespace="tandem", pipeline_root="")[1:])
    assert fresh == POST_TRAINING_ARGO.read_text(), "run `python -m pipelines.compile`"


def test_the_main_pipeline_closes_branches_and_hardens() -> None:
    parts = {part["name"]: part for part in yaml.safe_load(POST_TRAINING_ARGO.read_text())["spec"]["templates"]}
    root = tasks_of(parts["root"])
    assert root["exit-handler-1"]["hooks"]["exit"]["template"] == "comp-release"
    job = next(
        value for value in root["exit-handler-1"]["hooks"]["exit"]["arguments"]["parameters"] if value["name"] == "job"
    )
    assert job["value"] == '"{{workflow.uid}}"'
    containers = [part["container"] for part in parts.values() if "container" in part]
    assert len(containers) == 8
    for container in containers:
        context = container["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] == 10001
        assert context["capabilities"] == {"drop": ["ALL"]} and context["allowPrivilegeEscalation"] is False
        assert {"name": "scratch", "mountPath": "/scratch"} in container["volumeMounts"]
        assert "limits" not in container["resources"]
    retried = {name: part["retryStrategy"]["limit"] for name, part in parts.items() if "retryStrategy" in part}
    assert retried == {"comp-rl-loop-retry-2": "2"}
    # Argo ends a retried attempt that runs past this many seconds since the first one started.
    assert int(parts["comp-rl-loop-retry-2"]["retryStrategy"]["backoff"]["maxDuration"]) >= 30 * 24 * 3600
    secrets = {
        variable["valueFrom"]["secretKeyRef"]["name"]: name
        for name, part in parts.items()
        for variable in part.get("container", {}).get("env", [])
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    assert set(secrets) == {"tandem-s3", "tandem-tracking", "tandem-redis", "tandem-reward"}


def test_retries_are_those_of_kubeflow(tmp_path: Path) -> None:
    retried = templates("retried", tmp_path)["comp-flaky-retry-2"]
    assert retried["retryStrategy"] == {"limit": "2", "backoff": {"duration": "1", "factor": "2", "maxDuration": "600"}}
    assert {"name": "KFP_RETRY_INDEX", "value": "{{retries}}"} in retried["container"]["env"]


def test_two_tasks_of_one_component_keep_their_own_retries(documents: dict[str, list[Any]], tmp_path: Path) -> None:
    ir = copy.deepcopy(documents["retried"])
    tasks = ir[0]["root"]["dag"]["tasks"]
    tasks["again"] = copy.deepcopy(tasks["flaky"])
    tasks["again"]["retryPolicy"]["backoffDuration"] = "7s"
    tasks["never"] = {key: part for key, part in copy.deepcopy(tasks["flaky"]).items() if key != "retryPolicy"}
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump_all(ir))
    parts = {part["name"]: part for part in workflow_of(path)["spec"]["templates"]}
    waits = {
        name: parts[task["template"]].get("retryStrategy", {}).get("backoff", {}).get("duration")
        for name, task in tasks_of(parts["root"]).items()
    }
    assert waits == {"flaky": "1", "again": "7", "never": None}


def test_loops_are_bounded_and_collected(tmp_path: Path) -> None:
    parts = templates("loop", tmp_path)
    bounded = [part for part in parts.values() if "parallelism" in part]
    assert [part["parallelism"] for part in bounded] == [2]
    items = json.loads(bounded[0]["dag"]["tasks"][0]["withParam"])
    assert [json.loads(item) for item in items] == [{"n": 1, "m": 5}, {"n": 2, "m": 6}, {"n": 3, "m": 7}]
    assert "map(fromJSON(tasks['iteration']" in bounded[0]["outputs"]["parameters"][0]["valueFrom"]["expression"]


def test_ignored_failures_still_fail_the_run(tmp_path: Path) -> None:
    dag = templates("two-failures-ignored", tmp_path)["root"]["dag"]
    assert dag["target"].split() == ["fail", "say", "say-2"]
    assert "fail.Failed" in tasks_of({"dag": dag})["say-2"]["depends"]


def test_settings_of_kubernetes_reach_the_pod(tmp_path: Path) -> None:
    part = templates("pod-settings", tmp_path)["comp-environment"]
    assert part["metadata"] == {"labels": {"shape": "pod-settings"}, "annotations": {"shape": "pod settings"}}
    assert part["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert part["tolerations"] == [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}]
    assert part["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]["weight"] == 5
    assert part["activeDeadlineSeconds"] == 300
    assert json.loads(part["podSpecPatch"]) == {"imagePullSecrets": [{"name": "shape-registry"}]}
    assert part["container"]["resources"] == {
        "requests": {"cpu": "50m", "memory": "32Mi"},
        "limits": {"memory": "256Mi"},
    }
    volumes = {volume["name"]: volume for volume in part["volumes"]}
    assert volumes["room"]["emptyDir"] == {"sizeLimit": "16Mi"}
    assert volumes["shape-secret"]["secret"]["optional"] is True
    assert volumes["shape-settings"]["configMap"]["optional"] is False
    environment = {variable["name"]: variable for variable in part["container"]["env"]}
    assert "optional" not in environment["SECRET"]["valueFrom"]["secretKeyRef"] or (
        environment["SECRET"]["valueFrom"]["secretKeyRef"]["optional"] is False
    )
    assert environment["NAMESPACE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"


def test_every_mount_shows_what_it_names(tmp_path: Path) -> None:
    @dsl.pipeline
    def mounted():  # type: ignore[no-untyped-def]
        task = c.say(text="a")
        kubernetes.use_secret_as_volume(task, "creds", "/secret")
        kubernetes.use_secret_as_volume(task, "creds", "/again")
        kubernetes.use_secret_as_volume(task, "creds", "/optional", optional=True)
        kubernetes.use_secret_as_volume(task, "my.key", "/dotted")
        kubernetes.use_secret_as_volume(task, "my-key", "/dashed")
        kubernetes.use_secret_as_volume(task, SCRATCH_VOLUME, "/store")
        kubernetes.use_config_map_as_volume(task, "creds", "/settings")
        kubernetes.mount_pvc(task, pvc_name="creds", mount_path="/claim")

    spec = workflow_of(compiled(mounted, tmp_path))["spec"]
    part = next(part for part in spec["templates"] if "container" in part)
    names = [volume["name"] for volume in (*spec["volumes"], *part["volumes"])]
    assert len(set(names)) == len(names) == 9 and all(len(name) <= 63 for name in names)
    volumes = {volume.pop("name"): volume for volume in part["volumes"]}
    shown = {
        mount["mountPath"]: volumes[mount["name"]]
        for mount in part["container"]["volumeMounts"]
        if mount["name"] in volumes
    }
    assert shown == {
        "/secret": {"secret": {"secretName": "creds", "optional": False}},
        "/again": {"secret": {"secretName": "creds", "optional": False}},
        "/optional": {"secret": {"secretName": "creds", "optional": True}},
        "/dotted": {"secret": {"secretName": "my.key", "optional": False}},
        "/dashed": {"secret": {"secretName": "my-key", "optional": False}},
        "/store": {"secret": {"secretName": SCRATCH_VOLUME, "optional": False}},
        "/settings": {"configMap": {"name": "creds", "optional": False}},
        "/claim": {"persistentVolumeClaim": {"claimName": "creds"}},
    }


def test_a_pipelines_own_settings_reach_the_workflow(tmp_path: Path) -> None:
    spec = workflow_of(compiled(BY_NAME["configured"].pipeline, tmp_path))["spec"]
    assert spec["ttlStrategy"] == {"secondsAfterCompletion": 3600}
    assert spec["activeDeadlineSeconds"] == 600


def test_arguments_become_parameters_of_the_workflow(tmp_path: Path) -> None:
    workflow = workflow_of(
        POST_TRAINING, arguments={"config": '{"name": "{{workflow.name}}", "a": "{{x}}"}'}, name="run-1"
    )
    values = {part["name"]: part["value"] for part in workflow["spec"]["arguments"]["parameters"]}
    assert values["checkpoint"] == "" and values["pipeline-root"] == "s3://bucket/root"
    assert json.loads(values["config"]) == {"name": "{{workflow.name}}", "a": "{{x}}"}
    assert values["config"].count("{{") == 1
    assert workflow["metadata"]["name"] == "run-1"
    scheduled = cron(workflow, "weekly", "0 3 * * 1", timezone="Europe/Berlin")
    assert scheduled["spec"]["schedules"] == ["0 3 * * 1"] and scheduled["spec"]["timezone"] == "Europe/Berlin"
    assert scheduled["spec"]["workflowSpec"] == workflow["spec"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "argument 'config' is missing"),
        ({"config": 1}, "'config' is 1, but the pipeline takes string"),
        ({"config": "a", "x": "b"}, "no parameter 'x'; it has: checkpoint, config"),
        ({"config": "{{x}}"}, "Argo takes for a tag"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        workflow_of(POST_TRAINING, arguments=arguments)


def test_other_mistakes_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "no.yaml").write_text("a: 1\n")
    with pytest.raises(BadConfig, match="is no compiled pipeline"):
        workflow_of(tmp_path / "no.yaml")
    with pytest.raises(BadConfig, match="artifacts go to S3 only"):
        translate(POST_TRAINING, namespace="x", pipeline_root="/tmp/x")
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.targets.argo.translation", str(tmp_path / "no.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 64 and done.stderr.count("\n") == 1 and not done.stdout


@settings(max_examples=60, deadline=None)
@given(value=st.recursive(st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.text(), st.lists, max_leaves=5))
def test_no_value_holds_what_argo_or_kubernetes_replaces(value: Any) -> None:
    from pipelines.targets.argo.expression import text

    written = text(["{{x}}", "$(HOME)", "$$", AWKWARD, value])
    assert json.loads(written)[-1] == value
    assert "{{" not in written and "$(" not in written and "$$" not in written
