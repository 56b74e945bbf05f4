"""Every shape of KFP pipeline that is translated runs on a real Argo and ends with the values KFP would give."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kfp import compiler

from configs.failure import BadConfig
from pipelines.targets.argo.translation import translate
from tests.pipelines.shapes.refused import REFUSED
from tests.pipelines.shapes.running import SHAPES, Shape

LIMIT_S = 600
ACCOUNT = "tandem-pipeline"
OVER = ("Succeeded", "Failed", "Error")
WORKFLOW = ("argoproj.io/v1alpha1", "Workflow")


def objects(namespace: str, s3: Any) -> list[dict[str, Any]]:
    """What the shapes need beside themselves: an account that may report a step's outputs, settings and secrets."""
    rbac = "rbac.authorization.k8s.io"
    bound = {"apiGroup": rbac, "kind": "Role", "name": ACCOUNT}
    rule = {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]}
    keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
    parts: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": {"name": ACCOUNT}, "rules": [rule]},
        {
            "apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": {"name": ACCOUNT}, "roleRef": bound,
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
        },
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tandem-s3"}, "stringData": keys},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "shape-secret"}, "stringData": {"key": "s"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "shape-settings"}, "data": {"key": "t"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tandem"}, "data": {"AWS_ENDPOINT_URL": s3.endpoint_url}},
    ]  # fmt: skip
    return parts


@pytest.fixture(scope="module")
def image(cluster: Any) -> str:
    return str(cluster.load_built_images().control)


@pytest.fixture(scope="module")
def place(cluster: Any) -> Iterator[str]:
    name = cluster.namespace("shapes", {"pod-security.kubernetes.io/enforce": "baseline"})
    cluster.api.apply(objects(name, cluster.s3), name)
    yield name
    cluster.delete_namespace(name)


@pytest.fixture(scope="module")
def ended(cluster: Any, image: str, place: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All shapes, run beside each other to their ends: the Workflows by name."""
    folder = tmp_path_factory.mktemp("shapes")
    for shape in SHAPES:
        cluster.api.apply(translated(shape, folder, place, image, cluster.s3.bucket), place)
    end = time.monotonic() + LIMIT_S
    found: dict[str, dict[str, Any]] = {}
    while time.monotonic() < end:
        found = {shape.name: cluster.api.get(*WORKFLOW, shape.name, place) for shape in SHAPES}
        if all(workflow.get("status", {}).get("phase") in OVER for workflow in found.values()):
            break
        time.sleep(1.0)
    return found


def translated(shape: Shape, folder: Path, namespace: str, image: str, bucket: str) -> list[dict[str, Any]]:
    path = folder / f"{shape.name}.yaml"
    compiler.Compiler().compile(shape.pipeline, str(path))
    path.write_text(path.read_text().replace("image: control", f"image: {image}"))
    return translate(
        path, name=shape.name, namespace=namespace, arguments=shape.arguments, pipeline_root=f"s3://{bucket}/shapes"
    )


def outputs(workflow: dict[str, Any], task: str, key: str) -> list[Any]:
    """What the pods of a task put out under a key."""
    found = []
    for node in workflow["status"]["nodes"].values():
        if node["displayName"] == task and node["type"] == "Pod":
            parameters = node.get("outputs", {}).get("parameters", [])
            found += [json.loads(part["value"]) for part in parameters if part["name"] == key]
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_shape_ends_as_on_kubeflow(
    shape: Shape, ended: dict[str, dict[str, Any]], place: str, figures: dict[str, Any]
) -> None:
    workflow = ended[shape.name]
    status = workflow.get("status", {})
    nodes = status.get("nodes", {}).values()
    told = [f"{node['displayName']}: {node['phase']} {node.get('message', '')}" for node in nodes]
    assert status.get("phase") == ("Failed" if shape.message else "Succeeded"), (status.get("message"), told)
    if shape.message:
        assert any(shape.message in node.get("message", "") for node in nodes if node["type"] == "Pod"), told
    for task, key, values in shape.outputs:
        expected = [
            value.replace('NAMESPACE": "NAMESPACE', f'NAMESPACE": "{place}') if isinstance(value, str) else value
            for value in values
        ]
        assert sorted(outputs(workflow, task, key), key=repr) == sorted(expected, key=repr), (task, key, told)
    for task in shape.skipped:
        assert not [node for node in nodes if node["displayName"] == task and node["phase"] == "Succeeded"], told
    figures["ir_shapes_run"] = figures.get("ir_shapes_run", 0) + 1


def test_placeholders_name_the_workflow(ended: dict[str, dict[str, Any]]) -> None:
    workflow = ended["placeholders"]
    assert outputs(workflow, "say", "said") == [f"job {workflow['metadata']['uid']} of {workflow['metadata']['name']}"]


def test_a_failed_step_is_tried_again(ended: dict[str, dict[str, Any]]) -> None:
    tries = [node for node in ended["retried"]["status"]["nodes"].values() if node["displayName"].startswith("flaky(")]
    assert sorted(node["phase"] for node in tries) == ["Failed", "Succeeded"]


def test_what_is_not_translated_is_refused(figures: dict[str, Any], tmp_path: Path) -> None:
    for pipeline, _ in REFUSED:
        path = tmp_path / "pipeline.yaml"
        compiler.Compiler().compile(pipeline, str(path))
        with pytest.raises(BadConfig):
            translate(path, namespace="shapes", pipeline_root="s3://bucket/root")
    figures["ir_shapes_refused"] = len(REFUSED)


def test_the_server_takes_every_workflow(cluster: Any, place: str, tmp_path: Path, figures: dict[str, Any]) -> None:
    from pipelines.compile import POST_TRAINING
    from pipelines.targets.argo.translation import cron

    several = [part for shape in SHAPES for part in translated(shape, tmp_path, place, "control", "bucket")]
    main = translate(
        POST_TRAINING, namespace=place, name="main", arguments={"config": "{}"}, pipeline_root="s3://bucket/root"
    )
    accepted = cluster.api.apply([*several, *main, cron(main[1], "weekly", "0 3 * * 1")], place, dry_run=True)
    assert accepted == len(several) + 3
    figures["objects_accepted"] = figures.get("objects_accepted", 0) + accepted
