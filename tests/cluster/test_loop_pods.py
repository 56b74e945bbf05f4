"""The loop's objects on a real API server: accepted as they are, and what keeps a pod from starting reaches the user."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.rl_loop.cluster import LoopCluster
from components.rl_loop.kubernetes import LoopPods, redis_url
from components.rl_loop.objects import JOBSET
from components.role import Inputs
from components.storage.layout import RunLayout
from configs.failure import BadConfig, Failure, ServiceGone
from configs.run import RunConfig

GOLDEN = Path(__file__).parents[1] / "rl_loop" / "golden"
LIMIT_S = 60.0


@pytest.mark.parametrize("name", ["laptop", "p5en"])
def test_the_server_accepts_every_object(cluster: Any, namespace: str, figures: dict[str, Any], name: str) -> None:
    objects = list(yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()))
    for each in objects:
        each["metadata"].pop("ownerReferences", None)
        if each["kind"] == "ConfigMap":
            each["data"] = {"config.json": "{}"}
    applied = cluster.api.apply(objects, namespace, dry_run=True)
    assert applied == len(objects) == 5
    figures["objects_accepted"] = figures.get("objects_accepted", 0) + applied


class Pods:
    """The pods of a loop whose launcher is this test."""

    def __init__(self, cluster: Any, namespace: str, scratch: Path, **kubernetes: Any) -> None:
        images = dict.fromkeys(("control", "train", "rollout"), "localhost/tandem/absent:1")
        config = RunConfig.model_validate(
            {
                "name": "pods",
                "storage": {"root": "s3://bucket/runs", "scratch": str(scratch)},
                "loop": {"roles": "kubernetes"},
                "kubernetes": {"images": images, "service_account": "default", **kubernetes},
            }
        )
        place = {"namespace": namespace, "context": cluster.context, "kubeconfig": cluster.kubeconfig}
        connections = [LoopCluster(**place) for _ in range(2)]
        self.api = cluster.api
        self.namespace = namespace
        inputs = Inputs(redis_url(config), "s3://bucket/data", "s3://bucket/start")
        self.pods = LoopPods(config, RunLayout(config), inputs, "run", *connections)

    def failure(self) -> Failure:
        """What ends the loop."""
        self.pods.open(lambda: None)
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            try:
                self.pods.check()
            except Failure as failure:
                return failure
            time.sleep(0.2)
        raise AssertionError("nothing was told")

    def secret(self) -> None:
        self.api.apply(
            [
                {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "metadata": {"name": "tandem-redis"},
                    "stringData": {"password": "p"},
                }
            ],
            self.namespace,
        )


def test_an_image_that_is_not_there(cluster: Any, namespace: str, tmp_path: Path) -> None:
    failure = Pods(cluster, namespace, tmp_path, pull_policy="Never").failure()
    assert isinstance(failure, BadConfig)
    assert "cannot get its image localhost/tandem/absent:1" in failure.sentence


def test_an_image_that_cannot_be_pulled(cluster: Any, namespace: str, tmp_path: Path) -> None:
    failure = Pods(cluster, namespace, tmp_path).failure()
    assert isinstance(failure, BadConfig)
    assert "cannot get its image localhost/tandem/absent:1" in failure.sentence


def test_a_pod_that_fits_no_node(cluster: Any, namespace: str, tmp_path: Path) -> None:
    pods = Pods(cluster, namespace, tmp_path, train={"cpu_millicores": 64_000, "memory_mib": 64}, ready_s=12)
    failure = pods.failure()
    assert isinstance(failure, (ServiceGone, BadConfig))
    if isinstance(failure, ServiceGone):
        assert "Insufficient cpu" in failure.sentence


def test_a_quota_that_is_used_up(cluster: Any, namespace: str, tmp_path: Path) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    cluster.api.apply([quota], namespace)
    failure = Pods(cluster, namespace, tmp_path).failure()
    assert isinstance(failure, BadConfig)
    assert "exceeded quota" in failure.sentence


def test_a_second_loop_of_the_run_is_refused_while_the_first_lives(
    cluster: Any, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "first"},
        "spec": {"containers": [{"name": "c", "image": "localhost/tandem/absent:1", "imagePullPolicy": "Never"}]},
    }  # fmt: skip
    cluster.api.apply([pod], namespace)
    monkeypatch.setenv("HOSTNAME", "first")
    Pods(cluster, namespace, tmp_path).pods.open(lambda: None)
    monkeypatch.setenv("HOSTNAME", "second")
    second = Pods(cluster, namespace, tmp_path)
    with pytest.raises(BadConfig, match="alive in pod first"):
        second.pods.claim.take(2, lambda: None)
    # Whatever it does on its way out leaves what it does not own.
    second.pods.cancel()
    second.pods.stop()
    second.pods.remove(finished=False)
    assert cluster.api.get(JOBSET, "JobSet", "pods", namespace)
    assert cluster.api.get("coordination.k8s.io/v1", "Lease", "pods", namespace)
    # Its pod is gone: nobody has to wait until the claim lapses.
    cluster.api.core.delete_namespaced_pod("first", namespace, grace_period_seconds=0)
    third = Pods(cluster, namespace, tmp_path)
    third.pods.claim.take(10, lambda: None)


def test_what_runs_is_adopted_and_what_differs_is_replaced(cluster: Any, namespace: str, tmp_path: Path) -> None:
    def uid(**kubernetes: Any) -> tuple[bool, str]:
        pods = Pods(cluster, namespace, tmp_path, **kubernetes)
        pods.pods.open(lambda: None)
        found = cluster.api.get(JOBSET, "JobSet", "pods", namespace)
        return pods.pods.adopted, found["metadata"]["uid"]

    created, first = uid()
    adopted, second = uid()
    assert (created, adopted) == (False, True) and first == second
    replaced, third = uid(grace_s=7)
    assert not replaced and third != first


def test_one_delete_takes_everything_along(cluster: Any, namespace: str, tmp_path: Path) -> None:
    pods = Pods(cluster, namespace, tmp_path)
    pods.pods.open(lambda: None)
    kinds = {JOBSET: "JobSet", "leaderworkerset.x-k8s.io/v1": "LeaderWorkerSet", "apps/v1": "StatefulSet"}
    assert all(cluster.api.list(api, kind, namespace, "tandem.run=pods") for api, kind in kinds.items())
    pods.pods.cancel()
    kinds |= {"batch/v1": "Job", "coordination.k8s.io/v1": "Lease"}
    end = time.monotonic() + LIMIT_S
    while any(cluster.api.list(api, kind, namespace, "tandem.run=pods") for api, kind in kinds.items()):
        assert time.monotonic() < end, "objects are left"
        time.sleep(0.2)
