"""The Kubernetes objects of one loop, rendered from its configuration: pure data, nothing is sent.

A JobSet holds training, reward and broadcast, a LeaderWorkerSet the rollout engines, a StatefulSet Redis. All bear the
run's name. The JobSet owns the rest, so that deleting it, or its end by TTL, takes everything along.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from components.role import Inputs
from configs.failure import BAD_CONFIG, BAD_DATA, TOLD_TO_LEAVE
from configs.hardware import load_hardware
from configs.kubernetes import RolePods
from configs.run import RunConfig
from configs.stack import Images, load_stack

JOBSET = "jobset.x-k8s.io/v1alpha2"
LEADER_WORKER_SET = "leaderworkerset.x-k8s.io/v1"
RUN_LABEL = "tandem.run"
"""Label with the run's name on every object and pod of a loop."""
ROLE_LABEL = "app.kubernetes.io/component"
INPUTS = "tandem.run/inputs"
"""Annotation with the digest of what a JobSet was made from: an equal one is adopted, another one replaced."""
USER = 10001
"""User and group of the images; no pod runs as root."""
REDIS_PORT = 6379
LAST_S = 3
"""Seconds that Redis outlives the order to end."""
RENDEZVOUS_PORT = 29500
CONFIG_FOLDER = "/etc/tandem"
GRAPHICS_TAINT, EFA, SPOT_TAINT = "nvidia.com/gpu", "vpc.amazonaws.com/efa", "tandem.run/spot"
GDR_DEVICE = "/dev/gdrdrv"

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Identity:
    """Ids of the execution, forwarded to every pod."""

    tracking_run: str
    """Run on the tracking server."""
    job: str = ""
    """Id that Kubeflow Pipelines or Argo gave the execution."""


