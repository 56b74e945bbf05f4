"""What `tandem install` renders; tests/cluster gives the same to a real API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.failure import BadConfig
from configs.hardware import load_hardware
from pipelines.install import MANIFESTS, Settings, render, to_yaml
from tests.pipelines.command import tandem
from tests.pipelines.submitted import images_file

FULL = Settings(namespace="elsewhere", image="registry/control@sha256:0", kueue=True, kubeflow=False)


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def test_everything_is_in_the_namespace_that_was_asked_for() -> None:
    objects = render(FULL)
    wide = [one for one in objects if "namespace" not in one["metadata"]]
    assert {(one["kind"], one["metadata"]["name"]) for one in wide} == {
        ("Namespace", "elsewhere"), ("ResourceFlavor", "elsewhere"), ("ClusterQueue", "elsewhere"),
    }  # fmt: skip
    assert all(one["metadata"]["namespace"] == "elsewhere" for one in objects if one not in wide)
    subjects = [subject for one in objects for subject in one.get("subjects", [])]
    assert {subject["namespace"] for subject in subjects} == {"elsewhere"}
    assert "tandem.svc" not in to_yaml(objects)


def test_the_base_is_what_kustomize_applies() -> None:
    """With its defaults the command renders the files as they stand, so `kubectl apply -k` gives the same."""
    rendered = render(Settings(mlflow=False, tracking_uri="http://tandem-mlflow.tandem.svc:5000"))
    written = []
    for name in yaml.safe_load((MANIFESTS / "base" / "kustomization.yaml").read_text())["resources"]:
        written += list(yaml.safe_load_all((MANIFESTS / "base" / name).read_text()))
    for one in written:
        if one["kind"] != "Namespace":
            one["metadata"]["namespace"] = "tandem"
    assert rendered == written


def test_no_secret_is_rendered_and_no_role_reaches_wide() -> None:
    objects = render(FULL)
    assert not of_kind(objects, "Secret")
    assert not of_kind(objects, "ClusterRole") and not of_kind(objects, "ClusterRoleBinding")
    rules = [rule for role in of_kind(objects, "Role").values() for rule in role["rules"]]
    assert all("*" not in rule[key] for rule in rules for key in ("verbs", "resources", "apiGroups"))
    secrets = [rule for rule in rules if "secrets" in rule["resources"]]
    assert [(rule["verbs"], rule["resourceNames"]) for rule in secrets] == [(["get"], ["tandem-redis"])]


def test_every_pod_is_restricted() -> None:
    for deployment in of_kind(render(FULL), "Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_queue_covers_what_pods_of_every_profile_ask_for() -> None:
    from configs.hardware import HARDWARE

    asked = {"cpu", "memory", "pods"}
    for file in HARDWARE.glob("*.yaml"):
        profile = load_hardware(file.stem)
        asked |= {"nvidia.com/gpu"} if profile.gpus else set()
        asked |= {"vpc.amazonaws.com/efa"} if profile.efa_interfaces else set()
        asked |= {"hugepages-2Mi"} if profile.hugepages_mib else set()
    (group,) = of_kind(render(FULL), "ClusterQueue")["elsewhere"]["spec"]["resourceGroups"]
    assert asked <= set(group["coveredResources"])
    assert [one["name"] for one in group["flavors"][0]["resources"]] == group["coveredResources"]


def test_kubeflows_namespace_is_left_as_it_is() -> None:
    objects = render(Settings(namespace="kubeflow", mlflow=False, tracking_uri="http://m:5000", kubeflow=True))
    assert not of_kind(objects, "Namespace")
    assert "tandem-deny-ingress" not in of_kind(objects, "NetworkPolicy")
    bound = of_kind(objects, "RoleBinding")["tandem-launcher-kubeflow"]["subjects"]
    assert {subject["name"] for subject in bound} == {"pipeline-runner", "default-editor"}


def test_settings_reach_their_places() -> None:
    objects = render(
        Settings(
            image="x:1",
            role_arn="arn:x",
            region="eu-west-1",
            s3_endpoint="http://s3:1",
            mlflow_storage_gib=5,
            mlflow_artifacts="s3://b/m",
        )
    )
    accounts = of_kind(objects, "ServiceAccount")
    annotated = {name for name, one in accounts.items() if one["metadata"].get("annotations")}
    assert annotated == {"tandem-pipeline", "tandem-role", "tandem-mlflow"}
    data = of_kind(objects, "ConfigMap")["tandem"]["data"]
    assert data == {
        "MLFLOW_TRACKING_URI": "http://tandem-mlflow.tandem.svc:5000",
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL": "http://s3:1",
        "MLFLOW_S3_ENDPOINT_URL": "http://s3:1",
    }
    assert (
        of_kind(objects, "PersistentVolumeClaim")["tandem-mlflow"]["spec"]["resources"]["requests"]["storage"] == "5Gi"
    )
    container = of_kind(objects, "Deployment")["tandem-mlflow"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "ARTIFACTS", "value": "s3://b/m"} in container["env"]
    small = render(Settings(image="x:1", mlflow_storage_gib=0))
    assert not of_kind(small, "PersistentVolumeClaim")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(), "MLflow needs the control image"),
        (Settings(image="x", tracking_uri="http://m"), "add --no-mlflow"),
        (Settings(namespace="kube-system", mlflow=False), "belongs to Kubernetes"),
        (Settings(namespace="kubeflow", mlflow=False), "add --kubeflow"),
    ],
)
def test_contradictions_are_sentences(settings: Settings, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        render(settings)


def test_training_nodes_have_every_rail() -> None:
    """The example's network cards are those of the hardware profile, each with one EFA device."""
    node_class, pool = yaml.safe_load_all((MANIFESTS / "examples" / "karpenter-training.yaml").read_text())
    interfaces = node_class["spec"]["networkInterfaces"]
    assert interfaces[0] == {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"}
    rails = [one["networkCardIndex"] for one in interfaces if one["interfaceType"] == "efa-only"]
    assert rails == list(range(load_hardware("p5en").efa_interfaces))
    types = next(
        one for one in pool["spec"]["template"]["spec"]["requirements"] if one["key"].endswith("instance-type")
    )
    assert types["values"] == [load_hardware("p5en").instance_type]


def test_the_command_prints_what_kubectl_takes(tmp_path: Path) -> None:
    done = tandem(tmp_path, "install", "--render", "-n", "mine", "--images", str(images_file(tmp_path)), "--kueue")
    assert done.code == 0, done.err
    objects = list(yaml.safe_load_all(done.out))
    assert objects[0]["kind"] == "Namespace"
    assert of_kind(objects, "Deployment")["tandem-mlflow"]["spec"]["template"]["spec"]["containers"][0][
        "image"
    ].endswith("control:1")
    assert (
        tandem(tmp_path, "install", "--render", "-n", "mine", "--images", str(images_file(tmp_path)), "--kueue").out
        == done.out
    )
