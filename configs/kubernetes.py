"""KubernetesConfig: what the pods of the loop ask for when rl_loop creates them on a cluster."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.document import Document
from configs.hardware import PodRequest, load_hardware, objections
from configs.stack import Images

NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"


class RolePods(PodRequest):
    """Pods of one role: what each asks for, and on which nodes it may run."""

    nodes: int = Field(default=1, ge=1)
    """Pods that belong together: ranks of the training gang, or of one rollout engine."""
    hardware: str = ""
    """Hardware profile of the nodes (configs/hardware); empty takes the run's `hardware`."""
    capacity: Literal["", "on-demand", "spot", "reserved"] = ""
    """How the nodes are bought, as Karpenter labels them; empty leaves it to the scheduler."""
    node_selector: dict[str, str] = {}
    """Labels a node must have, beside those that the hardware profile and `capacity` ask for."""


def _pods(cpu_millicores: int, memory_mib: int) -> RolePods:
    return RolePods(cpu_millicores=cpu_millicores, memory_mib=memory_mib)


class KubernetesConfig(Document):
    """The loop on Kubernetes: a JobSet, a LeaderWorkerSet and a Redis, all named after the run."""

    images: Images | None = None
    """Images of the pods; empty takes the stack's. `tandem submit` puts in what the image build wrote."""
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    service_account: str = Field(default="tandem-role", pattern=NAME)
    """ServiceAccount of the roles: no rights in the cluster; on EKS its IAM role opens S3."""
    queue: str = Field(default="", pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?$")
    """Kueue LocalQueue that admits the pods; empty leaves Kueue out."""
    train: RolePods = _pods(300, 2048)
    rollout: RolePods = _pods(300, 2048)
    """One engine; `rollout.workers` of them run."""
    reward: RolePods = _pods(100, 1024)
    broadcast: RolePods = _pods(100, 1024)
    redis: RolePods = _pods(50, 256)
    redis_storage_gib: int = Field(default=0, ge=0)
    """Size of Redis' volume in GiB; 0 keeps its data in the pod, with whose loss the run goes back to the last checkpoint."""
    storage_class: str = ""
    """StorageClass of that volume; empty takes the cluster's default."""
    exclusive_topology: str = ""
    """Node label of which the training gang takes a whole domain for itself (JobSet), or empty."""
    gdrcopy: Literal["none", "device-plugin", "host-path"] = "none"
    """How /dev/gdrdrv reaches the GPU pods: not, by the NVIDIA device plugin (`gdrcopyEnabled`), or by a host path, which
    Kubernetes grants to privileged containers only."""
    ready_s: float = Field(default=900.0, gt=0)
    """Seconds a pod may wait for a node and its image before the run ends with the reason."""
    queue_s: float = Field(default=86_400.0, gt=0)
    """Seconds the queue may take to admit the pods."""
    orphan_s: float = Field(default=120.0, ge=15)
    """Seconds without a sign of the launcher after which the pods end by themselves; a retry in time goes on with them."""
    ttl_s: int = Field(default=300, ge=0)
    """Seconds Kubernetes keeps a finished JobSet, and with it everything it owns."""
    grace_s: int = Field(default=30, ge=1)
    """Seconds a pod has between SIGTERM and SIGKILL; training writes a checkpoint in that time."""

    @model_validator(mode="after")
    def _fits(self) -> KubernetesConfig:
        for role in ("train", "rollout", "reward", "broadcast"):
            pods = getattr(self, role)
            if pods.hardware:
                for objection in objections(load_hardware(pods.hardware), pods):
                    raise ValueError(f"{role}: {objection}")
        return self
