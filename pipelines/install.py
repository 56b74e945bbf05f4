"""What Tandem needs in a namespace: the manifests beside the targets, with this cluster's settings put in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.cluster.api import Cluster
from configs.failure import BadConfig

MANIFESTS = Path(__file__).parent / "targets" / "manifests"
NAMESPACE = "tandem"
"""The namespace written in the manifests."""
CLUSTER_WIDE = ("Namespace", "ResourceFlavor", "ClusterQueue")
STORAGE_ACCOUNTS = ("tandem-pipeline", "tandem-role", "tandem-mlflow")
"""ServiceAccounts whose pods read or write the bucket."""
IAM_ANNOTATION = "eks.amazonaws.com/role-arn"
POD_SECURITY = ("restricted", "baseline", "privileged")
OURS = ("app.kubernetes.io/name", "tandem")
KUBEFLOW = "kubeflow"
RESERVED = ("default", "kube-system", "kube-public", "kube-node-lease")


@dataclass(frozen=True)
class Settings:
    """What differs between installations.

    Attributes:
        namespace: Where everything goes.
        image: Image of MLflow (the `control` image).
        mlflow: Whether to install MLflow.
        mlflow_storage_gib: Size of its volume in GiB; 0 keeps its files in the pod, which loses them with it.
        mlflow_artifacts: Where MLflow keeps small artifacts: `s3://…`, or empty for its volume.
        tracking_uri: Address of an MLflow that is there already; with `mlflow` False.
        kueue: Whether to make queues.
        kubeflow: Whether the namespace is Kubeflow's: its accounts get the launcher's rights, and neither the Namespace
            nor the rule that denies traffic is touched.
        pod_security: Pod Security level of the namespace.
        role_arn: IAM role for the accounts that use the bucket (EKS).
        region: AWS region.
        s3_endpoint: Address of an S3-compatible server.
        pull_policy: Of MLflow's image.
    """

    namespace: str = NAMESPACE
    image: str = ""
    mlflow: bool = True
    mlflow_storage_gib: int = 20
    mlflow_artifacts: str = ""
    tracking_uri: str = ""
    kueue: bool = False
    kubeflow: bool = False
    pod_security: str = "restricted"
    role_arn: str = ""
    region: str = ""
    s3_endpoint: str = ""
    pull_policy: str = "IfNotPresent"


def render(settings: Settings) -> list[dict[str, Any]]:
    """The objects of an installation, in the order in which they can be applied.

    Raises:
        BadConfig: the settings contradict each other.
    """
    if settings.namespace in RESERVED:
        raise BadConfig(
            f"--namespace {settings.namespace} belongs to Kubernetes; choose one of your own, such as tandem"
        )
    if settings.namespace == KUBEFLOW and not settings.kubeflow:
        raise BadConfig(
            "--namespace kubeflow is Kubeflow's, whose pods the rules of a namespace of Tandem's own would cut off; add"
            " --kubeflow, or choose another, such as tandem"
        )
    if settings.mlflow and not settings.image:
        raise BadConfig(
            "MLflow needs the control image: build it with `make images` (writes images/built.json), give --images FILE, or"
            " --no-mlflow with --tracking-uri"
        )
    if settings.mlflow and settings.tracking_uri:
        raise BadConfig("--tracking-uri names an MLflow that is there already; add --no-mlflow, or leave it out")
    parts = ["base", *(name for name in ("mlflow", "kueue", "kubeflow") if getattr(settings, name))]
    objects = [one for part in parts for one in _read(part)]
    if settings.kubeflow:
        objects = [
            one for one in objects if one["kind"] != "Namespace" and one["metadata"]["name"] != "tandem-deny-ingress"
        ]
    for one in objects:
        _place(one, settings.namespace)
        _CHANGES.get(one["kind"], _nothing)(one, settings)
    kept = [one for one in objects if not (one["kind"] == "PersistentVolumeClaim" and not settings.mlflow_storage_gib)]
    return kept


def to_yaml(objects: list[dict[str, Any]]) -> str:
    """The objects as one YAML stream for `kubectl apply -f -`."""
    return yaml.safe_dump_all(objects, sort_keys=False, width=120)


def install(cluster: Cluster, objects: list[dict[str, Any]], dry_run: bool = False) -> list[str]:
    """Apply the objects on the server's side; returns what was applied as `Kind/name`.

    Raises:
        BadConfig: the namespace is somebody else's, or the server refuses an object; what came before it is applied.
    """
    if any(one["kind"] == "Namespace" for one in objects):
        _refuse_foreign(cluster)
    if dry_run and cluster.get("v1", "Namespace", cluster.namespace) is None:
        raise BadConfig(
            f"--dry-run: there is no namespace '{cluster.namespace}', and a server checks objects only in one that is there;"
            f" make it first: kubectl create namespace {cluster.namespace}"
        )
    applied = []
    for one in objects:
        cluster.apply(one, dry_run=dry_run)
        applied.append(f"{one['kind']}/{one['metadata']['name']}")
    return applied


def _refuse_foreign(cluster: Cluster) -> None:
    """An installation denies a namespace's pods all traffic and sets their Pod Security: never those of others."""
    found = cluster.get("v1", "Namespace", cluster.namespace)
    labels = (found or {}).get("metadata", {}).get("labels", {})
    if found is None or labels.get(OURS[0]) == OURS[1]:
        return
    pods = [pod["metadata"]["name"] for pod in cluster.find("v1", "Pod")]
    if pods:
        raise BadConfig(
            f"namespace '{cluster.namespace}' is not Tandem's and holds pods ({', '.join(sorted(pods)[:2])}), which the"
            " installation would cut off; give --namespace one of its own, or --kubeflow if it is Kubeflow's or a profile's"
        )


