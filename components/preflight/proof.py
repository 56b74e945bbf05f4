"""The proof of the transport as pods: two of training's own kind, started, awaited, read and deleted."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from components.preflight.evidence import MARK, Report, Wanted
from components.rl_loop.cluster import LoopCluster
from components.rl_loop.objects import CONFIG_FOLDER, JOBSET, ROLE_LABEL, RUN_LABEL, Identity, LoopObjects, Object
from components.rl_loop.pods import Pod, Waits, crash, how_it_ended
from components.role import Inputs
from configs.failure import BadConfig, Failure, ServiceGone
from configs.hardware import load_hardware
from configs.run import RunConfig

ROLE = "train"
"""The pods bear training's role, so that network rules, placement and messages are those of training."""
PODS = 2
LOOK_S = 1.0
GONE_S = 30.0
SLACK_S = 60
"""Seconds after all limits at which Kubernetes itself ends pods whose preflight was killed."""


def proof_name(config: RunConfig) -> str:
    """Name of the proof's JobSet."""
    return f"{config.name}-proof"


class ProofObjects(LoopObjects):
    """Renders the proof's JobSet: training's image, requests and placement, on two nodes.

    Args:
        config: The run's configuration.
        wanted: What is to be proven.
    """

    def __init__(self, config: RunConfig, wanted: Wanted) -> None:
        super().__init__(config.model_copy(update={"name": proof_name(config)}), Inputs("", "", ""), Identity(""))
        self.wanted = wanted

    def proof(self, owner: Object | None = None) -> Object:
        """The JobSet, owned by `owner` (an owner reference) if there is one."""
        name, settings = self.config.name, self.settings
        job: Object = {
            "name": ROLE,
            "replicas": 1,
            "template": {
                "metadata": {"labels": self._labels(ROLE)},
                "spec": {
                    "parallelism": PODS,
                    "completions": PODS,
                    "completionMode": "Indexed",
                    "backoffLimit": 0,
                    "activeDeadlineSeconds": int(settings.ready_s + self.config.transport.timeout_s) + SLACK_S,
                    "template": self._proof_pod(),
                },
            },
        }
        if settings.exclusive_topology:
            topology = {"alpha.jobset.sigs.k8s.io/exclusive-topology": settings.exclusive_topology}
            job["template"]["metadata"]["annotations"] = topology
        made: Object = {
            "apiVersion": JOBSET,
            "kind": "JobSet",
            "metadata": self._metadata(name, ROLE, queued=True),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": name},
                "failurePolicy": {"maxRestarts": 0},
                "ttlSecondsAfterFinished": settings.ttl_s,
                "replicatedJobs": [job],
            },
        }
        if owner is not None:
            made["metadata"]["ownerReferences"] = [owner]
        return made

    def _proof_pod(self) -> Object:
        pods = self.settings.train.model_copy(update={"nodes": PODS})
        settings = self.config.transport
        module = ["torch.distributed.run", "-m", "components.preflight.exchange"]
        module += ["--mib", str(settings.exchange_mib), "--limit", f"{settings.timeout_s:g}"]
        module += ["--wanted", msgspec.json.encode(self.wanted).decode()]
        template = self._pod(ROLE, self.images.train, pods, module, role=False)
        spec = template["spec"]
        container = spec["containers"][0]
        self._give_role(container, spec, pods, self._shared_memory())
        # Of what a role gets, the exchange needs neither the configuration nor a secret.
        container["env"] = [one for one in container["env"] if one["name"] == "OMP_NUM_THREADS"]
        container["env"].append({"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
        container["env"] += self._gang(ROLE, pods)
        container["envFrom"] = [one for one in container["envFrom"] if "configMapRef" in one]
        container["volumeMounts"] = [one for one in container["volumeMounts"] if one["mountPath"] != CONFIG_FOLDER]
        spec["volumes"] = [one for one in spec["volumes"] if one["name"] != "config"]
        spec["restartPolicy"] = "Never"
        self._spread(spec)
        return template

    def _spread(self, spec: Object) -> None:
        """Two pods of one node would prove nothing; where nothing must be proven they may nevertheless share it."""
        labels = {RUN_LABEL: self.config.name, ROLE_LABEL: ROLE}
        term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
        rule: Object = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
        if self.wanted.efa:
            rule = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        spec.setdefault("affinity", {})["podAntiAffinity"] = rule

    def _shared_memory(self) -> float:
        return load_hardware(self.settings.train.hardware or self.config.hardware).shared_memory_gib


class Proof:
    """One proof in a cluster.

    Args:
        config: The run's configuration.
        wanted: What is to be proven.
        cluster: The run's namespace.
        owner: Reference to the workflow the pods go away with, if there is one.
    """

    def __init__(self, config: RunConfig, wanted: Wanted, cluster: LoopCluster, owner: Object | None = None) -> None:
        self.config = config
        self.wanted = wanted
        self.cluster = cluster
        self.owner = owner
        self.name = proof_name(config)
        self._waits = Waits(config)

    def make(self) -> Report:
        """Run the exchange; its pods are deleted in any case, also when preflight is told to leave.

        Raises:
            BadConfig: a pod cannot start as it is asked for, or the exchange left no report.
            ServiceGone: a pod did not start, or did not end, in time.
        """
        self._clear()
        try:
            self.cluster.create(ProofObjects(self.config, self.wanted).proof(self.owner))
            return self._read(self._wait())
        finally:
            try:
                self.cluster.delete(JOBSET, "JobSet", self.name)
            except Failure as failure:
                print(f"note: {failure.sentence}; the proof's pods end by themselves", flush=True)

    def _clear(self) -> None:
        """Remove what a killed preflight of this run left."""
        if self.cluster.get(JOBSET, "JobSet", self.name) is not None:
            self.cluster.delete(JOBSET, "JobSet", self.name)
        limit = GONE_S + self.config.kubernetes.grace_s
        if not _until(lambda: self.cluster.get(JOBSET, "JobSet", self.name) is None and not self._pods(), limit):
            raise ServiceGone(f"the pods of an earlier proof of run {self.config.name} do not end; delete {self.name}")

    def _wait(self) -> list[Pod]:
        """Wait until both pods ended; returns them."""
        created, running_since = time.monotonic(), 0.0
        while True:
            found = self.cluster.get(JOBSET, "JobSet", self.name)
            if found is None:
                raise Failure(f"JobSet {self.name} was deleted by someone else; retry the run")
            pods = self._pods()
            for pod in pods:
                self._waits.look(pod, partial(self.cluster.warnings, _name(pod)))
            phases = [pod["status"].get("phase") for pod in pods]
            states = {c["type"] for c in found.get("status", {}).get("conditions", []) if c["status"] == "True"}
            ended = len(pods) >= PODS and all(phase in ("Succeeded", "Failed") for phase in phases)
            # When one pod fails, its Job takes the other away.
            if ended or states & {"Completed", "Failed"}:
                return pods
            self._look_for_missing(pods, found, created)
            if len(pods) >= PODS and "Pending" not in phases:
                running_since = running_since or time.monotonic()
                self._look_at_time(pods, running_since)
            time.sleep(LOOK_S)

    def _look_at_time(self, pods: list[Pod], since: float) -> None:
        limit = self.config.transport.timeout_s
        if time.monotonic() - since <= limit:
            return
        late = [pod for pod in pods if pod["status"].get("phase") == "Running"]
        told = "; ".join(f"{_name(pod)} last said: {(self.cluster.log_tail(pod) or ['nothing'])[-1]}" for pod in late)
        raise ServiceGone(
            f"the exchange that proves the transport has not ended after {limit:.0f} s (transport.timeout_s): {told}"
        )

    def _look_for_missing(self, pods: list[Pod], jobset: dict[str, Any], created: float) -> None:
        if len(pods) >= PODS:
            return
        held = self.config.kubernetes.queue if jobset["spec"].get("suspend") else ""
        told = []
        if not held and time.monotonic() - created > 5.0:
            told = self.cluster.warnings(
                f"{self.name}-{ROLE}-0", "FailedCreate", jobset["metadata"]["creationTimestamp"]
            )
        self._waits.missing("the transport's proof", created, told, held)

    def _read(self, pods: list[Pod]) -> Report:
        """The report from rank 0's output."""
        for pod in pods:
            text = self.cluster.pod_log(_name(pod), ROLE)
            for line in text.splitlines():
                _, found, body = line.partition(MARK)
                if found:
                    return msgspec.json.decode(body, type=Report)
        for pod in pods:
            if ended := crash(pod):
                raise BadConfig(
                    f"the exchange that proves the transport left no report: {_name(pod)}:"
                    f" {how_it_ended(pod, ended[1], self.config)}"
                )
        raise Failure(
            f"the exchange that proves the transport left no report in the logs of {self.name}; retry the run"
        )

    def _pods(self) -> list[Pod]:
        return self.cluster.pods(f"{RUN_LABEL}={self.name}")


def _name(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


def _until(holds: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_S / 2)
    return True
