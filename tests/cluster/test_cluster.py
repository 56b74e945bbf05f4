"""The cluster itself: what the other tests here build upon works."""

from __future__ import annotations

import functools
import ipaddress
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import psutil
import pytest
from botocore.config import Config

from tests.cluster import layout, process
from tests.cluster.api import wait_for
from tests.cluster.cluster import ORDER_DOWN, STORES, Cluster, down, up
from tests.cluster.host import program
from tests.cluster.infrastructure import BUSYBOX, S3_PORT

WORKFLOW = "argoproj.io/v1alpha1"
JOB_SET = "jobset.x-k8s.io/v1alpha2"
LEADER_WORKER_SET = "leaderworkerset.x-k8s.io/v1"
KUEUE = "kueue.x-k8s.io/v1beta2"
NEIGHBOUR = "tandem-neighbour"
NEIGHBOUR_GATEWAY = "198.18.211.1"
NEIGHBOUR_ADDRESS = "198.18.211.2"


def test_node_is_ready_and_what_is_installed_is_the_pinned_version(cluster: Cluster) -> None:
    (node,) = cluster.api.list("v1", "Node")

    conditions = {each["type"]: each["status"] for each in node["status"]["conditions"]}
    assert conditions["Ready"] == "True"
    assert node["status"]["nodeInfo"]["kubeletVersion"] == "v1.37.2"
    assert node["status"]["addresses"][0]["address"] == layout.NODE_ADDRESS


def test_pod_finds_services_by_name_and_reaches_them(cluster: Cluster, namespace: str) -> None:
    s3 = f"s3.{layout.INFRASTRUCTURE}.svc.{layout.DOMAIN}"
    # A server that answers 403 has been reached; wget calls that an error.
    script = f"nslookup {s3} && nslookup kubernetes.default.svc.{layout.DOMAIN} && wget http://{s3}:{S3_PORT}/ 2>&1 | grep 403"

    assert run_pod(cluster, namespace, script) == "Succeeded"
    assert layout.S3_SERVICE in cluster.logs(namespace, "once")


def test_s3_keeps_what_is_put_and_refuses_a_wrong_key(cluster: Cluster) -> None:
    key = secrets.token_hex(4)
    bucket = s3_client(cluster, cluster.s3.secret_key)

    bucket.put_object(Bucket=cluster.s3.bucket, Key=key, Body=b"kept")

    assert bucket.get_object(Bucket=cluster.s3.bucket, Key=key)["Body"].read() == b"kept"
    with pytest.raises(bucket.exceptions.ClientError, match="SignatureDoesNotMatch|AccessDenied|403"):
        s3_client(cluster, "wrong").get_object(Bucket=cluster.s3.bucket, Key=key)


def test_argo_runs_a_workflow_with_an_output_and_an_exit_handler(cluster: Cluster, namespace: str) -> None:
    cluster.api.apply(executor_rights(namespace), namespace)

    name = cluster.api.create(two_steps(), namespace)["metadata"]["name"]

    finished = wait_for("the workflow", 120, lambda: phase_in(cluster, namespace, name, "Succeeded", "Failed", "Error"))
    assert finished["status"]["phase"] == "Succeeded"
    nodes = {node["displayName"]: node for node in finished["status"]["nodes"].values()}
    assert nodes["show"]["inputs"]["parameters"] == [{"name": "number", "value": "42"}]
    assert nodes[f"{name}.onExit"]["phase"] == "Succeeded"


def test_argo_tells_the_exit_code_of_a_failed_step(cluster: Cluster, namespace: str) -> None:
    cluster.api.apply(executor_rights(namespace), namespace)
    workflow = {
        "apiVersion": WORKFLOW,
        "kind": "Workflow",
        "metadata": {"generateName": "fails-"},
        "spec": {"entrypoint": "main", "templates": [{"name": "main", "container": shell("exit 64")}]},
    }

    name = cluster.api.create(workflow, namespace)["metadata"]["name"]

    finished = wait_for("the workflow", 60, lambda: phase_in(cluster, namespace, name, "Failed", "Succeeded", "Error"))
    assert finished["status"]["phase"] == "Failed"
    assert "64" in finished["status"]["message"]