def _read(part: str) -> list[dict[str, Any]]:
    folder = MANIFESTS / part
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [one for name in listed for one in yaml.safe_load_all((folder / name).read_text())]


def _place(one: dict[str, Any], namespace: str) -> None:
    """Put an object into the namespace; what is cluster-wide takes its name, so that installations do not collide."""
    metadata = one["metadata"]
    if one["kind"] in CLUSTER_WIDE:
        metadata["name"] = namespace
    else:
        metadata["namespace"] = namespace
    for subject in one.get("subjects", []):
        subject["namespace"] = namespace


def _nothing(one: dict[str, Any], settings: Settings) -> None:
    pass


def _namespace(one: dict[str, Any], settings: Settings) -> None:
    labels = one["metadata"]["labels"]
    for mode in ("enforce", "audit", "warn"):
        labels[f"pod-security.kubernetes.io/{mode}"] = settings.pod_security


def _account(one: dict[str, Any], settings: Settings) -> None:
    if settings.role_arn and one["metadata"]["name"] in STORAGE_ACCOUNTS:
        one["metadata"]["annotations"] = {IAM_ANNOTATION: settings.role_arn}


def _configuration(one: dict[str, Any], settings: Settings) -> None:
    address = f"http://tandem-mlflow.{settings.namespace}.svc:5000" if settings.mlflow else settings.tracking_uri
    values = {
        "MLFLOW_TRACKING_URI": address,
        "AWS_REGION": settings.region,
        "AWS_ENDPOINT_URL": settings.s3_endpoint,
        "MLFLOW_S3_ENDPOINT_URL": settings.s3_endpoint,
    }
    one["data"] = {key: value for key, value in values.items() if value}


def _deployment(one: dict[str, Any], settings: Settings) -> None:
    pod = one["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["image"] = settings.image
    container["imagePullPolicy"] = settings.pull_policy
    for variable in container["env"]:
        if variable["name"] == "ARTIFACTS" and settings.mlflow_artifacts:
            variable["value"] = settings.mlflow_artifacts
        if variable["name"] == "MLFLOW_SERVER_ALLOWED_HOSTS":
            variable["value"] = variable["value"].replace(f".{NAMESPACE}.svc", f".{settings.namespace}.svc")
    if not settings.mlflow_storage_gib:
        pod["volumes"] = [{"name": "data", "emptyDir": {}} if one["name"] == "data" else one for one in pod["volumes"]]


def _claim(one: dict[str, Any], settings: Settings) -> None:
    one["spec"]["resources"]["requests"]["storage"] = f"{settings.mlflow_storage_gib}Gi"


def _cluster_queue(one: dict[str, Any], settings: Settings) -> None:
    spec = one["spec"]
    spec["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] = settings.namespace
    for group in spec["resourceGroups"]:
        for flavor in group["flavors"]:
            flavor["name"] = settings.namespace


def _local_queue(one: dict[str, Any], settings: Settings) -> None:
    one["spec"]["clusterQueue"] = settings.namespace


_CHANGES = {
    "Namespace": _namespace,
    "ServiceAccount": _account,
    "ConfigMap": _configuration,
    "Deployment": _deployment,
    "PersistentVolumeClaim": _claim,
    "ClusterQueue": _cluster_queue,
    "LocalQueue": _local_queue,
}
