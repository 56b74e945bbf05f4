"""The cluster as a whole: start it, stop it, and what tests do with it.

`python -m tests.cluster.cluster up | down | status` from the root of the checkout.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import json
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import boto3
import botocore.exceptions
import click
import filelock
import httpx
from botocore.config import Config

from configs.failure import Failure, ServiceGone
from configs.stack import Images
from tests.cluster import binaries, built_images, components, host, image, infrastructure, layout, pki, process
from tests.cluster.api import Api, wait_for

UP_LIMIT_S = 2400
READY_LIMIT_S = 120
ORDER_DOWN = ("kubelet", "kube-scheduler", "kube-controller-manager", "kube-proxy", "coredns")
STORES = ("kube-apiserver", "etcd", "containerd")
_TIMES = "up.json"


class Cluster:
    """A running cluster with the rights of its administrator."""

    kubeconfig: Path = layout.KUBECONFIG
    context: str = layout.NAME

    def __init__(self) -> None:
        """Connect; the cluster must be up."""
        self.api = Api(self.kubeconfig, self.context)
        self.s3 = infrastructure.s3()

    @property
    def up_s(self) -> float | None:
        """Seconds of the last start, without the build; None if it was not seen through."""
        times = layout.STATE / _TIMES
        return float(json.loads(times.read_text())["seconds"]) if times.exists() else None

    def namespace(self, prefix: str, labels: dict[str, str] | None = None) -> str:
        """Make a namespace with a name of its own and, by labels, a Pod Security level; returns the name."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        metadata = {"name": name, "labels": labels or {}}
        self.api.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}])
        wait_for(
            f"the service account of {name}",
            READY_LIMIT_S,
            lambda: self.api.get("v1", "ServiceAccount", "default", name),
        )
        return name

    def delete_namespace(self, name: str) -> None:
        """Delete a namespace with all that is in it, without waiting."""
        self.api.delete("v1", "Namespace", name)

    def import_image(self, archive: Path) -> list[str]:
        """Import an OCI or Docker archive into the node; returns the references it brought."""
        return image.import_archive(archive)

    def load_built_images(self) -> Images:
        """Build the project's images if need be (minutes), import those the node lacks; returns the references."""
        return built_images.load()

    def wait_kueue(self) -> None:
        """Wait for Kueue, which `up` does not."""
        infrastructure.wait_kueue(self.api)

    def logs(self, namespace: str, pod: str, container: str | None = None) -> str:
        """What a container wrote so far."""
        return str(self.api.core.read_namespaced_pod_log(pod, namespace, container=container))


def up() -> Cluster:
    """Build, start and fill the cluster as far as it is not; returns it ready.

    Raises:
        BadConfig: This machine cannot carry it.
        ServiceGone: A component ended or did not become ready.
    """
    layout.CACHE.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(layout.CACHE / "cluster.lock", timeout=UP_LIMIT_S):
        # A build takes up to 20 minutes; what this machine cannot do is told before it.
        host.equip()
        binaries.build()
        started = time.monotonic()
        before = _state()
        layout.STATE.mkdir(exist_ok=True)
        host.prepare()
        pki.write()
        components.write_configurations()
        cluster = Cluster()
        if before != "running":
            _start_control_plane(cluster.api)
            _start_node(cluster.api)
        installed = layout.STATE / "installed"
        if not installed.exists() or installed.read_text() != infrastructure.digest():
            cluster.api.forget()
            with concurrent.futures.ThreadPoolExecutor() as pool:
                imported = pool.submit(lambda: image.import_programs(infrastructure.images()))
                infrastructure.install(cluster.api)
                imported.result()
            _say(started, "controllers applied")
        infrastructure.wait_ready(cluster.api)
        _make_bucket(cluster)
        if not installed.exists() or installed.read_text() != infrastructure.digest():
            infrastructure.install_kueue(cluster.api)
            installed.write_text(infrastructure.digest())
        if before != "running":
            seconds = round(time.monotonic() - started, 1)
            (layout.STATE / _TIMES).write_text(json.dumps({"seconds": seconds, "from": before}))
            _say(started, f"ready; export KUBECONFIG={layout.KUBECONFIG}")
    return cluster


def down(wipe: bool = False) -> None:
    """Stop everything; with `wipe`, forget the cluster's state and outdated builds as well."""
    layout.CACHE.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(layout.CACHE / "cluster.lock", timeout=UP_LIMIT_S):
        process.stop(*ORDER_DOWN)
        if process.running("containerd"):
            image.remove_containers()
        # The API server would wait for watchers to leave, which they don't; what it keeps is in the store.
        process.stop("kube-apiserver", limit_s=1)
        process.stop(*STORES)
        process.stop_shims()
        host.undo()
        shutil.rmtree(layout.SOCKETS, ignore_errors=True)
        if wipe:
            layout.KUBECONFIG.unlink(missing_ok=True)
            if layout.STATE.exists():
                shutil.rmtree(layout.STATE)
            binaries.remove_outdated()