def test_job_set_runs_its_jobs_and_takes_them_along_when_deleted(cluster: Cluster, namespace: str) -> None:
    job = {"parallelism": 2, "completions": 2, "completionMode": "Indexed", "template": pod_template("sleep 300")}
    content = {"replicatedJobs": [{"name": "gang", "replicas": 1, "template": {"spec": job}}]}
    cluster.api.apply([thing(JOB_SET, "JobSet", "set", content)], namespace)

    wait_for("two pods", 60, lambda: len(running_pods(cluster, namespace)) == 2)
    cluster.api.delete(JOB_SET, "JobSet", "set", namespace)

    wait_for("no pods", 60, lambda: not cluster.api.list("v1", "Pod", namespace))


def test_leader_worker_set_scales_through_its_subresource(cluster: Cluster, namespace: str) -> None:
    template = pod_template("sleep 300", restart="Always")
    content = {"replicas": 1, "leaderWorkerTemplate": {"size": 2, "workerTemplate": template}}
    cluster.api.apply([thing(LEADER_WORKER_SET, "LeaderWorkerSet", "set", content)], namespace)
    wait_for("one group", 90, lambda: len(running_pods(cluster, namespace)) == 2)

    kind = cluster.api.dynamic.resources.get(api_version=LEADER_WORKER_SET, kind="LeaderWorkerSet")
    for replicas, pods in ((2, 4), (1, 2)):
        patch = {"spec": {"replicas": replicas}}
        kind.scale.patch(name="set", namespace=namespace, body=patch, content_type="application/merge-patch+json")
        wait_for(f"{replicas} groups", 90, functools.partial(only_running, cluster, namespace, pods))


def test_kueue_holds_what_exceeds_the_quota_until_there_is_room(cluster: Cluster, namespace: str) -> None:
    cluster.wait_kueue()
    queue = f"queue-{secrets.token_hex(3)}"
    cluster.api.apply(queues(queue), namespace)
    try:
        cluster.api.apply([queued_job("first", queue, "sleep 300")], namespace)
        wait_for("the first job", 60, lambda: len(running_pods(cluster, namespace)) == 1)
        cluster.api.apply([queued_job("second", queue, "true")], namespace)
        held = wait_for("the second's workload", 30, lambda: pending(cluster, namespace, "second"))

        cluster.api.delete("batch/v1", "Job", "first", namespace)

        assert "insufficient unused quota" in held
        wait_for("the second job", 60, lambda: succeeded(cluster, namespace, "second"))
    finally:
        cluster.api.delete(KUEUE, "ClusterQueue", queue)
        cluster.api.delete(KUEUE, "ResourceFlavor", queue)


def test_components_listen_on_loopback_and_the_bridge_only(cluster: Cluster) -> None:
    allowed = {"127.0.0.1", "::1", layout.NODE_ADDRESS}

    for name in (*STORES, *ORDER_DOWN):
        component = process.running(name)
        assert component is not None, name
        for connection in component.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or (connection.laddr and not connection.raddr):
                assert connection.laddr.ip in allowed, (name, connection.laddr)


def test_other_machines_reach_neither_node_nor_services(
    cluster: Cluster, neighbour: Callable[[str, int], bool]
) -> None:
    with socket.create_server((NEIGHBOUR_GATEWAY, 0)) as control:
        assert neighbour(NEIGHBOUR_GATEWAY, control.getsockname()[1])

    for address, port in (
        (layout.NODE_ADDRESS, layout.API_PORT),
        (layout.NODE_ADDRESS, 10250),
        (layout.API_SERVICE, 443),
        (layout.S3_SERVICE, S3_PORT),
    ):
        assert not neighbour(address, port), f"{address}:{port} answers other machines"


def test_addresses_meet_no_other_network_of_this_machine(cluster: Cluster) -> None:
    ours = [ipaddress.ip_network(each) for each in (layout.POD_SUBNET, layout.SERVICE_SUBNET)]
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family.name == "AF_INET" and not name.startswith("veth"):
                assert not any(ipaddress.ip_address(each.address) in network for network in ours), (name, each.address)


def test_restart_keeps_the_state(cluster: Cluster, namespace: str, figures: dict[str, Any]) -> None:
    marker = thing("v1", "ConfigMap", "marker", {})
    marker.pop("spec")
    cluster.api.apply([{**marker, "data": {"kept": "yes"}}], namespace)
    bucket = s3_client(cluster, cluster.s3.secret_key)
    bucket.put_object(Bucket=cluster.s3.bucket, Key="kept", Body=b"yes")

    down()
    assert not any(process.running(name) for name in (*STORES, *ORDER_DOWN))
    assert layout.BRIDGE not in psutil.net_if_addrs()
    again = up()

    figures["cluster_restart_s"] = again.up_s
    kept = again.api.get("v1", "ConfigMap", "marker", namespace)
    assert kept is not None and kept["data"] == {"kept": "yes"}
    assert bucket.get_object(Bucket=cluster.s3.bucket, Key="kept")["Body"].read() == b"yes"
    assert run_pod(again, namespace, "true") == "Succeeded"


@pytest.fixture
def neighbour() -> Iterator[Callable[[str, int], bool]]:
    """Another machine on this one's network, as far as addresses go: says whether it can connect somewhere."""

    def ip(*arguments: str) -> None:
        subprocess.run([program("ip"), *arguments], check=True, timeout=30)

    def connects(address: str, port: int) -> bool:
        probe = f"import socket; socket.create_connection(({address!r}, {port}), 2)"
        inside = [program("ip"), "netns", "exec", NEIGHBOUR, sys.executable, "-c", probe]
        return subprocess.run(inside, stderr=subprocess.DEVNULL, timeout=30, check=False).returncode == 0

    ip("netns", "add", NEIGHBOUR)
    try:
        ip("link", "add", "tandem-out", "type", "veth", "peer", "name", "tandem-in", "netns", NEIGHBOUR)
        ip("address", "add", f"{NEIGHBOUR_GATEWAY}/30", "dev", "tandem-out")
        ip("link", "set", "tandem-out", "up")
        ip("-n", NEIGHBOUR, "address", "add", f"{NEIGHBOUR_ADDRESS}/30", "dev", "tandem-in")
        ip("-n", NEIGHBOUR, "link", "set", "tandem-in", "up")
        ip("-n", NEIGHBOUR, "route", "add", "default", "via", NEIGHBOUR_GATEWAY)
        yield connects
    finally:
        ip("netns", "delete", NEIGHBOUR)


def run_pod(cluster: Cluster, namespace: str, script: str) -> str:
    """Run a script in a pod named `once`; the pod's last phase."""
    pod = {**thing("v1", "Pod", "once", pod_template(script)["spec"])}
    cluster.api.apply([pod], namespace)

    def ended() -> str | None:
        found = cluster.api.get("v1", "Pod", "once", namespace)
        phase = found["status"].get("phase", "") if found else ""
        return phase if phase in ("Succeeded", "Failed") else None

    return wait_for("the pod's end", 60, ended)


def shell(script: str) -> dict[str, Any]:
    """A container with a shell that runs a script."""
    return {
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", f"trap 'exit 0' TERM; {script} & wait $!"],
        "resources": {"requests": {"cpu": "10m", "memory": "8Mi"}},
    }


def pod_template(script: str, restart: str = "Never") -> dict[str, Any]:
    """A pod template with that container."""
    return {"spec": {"restartPolicy": restart, "containers": [{"name": "main", **shell(script)}]}}


def thing(api_version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """An object with a specification."""
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def running_pods(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    """Pods that run and are not being deleted."""
    return [
        pod
        for pod in cluster.api.list("v1", "Pod", namespace)
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]


def only_running(cluster: Cluster, namespace: str, count: int) -> bool:
    """Whether exactly so many pods are there, all of them running."""
    return len(cluster.api.list("v1", "Pod", namespace)) == len(running_pods(cluster, namespace)) == count


def s3_client(cluster: Cluster, secret_key: str) -> Any:
    """A client on this machine."""
    return boto3.client(
        "s3",
        endpoint_url=cluster.s3.host_endpoint_url,
        aws_access_key_id=cluster.s3.access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
        config=Config(proxies={}),
    )


def executor_rights(namespace: str) -> list[dict[str, Any]]:
    """What Argo's executor needs in a namespace, for its default service account."""
    group = "rbac.authorization.k8s.io"
    rule = {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]}
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": "executor"}, "rules": [rule]}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "executor"},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "executor"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
    }
    return [role, binding]


def two_steps() -> dict[str, Any]:
    """A workflow whose second step gets what the first wrote, with an exit handler."""
    made = {"name": "make", "template": "make"}
    value = "{{steps.make.outputs.parameters.number}}"
    shown = {"name": "show", "template": "show", "arguments": {"parameters": [{"name": "number", "value": value}]}}
    outputs = {"parameters": [{"name": "number", "valueFrom": {"path": "/tmp/number"}}]}
    show = 'test "{{inputs.parameters.number}}" = 42'
    return {
        "apiVersion": WORKFLOW,
        "kind": "Workflow",
        "metadata": {"generateName": "two-steps-"},
        "spec": {
            "entrypoint": "main",
            "onExit": "bye",
            "templates": [
                {"name": "main", "steps": [[made], [shown]]},
                {"name": "make", "container": shell("echo 42 > /tmp/number"), "outputs": outputs},
                {"name": "show", "inputs": {"parameters": [{"name": "number"}]}, "container": shell(show)},
                {"name": "bye", "container": shell("echo {{workflow.status}}")},
            ],
        },
    }


def phase_in(cluster: Cluster, namespace: str, name: str, *phases: str) -> dict[str, Any] | None:
    """The workflow once it is in one of these phases."""
    found = cluster.api.get(WORKFLOW, "Workflow", name, namespace)
    return found if found and found.get("status", {}).get("phase") in phases else None


def queues(name: str) -> list[dict[str, Any]]:
    """A quota for one small job, and the way to it."""
    resources = [{"name": "cpu", "nominalQuota": "15m"}, {"name": "memory", "nominalQuota": "1Gi"}]
    covered = [{"coveredResources": ["cpu", "memory"], "flavors": [{"name": name, "resources": resources}]}]
    return [
        thing(KUEUE, "ResourceFlavor", name, {}),
        thing(KUEUE, "ClusterQueue", name, {"namespaceSelector": {}, "resourceGroups": covered}),
        thing(KUEUE, "LocalQueue", name, {"clusterQueue": name}),
    ]


def queued_job(name: str, queue: str, script: str) -> dict[str, Any]:
    """A job that waits in a queue."""
    job = thing("batch/v1", "Job", name, {"suspend": True, "template": pod_template(script)})
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue}
    return job


def pending(cluster: Cluster, namespace: str, job: str) -> str:
    """Why Kueue holds a job; empty when it does not."""
    for each in cluster.api.list(KUEUE, "Workload", namespace):
        owners = [owner["name"] for owner in each["metadata"].get("ownerReferences", [])]
        for condition in each.get("status", {}).get("conditions", []) if job in owners else []:
            if condition["type"] == "QuotaReserved" and condition["status"] == "False":
                return str(condition["message"])
    return ""


def succeeded(cluster: Cluster, namespace: str, job: str) -> bool:
    """Whether a job has ended well."""
    found = cluster.api.get("batch/v1", "Job", job, namespace)
    return bool(found and found["status"].get("succeeded"))
