"""What `tandem install` renders, given to a real API server: accepted by it, and at work afterwards."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.cluster.api import Cluster as Connection
from pipelines.install import MANIFESTS, Settings, install, render
from tests.cluster.api import wait_for
from tests.go_toolchain import go
from tests.pipelines.command import tandem
from tests.pipelines.submitted import images_file

KARPENTER = "github.com/aws/karpenter-provider-aws@v1.15.2"
"""Its module holds the CRDs that the examples are checked against."""
DEFINITIONS = ("karpenter.k8s.aws_ec2nodeclasses.yaml", "karpenter.sh_nodepools.yaml", "karpenter.sh_nodeclaims.yaml")
MLFLOW_S = 180.0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "kueue": True,
            "mlflow_artifacts": "s3://bucket/mlflow",
            "role_arn": "arn:aws:iam::1:role/x",
            "region": "eu-west-1",
        },
        {"kubeflow": True, "mlflow": False, "tracking_uri": "http://mlflow:5000", "s3_endpoint": "http://s3:8333"},
        {"mlflow_storage_gib": 0, "pod_security": "privileged"},
    ],
    ids=["defaults", "everything", "kubeflow", "small"],
)
def test_the_server_accepts_every_object(
    cluster: Any, namespace: str, figures: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Server-side apply with strict fields, against the real schemas and admission webhooks."""
    if settings.get("kueue"):
        cluster.wait_kueue()
    objects = render(Settings(namespace=namespace, image="localhost/tandem/control:1", **settings))
    applied = install(connection(cluster, namespace), objects, dry_run=True)
    assert len(applied) == len(objects)
    figures["objects_accepted"] = figures.get("objects_accepted", 0) + len(applied)


def test_a_field_that_does_not_exist_is_refused(cluster: Any, namespace: str) -> None:
    """So the test above means something."""
    objects = render(Settings(namespace=namespace, mlflow=False))
    policy = next(one for one in objects if one["kind"] == "NetworkPolicy")
    policy["spec"]["podSelektor"] = {}
    with pytest.raises(Exception, match="podSelektor"):
        install(connection(cluster, namespace), [policy], dry_run=True)


@pytest.fixture(scope="module")
def karpenter(cluster: Any) -> Iterator[None]:
    """The CRDs of Karpenter, for as long as its examples are checked."""
    told = subprocess.run([go(), "mod", "download", "-json", KARPENTER], capture_output=True, text=True, timeout=300)
    archive = Path(json.loads(told.stdout)["Zip"])
    definitions = list(_from_zip(archive))
    cluster.api.apply(definitions)
    yield
    for one in definitions:
        cluster.api.delete(one["apiVersion"], one["kind"], one["metadata"]["name"])
    cluster.api.forget()


@pytest.mark.parametrize("example", ["karpenter-training.yaml", "karpenter-rollout.yaml"])
def test_karpenters_schema_accepts_the_examples(
    cluster: Any, karpenter: None, namespace: str, figures: dict[str, Any], example: str
) -> None:
    objects = list(yaml.safe_load_all((MANIFESTS / "examples" / example).read_text()))
    applied = install(connection(cluster, namespace), objects, dry_run=True)
    assert len(applied) == 2
    figures["objects_accepted"] = figures.get("objects_accepted", 0) + len(applied)


def test_the_schema_is_looked_at(cluster: Any, karpenter: None, namespace: str) -> None:
    """Two EFA devices on one network card are refused by a rule of the schema."""
    node_class = next(yaml.safe_load_all((MANIFESTS / "examples" / "karpenter-training.yaml").read_text()))
    node_class["spec"]["networkInterfaces"].append(
        {"networkCardIndex": 3, "deviceIndex": 2, "interfaceType": "efa-only"}
    )
    with pytest.raises(Exception, match="networkInterfaces"):
        install(connection(cluster, namespace), [node_class], dry_run=True)


def test_an_installation_works(cluster: Any, make_namespace: Callable[..., str], tmp_path: Path) -> None:
    """By the command, twice, under restricted Pod Security; MLflow answers."""
    namespace = make_namespace("install")
    (tmp_path / "images.json").write_text(cluster.load_built_images().model_dump_json())
    command = (
        "install", "--context", cluster.context, "--kubeconfig", str(cluster.kubeconfig), "-n", namespace,
        "--images", "images.json", "--mlflow-storage", "0", "--pull-policy", "Never",
    )  # fmt: skip
    for _ in range(2):
        done = tandem(tmp_path, *command)
        assert done.code == 0, done.err
    assert "Role/tandem-launcher applied" in done.out
    labels = cluster.api.get("v1", "Namespace", namespace)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    configuration = cluster.api.get("v1", "ConfigMap", "tandem", namespace)
    assert configuration["data"] == {"MLFLOW_TRACKING_URI": f"http://tandem-mlflow.{namespace}.svc:5000"}

    def ready() -> bool:
        deployment = cluster.api.get("apps/v1", "Deployment", "tandem-mlflow", namespace)
        return bool(deployment["status"].get("readyReplicas"))

    wait_for("MLflow", MLFLOW_S, ready)