class LoopObjects:
    """Renders the objects of one run's loop.

    Args:
        config: The run's configuration.
        inputs: What the roles are started with.
        identity: Ids to forward.
    """

    def __init__(self, config: RunConfig, inputs: Inputs, identity: Identity) -> None:
        self.config = config
        self.settings = config.kubernetes
        self.inputs = inputs
        self.identity = identity
        self.images: Images = self.settings.images or load_stack(config.stack).images

    @property
    def digest(self) -> str:
        """Digest of everything that decides what the pods do; a retry is another job and does the same."""
        same = LoopObjects(self.config, self.inputs, Identity(self.identity.tracking_run))
        rendered = [same._jobset(), *same.owned()]
        return hashlib.sha256(json.dumps(rendered, sort_keys=True).encode()).hexdigest()[:16]

    def jobset(self, owner: Object | None = None) -> Object:
        """The JobSet, owned by `owner` (an owner reference) if there is one."""
        made = self._jobset()
        made["metadata"]["annotations"] = {INPUTS: self.digest}
        if owner is not None:
            made["metadata"]["ownerReferences"] = [owner]
        return made

    def owned(self, owner: Object | None = None) -> list[Object]:
        """Everything else: configuration, Redis and its address, the rollout engines."""
        made = [self._configuration(), self._redis_service(), self._redis(), self._rollout()]
        if owner is not None:
            for each in made:
                each["metadata"]["ownerReferences"] = [owner]
        return made

    def _jobset(self) -> Object:
        settings = self.settings
        gang = settings.train.nodes > 1
        # Only a collective transfer needs torch there.
        broadcast = self.images.train if self.config.collective else self.images.control
        jobs = [
            self._job(
                "train", self.images.train, settings.train, restarts=0 if gang else self.config.loop.max_restarts
            ),
            self._job("reward", self.images.control, settings.reward, restarts=self.config.loop.max_restarts),
            self._job("broadcast", broadcast, settings.broadcast, restarts=self.config.loop.max_restarts),
        ]
        if settings.exclusive_topology:
            topology = {"alpha.jobset.sigs.k8s.io/exclusive-topology": settings.exclusive_topology}
            jobs[0]["template"]["metadata"]["annotations"] = topology
        return {
            "apiVersion": JOBSET,
            "kind": "JobSet",
            "metadata": self._metadata(self.config.name, queued=True),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": self.config.name},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": ["train"]},
                # A lone process is restarted by its Job; the ranks of a gang only together.
                "failurePolicy": {
                    "maxRestarts": self.config.loop.max_restarts if gang else 0,
                    # What a restart cannot mend, by the exit codes that fail a Job at once.
                    "rules": [
                        {"name": "hopeless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                    ],
                },
                "ttlSecondsAfterFinished": settings.ttl_s,
                "replicatedJobs": jobs,
            },
        }

    def _job(self, role: str, image: str, pods: RolePods, restarts: int) -> Object:
        arguments = ["--worker", role]
        template = self._pod(role, image, pods, [f"components.{role}.main", *arguments])
        template["spec"]["restartPolicy"] = "Never"
        if pods.nodes > 1:
            ranks = self.config.train.ranks // pods.nodes if role == "train" else 0
            template["spec"]["containers"][0]["env"] += self._gang(role, pods, ranks)
        rules = [
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": role, "operator": "In", "values": [BAD_CONFIG, BAD_DATA]},
            },
            {"action": "Ignore", "onExitCodes": {"containerName": role, "operator": "In", "values": [TOLD_TO_LEAVE]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
        return {
            "name": role,
            "replicas": 1,
            "template": {
                "metadata": {"labels": self._labels(role)},
                "spec": {
                    "parallelism": pods.nodes,
                    "completions": pods.nodes,
                    "completionMode": "Indexed",
                    "backoffLimit": restarts,
                    "podFailurePolicy": {"rules": rules},
                    "template": template,
                },
            },
        }

    def _gang(self, role: str, pods: RolePods, ranks: int = 0) -> list[Object]:
        """Where the ranks of a gang meet, under torchrun's names; with 0 there is a rank a GPU."""
        name = self.config.name
        index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        return [
            {"name": "PET_NNODES", "value": str(pods.nodes)},
            {"name": "PET_NPROC_PER_NODE", "value": str(ranks or max(1, pods.gpus))},
            {"name": "PET_NODE_RANK", "valueFrom": index},
            {"name": "PET_MASTER_ADDR", "value": f"{name}-{role}-0-0.{name}"},
            {"name": "PET_MASTER_PORT", "value": str(RENDEZVOUS_PORT)},
        ]

    def _rollout(self) -> Object:
        pods = self.settings.rollout
        template = self._pod(
            "rollout", self.images.rollout, pods, ["components.rollout.main", "--worker", "rollout-$(ENGINE)"]
        )
        index = {"fieldRef": {"fieldPath": "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
        template["spec"]["containers"][0]["env"].append({"name": "ENGINE", "valueFrom": index})
        return {
            "apiVersion": LEADER_WORKER_SET,
            "kind": "LeaderWorkerSet",
            "metadata": self._metadata(f"{self.config.name}-rollout", "rollout", queued=True),
            "spec": {
                "replicas": self.config.rollout.workers,
                "leaderWorkerTemplate": {
                    "size": pods.nodes,
                    # An engine of one pod restarts in place, where its last words stay readable.
                    "restartPolicy": "RecreateGroupOnPodRestart" if pods.nodes > 1 else "None",
                    "workerTemplate": template,
                },
            },
        }

    def _redis(self) -> Object:
        settings, name = self.settings, f"{self.config.name}-redis"
        template = self._pod("redis", self.images.control, settings.redis, ["components.experience.serve"], role=False)
        container = template["spec"]["containers"][0]
        container["ports"] = [{"name": "redis", "containerPort": REDIS_PORT}]
        container["readinessProbe"] = {"tcpSocket": {"port": REDIS_PORT}, "periodSeconds": 1}
        # When all is deleted at once, the roles hand back their work to a Redis that is still there.
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": LAST_S}}}
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
        made: Object = {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": self._metadata(name, "redis"),
            "spec": {
                "replicas": 1,
                "serviceName": name,
                "selector": {"matchLabels": {RUN_LABEL: self.config.name, ROLE_LABEL: "redis"}},
                "template": template,
            },
        }
        if settings.redis_storage_gib:
            claim: Object = {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": f"{settings.redis_storage_gib}Gi"}},
            }
            if settings.storage_class:
                claim["storageClassName"] = settings.storage_class
            made["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": claim}]
            template["spec"]["volumes"] = []
        else:
            template["spec"]["volumes"] = [{"name": "data", "emptyDir": {}}]
        return made

    def _redis_service(self) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(f"{self.config.name}-redis", "redis"),
            "spec": {
                "selector": {RUN_LABEL: self.config.name, ROLE_LABEL: "redis"},
                "ports": [{"name": "redis", "port": REDIS_PORT, "targetPort": REDIS_PORT}],
            },
        }

    def _configuration(self) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(f"{self.config.name}-config"),
            "data": {"config.json": self.config.to_json()},
        }

    def _metadata(self, name: str, role: str = "rl_loop", queued: bool = False) -> Object:
        labels = self._labels(role)
        if queued and self.settings.queue:
            labels["kueue.x-k8s.io/queue-name"] = self.settings.queue
        return {"name": name, "labels": labels}

    def _labels(self, role: str) -> dict[str, str]:
        return {"app.kubernetes.io/name": "tandem", ROLE_LABEL: role, RUN_LABEL: self.config.name}

    def _pod(self, name: str, image: str, pods: RolePods, module: list[str], role: bool = True) -> Object:
        """Pod template of one role (or of Redis, which needs only its password)."""
        hardware = load_hardware(pods.hardware or self.config.hardware)
        container: Object = {
            "name": name,
            "image": image,
            "imagePullPolicy": self.settings.pull_policy,
            "command": ["python3", "-m", *module],
            "env": [
                {"name": "REDIS_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "tandem-redis", "key": "password"}}}
            ],
            "resources": _resources(pods),
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            # So that the sentence a role ends with is in the pod's status.
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        spec: Object = {
            "serviceAccountName": self.settings.service_account,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": self.settings.grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        }
        if role:
            container["command"] += ["--config", f"{CONFIG_FOLDER}/config.json", *self.inputs.arguments()]
            self._give_role(container, spec, pods, hardware.shared_memory_gib)
        spec |= self._placement(name, pods, hardware.instance_type)
        return {"metadata": {"labels": self._labels(name)}, "spec": spec}

    def _give_role(self, container: Object, spec: Object, pods: RolePods, shared_memory_gib: float) -> None:
        """Environment and volumes of a role."""
        container["env"] += [
            {"name": "MLFLOW_RUN_ID", "value": self.identity.tracking_run},
            {"name": "KFP_RUN_ID", "value": self.identity.job},
        ]
        if not pods.gpus:
            container["env"].append({"name": "OMP_NUM_THREADS", "value": "1"})
        container["envFrom"] = [
            {"configMapRef": {"name": "tandem", "optional": True}},
            *({"secretRef": {"name": name, "optional": True}} for name in ("tandem-s3", "tandem-reward")),
        ]
        mounts = [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "scratch", "mountPath": self.config.storage.scratch},
        ]
        volumes: list[Object] = [
            {"name": "config", "configMap": {"name": f"{self.config.name}-config"}},
            {"name": "scratch", "emptyDir": {}},
        ]
        if shared_memory_gib:
            mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
            limit = {"medium": "Memory", "sizeLimit": f"{shared_memory_gib:g}Gi"}
            volumes.append({"name": "shared-memory", "emptyDir": limit})
        if pods.gpus and self.settings.gdrcopy == "host-path":
            mounts.append({"name": "gdrcopy", "mountPath": GDR_DEVICE})
            volumes.append({"name": "gdrcopy", "hostPath": {"path": GDR_DEVICE, "type": "CharDevice"}})
            # A device of a host path is open to privileged containers only.
            container["securityContext"] = {"privileged": True}
        container["volumeMounts"], spec["volumes"] = mounts, volumes

    def _placement(self, name: str, pods: RolePods, instance_type: str) -> Object:
        selector = dict(pods.node_selector)
        if instance_type:
            selector["node.kubernetes.io/instance-type"] = instance_type
        if pods.capacity:
            selector["karpenter.sh/capacity-type"] = pods.capacity
        taints = [GRAPHICS_TAINT] * bool(pods.gpus) + [EFA] * bool(pods.efa_interfaces)
        taints += [SPOT_TAINT] * (pods.capacity == "spot")
        made: Object = {}
        if selector:
            made["nodeSelector"] = selector
        if taints:
            made["tolerations"] = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints]
        if pods.one_zone:
            term = {
                "topologyKey": "topology.kubernetes.io/zone",
                "labelSelector": {"matchLabels": {RUN_LABEL: self.config.name, ROLE_LABEL: name}},
            }
            made["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        return made


def _resources(pods: RolePods) -> Object:
    """Requests and limits: devices and huge pages must be equal in both, memory is, CPU has no limit."""
    fixed = {
        "memory": f"{pods.memory_mib}Mi" if pods.memory_mib else "",
        "hugepages-2Mi": f"{pods.hugepages_mib}Mi" if pods.hugepages_mib else "",
        GRAPHICS_TAINT: str(pods.gpus) if pods.gpus else "",
        EFA: str(pods.efa_interfaces) if pods.efa_interfaces else "",
    }
    fixed = {name: amount for name, amount in fixed.items() if amount}
    requests = ({"cpu": f"{pods.cpu_millicores}m"} if pods.cpu_millicores else {}) | fixed
    return {"requests": requests, "limits": fixed}
