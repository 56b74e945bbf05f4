"""What runs inside the cluster before any test: DNS, Argo Workflows, JobSet, LeaderWorkerSet, Kueue and an S3 server.

Manifests are upstream's own, rendered when the part was built; the differences for this cluster are made here: our
image, one replica, small requests.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import hashlib
import json
import math
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster import host, image, layout, process
from tests.cluster.api import Api, wait_for
from tests.cluster.binaries import PARTS
from tests.storage.s3_server import RECIPE, seaweedfs

ARGO_NAMESPACE = "argo"
CONTROLLERS = {"argo": ARGO_NAMESPACE, "jobset": "jobset-system", "lws": "lws-system"}
KUEUE_NAMESPACE = "kueue-system"
ROLLOUT_LIMIT_S = 180
KUEUE_LIMIT_S = 300
S3_PORT = 8333
BUSYBOX = f"{image.PREFIX}/busybox:1.35"
"""A shell with the usual small programs, for tests of the cluster itself."""

_ARGO_USER = 8737
_S3_USER = 65532
_SEAWEEDFS = f"{image.PREFIX}/seaweedfs:{hashlib.sha256(RECIPE.encode()).hexdigest()[:12]}"
_MANAGED_BY_KUEUE = (
    "object == null"
    " || (has(object.metadata.labels) && 'kueue.x-k8s.io/queue-name' in object.metadata.labels)"
    " || (has(object.metadata.annotations) && 'kueue.x-k8s.io/pod-suspending-parent' in object.metadata.annotations)"
)


@dataclasses.dataclass(frozen=True)
class S3:
    """The S3 server of the cluster.

    Attributes:
        endpoint_url: For pods.
        host_endpoint_url: For processes on this machine.
    """

    endpoint_url: str
    host_endpoint_url: str
    bucket: str
    access_key: str
    secret_key: str

    def environment(self, inside: bool = False) -> dict[str, str]:
        """Variables by which boto3 finds the server, inside the cluster or on this machine."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url if inside else self.host_endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            **({} if inside else {"NO_PROXY": f"127.0.0.1,localhost,{layout.S3_SERVICE}"}),
        }


def s3() -> S3:
    """Address and keys of the server; the keys are made once per wiped state."""
    path = layout.STATE / "s3.json"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(json.dumps({"access_key": "tandem", "secret_key": secrets.token_hex(20)}))
    return S3(
        endpoint_url=f"http://s3.{layout.INFRASTRUCTURE}.svc.{layout.DOMAIN}:{S3_PORT}",
        host_endpoint_url=f"http://{layout.S3_SERVICE}:{S3_PORT}",
        bucket=layout.NAME,
        **json.loads(path.read_text()),
    )


def images() -> list[image.ProgramImage]:
    """Every image the infrastructure and the cluster's own tests need."""
    argo, box = PARTS["argo"], host.busybox()
    controller = argo.binary("workflow-controller")
    managers = [
        image.ProgramImage(_reference(name), PARTS[name].binary(), "/manager") for name in ("jobset", "lws", "kueue")
    ]
    return [
        image.ProgramImage(_reference("argo"), controller, "/bin/workflow-controller", user=_ARGO_USER),
        image.ProgramImage(_executor(), argo.binary("argoexec"), "/bin/argoexec", user=_ARGO_USER),
        image.ProgramImage(_SEAWEEDFS, seaweedfs(), "/bin/weed", user=_S3_USER),
        image.ProgramImage(BUSYBOX, box, "/bin/busybox", links=_applets(box)),
        *managers,
    ]


def install(api: Api) -> None:
    """Apply everything but Kueue; nothing is waited for."""
    api.apply(_dns())
    for name, namespace in CONTROLLERS.items():
        api.apply(_controller(name, namespace), namespace)
    api.apply(_s3_server(), layout.INFRASTRUCTURE)


def install_kueue(api: Api) -> None:
    """Apply Kueue, last and on its own: it may take minutes to be ready, and few tests need it."""
    api.apply(_controller("kueue", KUEUE_NAMESPACE), KUEUE_NAMESPACE)


def wait_ready(api: Api) -> None:
    """Wait until every deployment but Kueue's is available."""
    for namespace in (*CONTROLLERS.values(), layout.INFRASTRUCTURE):
        wait_for(f"the deployments in {namespace}", ROLLOUT_LIMIT_S, functools.partial(_rolled_out, api, namespace))


def wait_kueue(api: Api) -> None:
    """Wait until Kueue answers its webhooks."""
    wait_for("Kueue", KUEUE_LIMIT_S, lambda: _rolled_out(api, KUEUE_NAMESPACE))


def digest() -> str:
    """Changes when what is installed would change, so that an unchanged cluster is left as it is."""
    parts = [part.key for part in PARTS.values()]
    return hashlib.sha256(json.dumps([*parts, RECIPE, Path(__file__).read_text()]).encode()).hexdigest()


def _rolled_out(api: Api, namespace: str) -> bool:
    """Whether all deployments are available, by containers of this start: older statuses outlive a stop."""
    deployments = api.list("apps/v1", "Deployment", namespace)
    available = all(
        each.get("status", {}).get("availableReplicas", 0) >= each["spec"]["replicas"]
        and each["status"].get("observedGeneration") == each["metadata"]["generation"]
        for each in deployments
    )
    pods = api.list("v1", "Pod", namespace)
    return bool(deployments) and available and all(_started_anew(each) for each in pods)