def _state() -> str:
    """`running`, `damaged` (a component ended), `stopped` or `wiped`."""
    alive = [name for name in (*ORDER_DOWN, *STORES) if process.running(name)]
    if alive:
        return "running" if len(alive) == len(ORDER_DOWN) + len(STORES) else "damaged"
    return "stopped" if layout.pki("complete").exists() else "wiped"


def _start_control_plane(api: Api) -> None:
    started = time.monotonic()
    for each in (components.etcd(), components.containerd()):
        each.start()
    server = components.api_server()
    server.start()
    api.forget()

    def ready() -> bool:
        server.check()
        return api.ready()

    wait_for("the API server", READY_LIMIT_S, ready)
    _say(started, "API server ready")


def _start_node(api: Api) -> None:
    started = time.monotonic()
    for each in (components.controller_manager(), components.scheduler()):
        each.start()
    runtime = components.containerd()

    def answers() -> bool:
        runtime.check()
        try:
            image.present()
            return True
        except ServiceGone:
            return False

    wait_for("containerd", READY_LIMIT_S, answers)
    pause = image.ProgramImage(image.PAUSE, binaries.PARTS["pause"].binary(), "/pause")
    image.import_programs([pause])
    for each in (components.kubelet(), components.proxy(), components.coredns()):
        each.start()
    wait_for("the node", READY_LIMIT_S, lambda: _node_ready(api))
    wait_for("DNS", READY_LIMIT_S, _dns_ready)
    _say(started, "node ready")


def _node_ready(api: Api) -> bool:
    components.kubelet().check()
    node = api.get("v1", "Node", layout.NAME)
    lease = api.get("coordination.k8s.io/v1", "Lease", layout.NAME, "kube-node-lease")
    if not node or not lease or not api.get("v1", "ServiceAccount", "default", "default"):
        return False
    # A status outlives a stop; the lease tells that this kubelet wrote since it started.
    kubelet = process.running("kubelet")
    renewed = datetime.datetime.fromisoformat(lease["spec"]["renewTime"]).timestamp()
    conditions = {each["type"]: each["status"] for each in node["status"].get("conditions", [])}
    return kubelet is not None and renewed > kubelet.create_time() and conditions.get("Ready") == "True"


def _dns_ready() -> bool:
    components.coredns().check()
    try:
        return httpx.get(f"http://127.0.0.1:{layout.DNS_HEALTH_PORT}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _make_bucket(cluster: Cluster) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=cluster.s3.host_endpoint_url,
        aws_access_key_id=cluster.s3.access_key,
        aws_secret_access_key=cluster.s3.secret_key,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10, proxies={}),
    )

    def made() -> bool:
        try:
            held = {each["Name"] for each in client.list_buckets()["Buckets"]}
            if cluster.s3.bucket not in held:
                client.create_bucket(Bucket=cluster.s3.bucket)
            client.put_object(Bucket=cluster.s3.bucket, Key="ready", Body=b"")
            return True
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            return False

    wait_for("the S3 server", READY_LIMIT_S, made)


def _say(started: float, words: str) -> None:
    print(f"tandem: cluster: {words} ({time.monotonic() - started:.1f} s)", file=sys.stderr, flush=True)


@click.group()
def main() -> None:
    """A real single-node Kubernetes with Argo Workflows, JobSet, LeaderWorkerSet, Kueue and S3, for tests."""


def _sentence(command: Callable[..., None]) -> Callable[..., None]:
    """End with the failure's sentence and exit code instead of a traceback."""

    @functools.wraps(command)
    def run(**options: object) -> None:
        try:
            command(**options)
        except Failure as failure:
            click.echo(f"tandem: {failure.sentence}", err=True)
            sys.exit(failure.exit_code)

    return run


@main.command("up")
@click.option("--kueue", is_flag=True, help="Wait for Kueue too.")
@click.option("--images", is_flag=True, help="Build the project's images and load them too.")
@_sentence
def _up(kueue: bool, images: bool) -> None:
    """Build what is missing, start the cluster and wait until it is ready."""
    cluster = up()
    if images:
        cluster.load_built_images()
    if kueue:
        cluster.wait_kueue()


@main.command("down")
@click.option("--wipe", is_flag=True, help="Forget its state and outdated builds too.")
@_sentence
def _down(wipe: bool) -> None:
    """Stop the cluster; its state stays unless wiped."""
    down(wipe)


@main.command("status")
@_sentence
def _status() -> None:
    """Say what runs and how much memory it holds."""
    total = 0
    for name in (*STORES, *ORDER_DOWN):
        found = process.running(name)
        held = found.memory_info().rss if found else 0
        total += held
        click.echo(f"{name:24} {'pid ' + str(found.pid) if found else 'not running':14} {held / 2**20:6.0f} MiB")
    click.echo(f"{'all of them':39} {total / 2**20:6.0f} MiB")
    if _state() != "running":
        raise ServiceGone("the cluster is not up; `make cluster-up` starts what does not run")
    for deployment in Cluster().api.list("apps/v1", "Deployment"):
        metadata, held = deployment["metadata"], deployment["status"].get("availableReplicas", 0)
        click.echo(f"{metadata['namespace'] + '/' + metadata['name']:48} {held}/{deployment['spec']['replicas']} ready")


if __name__ == "__main__":
    main()