def test_the_pods_of_others_are_left_alone(cluster: Any, make_namespace: Callable[..., str], tmp_path: Path) -> None:
    """A namespace with pods is taken over neither silently nor by --dry-run; as Kubeflow's, it keeps its own rules."""
    namespace = make_namespace("foreign")
    container = {"name": "main", "image": "localhost/none:1", "imagePullPolicy": "Never"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs"}, "spec": {"containers": [container]}}
    cluster.api.apply([pod], namespace)
    place = ("--context", cluster.context, "--kubeconfig", str(cluster.kubeconfig), "-n", namespace)
    command = ("install", *place, "--no-mlflow", "--tracking-uri", "http://mlflow:5000")
    for more in ((), ("--dry-run",)):
        done = tandem(tmp_path, *command, *more)
        assert (done.code, "is not Tandem's and holds pods (theirs)" in done.err) == (64, True), done.err
    assert "app.kubernetes.io/name" not in cluster.api.get("v1", "Namespace", namespace)["metadata"]["labels"]
    assert not cluster.api.list("networking.k8s.io/v1", "NetworkPolicy", namespace)
    done = tandem(tmp_path, *command, "--kubeflow")
    assert done.code == 0, done.err
    assert "NetworkPolicy/tandem-deny-ingress" not in done.out


def test_what_is_missing_is_told_before_anything_is_sent(
    cluster: Any, make_namespace: Callable[..., str], tmp_path: Path
) -> None:
    """One sentence each, in the order in which a user would mend them."""
    namespace = make_namespace("missing")
    place = ("--context", cluster.context, "--kubeconfig", str(cluster.kubeconfig), "-n", namespace)
    run = (
        "submit", "quickstart.yaml", "-s", "storage.root=s3://bucket/runs", "--images", str(images_file(tmp_path)), "--check",
    )  # fmt: skip
    (tmp_path / "quickstart.yaml").write_text("name: quick\n")

    def told(*more: str, where: tuple[str, ...] = place) -> str:
        done = tandem(tmp_path, *run, *more, *where)
        assert done.code in (64, 69), done.out
        assert done.err.splitlines()[-1].startswith("tandem: ")
        return done.err

    assert "is not in the kubeconfig" in told(where=("--context", "elsewhere", "--kubeconfig", str(cluster.kubeconfig)))
    assert "has no namespace 'nowhere'" in told(where=(*place[:-1], "nowhere"))
    assert "has no ServiceAccount 'tandem-role'" in told()
    install(connection(cluster, namespace), render(Settings(namespace=namespace, mlflow=False)))
    assert "has no Secret 'tandem-redis'" in told()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tandem-redis"}, "stringData": {"word": "x"}}
    cluster.api.apply([secret], namespace)
    assert "has no key 'password'" in told()
    cluster.api.apply([{**secret, "stringData": {"password": "x"}}], namespace)
    assert "has no LocalQueue 'fast'" in told("-s", "kubernetes.queue=fast")
    assert "no tracking server" in told()
    tracked = ("-s", "tracking.uri=http://mlflow.somewhere:5000")
    assert "no ServiceAccount 'tandem-pipeline'" in _without(
        cluster, namespace, "tandem-pipeline", lambda: told(*tracked)
    )
    done = tandem(tmp_path, *run, *tracked, *place)
    assert done.code == 0, done.err
    assert "the cluster has what this run needs" in done.out
    wish = ("-s", "kubernetes.train.memory_mib=9000000")
    assert "no node has room for a train pod" in tandem(tmp_path, *run, *tracked, *wish, *place).err


def connection(cluster: Any, namespace: str) -> Connection:
    """The cluster as the command line sees it."""
    return Connection(namespace, cluster.context, cluster.kubeconfig)


def _without(cluster: Any, namespace: str, account: str, call: Callable[[], str]) -> str:
    cluster.api.delete("v1", "ServiceAccount", account, namespace)
    try:
        return call()
    finally:
        install(connection(cluster, namespace), render(Settings(namespace=namespace, mlflow=False)))


def _from_zip(archive: Path) -> Iterator[dict[str, Any]]:
    """The CRDs in a module's archive."""
    import zipfile

    with zipfile.ZipFile(archive) as files:
        for name in DEFINITIONS:
            path = next(one for one in files.namelist() if one.endswith(f"/pkg/apis/crds/{name}"))
            yield yaml.safe_load(files.read(path))