def _started_anew(pod: dict[str, Any]) -> bool:
    runtime = process.running("containerd")
    statuses = pod["status"].get("containerStatuses") or []
    started = [each["state"].get("running", {}).get("startedAt") for each in statuses if each.get("ready")]
    since = int(runtime.create_time()) if runtime else math.inf
    return bool(started) and all(datetime.datetime.fromisoformat(each).timestamp() >= since for each in started)


def _reference(part: str) -> str:
    return f"{image.PREFIX}/{part}:{PARTS[part].key}"


def _executor() -> str:
    return f"{image.PREFIX}/argoexec:{PARTS['argo'].key}"


def _applets(busybox: Path) -> tuple[str, ...]:
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, timeout=30, check=True)
    return tuple(name for name in listed.stdout.split() if name != "busybox")


def _controller(part: str, namespace: str) -> Iterator[dict[str, Any]]:
    """Upstream's manifests, in an order in which they can be applied, changed for this cluster."""
    documents = json.loads((PARTS[part].folder / "manifests.json").read_text())
    yield _namespace(namespace)
    for each in documents:
        # Kueue's aggregated API would keep namespaces from being deleted whenever Kueue is not up.
        if each["kind"] in ("Namespace", "APIService"):
            continue
        if each["kind"] == "Deployment":
            _localize(each, part)
        elif each["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            for subject in each["subjects"]:
                subject.setdefault("namespace", namespace)
        elif part == "kueue" and each["kind"].endswith("WebhookConfiguration"):
            _narrow(each)
        yield each


def _localize(deployment: dict[str, Any], part: str) -> None:
    deployment["spec"]["replicas"] = 1
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["image"] = _reference(part)
    container["imagePullPolicy"] = "Never"
    container["resources"] = {"requests": {"cpu": "20m", "memory": "64Mi"}}
    if "readinessProbe" in container:
        container["readinessProbe"].update(initialDelaySeconds=1, periodSeconds=1)
    if part == "argo":
        container["args"] = ["--executor-image", _executor(), "--executor-image-pull-policy", "Never"]
        # Halves the time of short workflows: the controller looks again this long after something changed.
        container["env"].append({"name": "DEFAULT_REQUEUE_TIME", "value": "500ms"})


def _narrow(webhooks: dict[str, Any]) -> None:
    """Have Kueue asked only about what names a queue, so that the rest of the cluster works without it."""
    for hook in webhooks["webhooks"]:
        if all("kueue.x-k8s.io" not in rule["apiGroups"] for rule in hook["rules"]):
            hook["matchConditions"] = [{"name": "names-a-queue", "expression": _MANAGED_BY_KUEUE}]


def _namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def _dns() -> Iterator[dict[str, Any]]:
    """The service for CoreDNS, which runs on the node, and the rights of CoreDNS and kube-proxy."""
    metadata = {"name": "kube-dns", "namespace": "kube-system"}
    ports = [{"name": f"dns-{kind.lower()}", "port": 53, "protocol": kind} for kind in ("UDP", "TCP")]
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "labels": {"k8s-app": "kube-dns"}},
        "spec": {"clusterIP": layout.DNS_SERVICE, "ports": ports},
    }
    yield {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**metadata, "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "ports": copy.deepcopy(ports),
        "endpoints": [{"addresses": [layout.NODE_ADDRESS], "conditions": {"ready": True}}],
    }
    yield {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "system:coredns"},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ],
    }
    yield _user_binding("system:coredns", "system:coredns")
    yield _user_binding("system:kube-proxy", "system:node-proxier")


def _user_binding(user: str, role: str) -> dict[str, Any]:
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"{layout.NAME}:{user.removeprefix('system:')}"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }


def _s3_server() -> Iterator[dict[str, Any]]:
    """SeaweedFS with its data on the node, so that it outlives its pod."""
    data = layout.STATE / "s3"
    data.mkdir(exist_ok=True)
    os.chown(data, _S3_USER, _S3_USER)
    server = s3()
    identity = {
        "name": "tandem",
        "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    labels = {"app": "s3"}
    yield _namespace(layout.INFRASTRUCTURE)
    yield {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s3"},
        "stringData": {"s3.json": json.dumps({"identities": [identity]})},
    }
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s3"},
        "spec": {"clusterIP": layout.S3_SERVICE, "selector": labels, "ports": [{"port": S3_PORT}]},
    }
    container = {
        "name": "weed",
        "image": _SEAWEEDFS,
        "imagePullPolicy": "Never",
        "args": [
            *("server", "-dir=/data", "-ip=127.0.0.1", "-ip.bind=0.0.0.0", "-filer", "-s3"),
            *("-s3.config=/etc/s3/s3.json", "-s3.autoCreateBucket=false", f"-s3.port={S3_PORT}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
            *("-master.volumeSizeLimitMB=256", "-volume.max=40", "-volume.preStopSeconds=0"),
        ],
        "readinessProbe": {"tcpSocket": {"port": S3_PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "s3", "mountPath": "/etc/s3"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    volumes = [
        {"name": "data", "hostPath": {"path": str(data)}},
        {"name": "s3", "secret": {"secretName": "s3"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    yield {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "s3"},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 1,
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }
