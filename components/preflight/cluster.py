"""What must hold in the cluster before rl_loop creates its pods: kinds, rights, the password, pods that fit their nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from components.cluster.api import Access, Cluster
from components.rl_loop.objects import JOBSET, LEADER_WORKER_SET
from configs.failure import BadConfig
from configs.hardware import load_hardware, objections
from configs.run import RunConfig

KINDS = ((JOBSET, "JobSet"), (LEADER_WORKER_SET, "LeaderWorkerSet"))
CHANGED = (
    ("jobset.x-k8s.io", "jobsets"),
    ("leaderworkerset.x-k8s.io", "leaderworkersets"),
    ("apps", "statefulsets"),
    ("", "services"),
    ("", "configmaps"),
    ("coordination.k8s.io", "leases"),
)
READ = (("", "pods"), ("", "events"), ("jobset.x-k8s.io", "jobsets"))
"""What the loop's ServiceAccount must be able to change, and to read."""


def check_cluster(config: RunConfig, cluster: Cluster) -> None:
    """Refuse a run whose pods could not be created or would stay pending.

    Raises:
        BadConfig: a pod asks for what its nodes have not; a kind, a right or the password is missing.
    """
    for objection in pod_objections(config):
        raise BadConfig(objection)
    if not os.environ.get("REDIS_PASSWORD"):
        raise BadConfig("REDIS_PASSWORD is empty; create secret tandem-redis with the key password (docs/cluster.md)")
    for api_version, kind in KINDS:
        cluster.get(api_version, kind, config.name)
    wanted = [
        (group, resource, verb)
        for group, resource in CHANGED
        # A claim is replaced as it was read, everything else is applied.
        for verb in ("create", "update" if resource == "leases" else "patch", "delete")
    ]
    wanted += [(group, resource, "list") for group, resource in READ] + [("", "pods/log", "get")]
    for group, resource, verb in wanted:
        if not cluster.allowed(Access(verb, group, resource)):
            raise BadConfig(
                f"this ServiceAccount may not {verb} {resource} in namespace {cluster.namespace}; `tandem install` gives"
                " it its rights"
            )


def pod_objections(config: RunConfig) -> Iterator[str]:
    """Why pods of the run would stay pending, or not do what is asked."""
    for role in ("train", "rollout", "reward", "broadcast"):
        pods = getattr(config.kubernetes, role)
        hardware = load_hardware(pods.hardware or config.hardware)
        for objection in objections(hardware, pods):
            yield f"kubernetes.{role}: {objection}"
        if pods.capacity and hardware.capacity_types and pods.capacity not in hardware.capacity_types:
            yield f"kubernetes.{role}.capacity is {pods.capacity}, which {hardware.name} is not sold as; choose another"
        if pods.nodes > 1 and role != "train":
            yield f"kubernetes.{role}.nodes is {pods.nodes}, but {role} is one process so far; set 1"
    pods, ranks = config.kubernetes.train, config.train.ranks
    if pods.gpus and ranks > pods.nodes * pods.gpus:
        yield (
            f"train.ranks is {ranks}, but kubernetes.train has {pods.nodes * pods.gpus} GPUs for them; lower the ranks, or"
            " raise nodes or gpus"
        )
