"""The proof of the transport as pods: two of training's own kind, started, awaited, read and deleted.

Every execution makes a JobSet of its own, marked by a label: what is deleted bears the mark and belongs to the workflow
of this execution, so that neither a loop nor the proof of another execution of the same run is touched.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from components.preflight.evidence import MARK, Report, Wanted
from components.rl_loop.cluster import LoopCluster
from components.rl_loop.kubernetes import workflow_of
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


PROOF_LABEL = "tandem.run/proof"
"""Label of a proof's JobSet and pods, with the run's name."""
NAME_LENGTH = 46
"""No run's name is as long, so no loop's JobSet has such a name; and its pods' names stay within 63."""


def proof_name(config: RunConfig, execution: str) -> str:
    """Name of one execution's JobSet.

    Args:
        config: Of the run.
        execution: What tells this execution from all others.
    """
    start = f"{config.name[:24]}-proof-"
    return start + hashlib.sha256(f"{config.name}/{execution}".encode()).hexdigest()[: NAME_LENGTH - len(start)]


def proofs_of(config: RunConfig, cluster: LoopCluster, workflow: Object | None) -> list[Object]:
    """JobSets of proofs that this workflow made for the run; none without a workflow, as they could be another's."""
    if workflow is None:
        return []
    found = cluster.find(JOBSET, "JobSet", f"{PROOF_LABEL}={config.name}")
    return [each for each in found if workflow_of(each) == workflow]


class ProofObjects(LoopObjects):
    """Renders the proof's JobSet: training's image, requests and placement, on two nodes.

    Args:
        config: The run's configuration.
        wanted: What is to be proven.
        name: Of the JobSet.
    """

    def __init__(self, config: RunConfig, wanted: Wanted, name: str) -> None:
        super().__init__(config.model_copy(update={"name": name}), Inputs("", "", ""), Identity(""))
        self.wanted = wanted
        self.run = config.name

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
                    "activeDeadlineSeconds": int(self._seconds) + SLACK_S,
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

    @property
    def _seconds(self) -> float:
        """From the first pod's start to the end of the exchange, at most."""
        return self.config.transport.start_s + self.config.transport.timeout_s

    def _labels(self, role: str) -> dict[str, str]:
        return super()._labels(role) | {PROOF_LABEL: self.run}

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
        # By itself torchrun waits 600 s for the other pod.
        container["env"].append({"name": "PET_RDZV_CONF", "value": f"timeout={int(self._seconds)}"})
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
        self.name = proof_name(config, secrets.token_hex())
        self._uid = ""
        self._waits = Waits(config, config.transport.start_s, "transport.start_s")

    def make(self) -> Report:
        """Run the exchange; its pods are deleted in any case, also when preflight is told to leave.

        Raises:
            BadConfig: a pod cannot start as it is asked for, or the exchange left no report.
            ServiceGone: a pod did not start, or did not end, in time.
        """
        self._clear()
        try:
            made = self.cluster.create(ProofObjects(self.config, self.wanted, self.name).proof(self.owner))
            self._uid = made["metadata"]["uid"]
            return self._wait()
        finally:
            try:
                # A creation that was broken off leaves no id, but the name is nobody else's.
                self.cluster.delete(JOBSET, "JobSet", self.name, uid=self._uid)
            except Failure as failure:
                print(f"note: {failure.sentence}; the proof's pods end by themselves", flush=True)

    def _clear(self) -> None:
        """Remove what a killed preflight of this workflow left: its pods hold the nodes that ours need."""
        for left in (found := proofs_of(self.config, self.cluster, self.owner)):
            self.cluster.delete(JOBSET, "JobSet", left["metadata"]["name"], uid=left["metadata"]["uid"])
        names = [each["metadata"]["name"] for each in found]
        limit = GONE_S + self.config.kubernetes.grace_s
        if names and not _until(lambda: not any(self._pods(name) for name in names), limit):
            raise ServiceGone(
                f"the pods of an earlier proof of run {self.config.name} do not end; delete {' and '.join(names)}"
            )

    def _wait(self) -> Report:
        """Wait until rank 0 reports, or both pods ended without."""
        created, running_since = time.monotonic(), 0.0
        while True:
            found = self.cluster.get(JOBSET, "JobSet", self.name)
            if found is None:
                raise Failure(f"JobSet {self.name} was deleted by someone else; retry the run")
            pods = self._pods(self.name)
            for pod in pods:
                self._waits.look(pod, partial(self.cluster.warnings, _name(pod)))
            phases = [pod["status"].get("phase") for pod in pods]
            states = {c["type"] for c in found.get("status", {}).get("conditions", []) if c["status"] == "True"}
            # What is printed counts, also where a process then fails to end.
            if report := self._look_for_report([p for p in pods if p["status"].get("phase") != "Pending"]):
                return report
            ended = len(pods) >= PODS and all(phase in ("Succeeded", "Failed") for phase in phases)
            # When one pod fails, its Job takes the other away.
            if ended or states & {"Completed", "Failed"}:
                return self._read(pods)
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

    def _look_for_report(self, pods: list[Pod], whole: bool = False) -> Report | None:
        """The report in the pods' output; `whole` where nothing is added to it any more.

        Raises:
            BadConfig: so it is, and the report cannot be read.
        """
        for pod in pods:
            try:
                text = self.cluster.pod_log(_name(pod), ROLE)
            except ServiceGone:
                if whole:
                    raise
                continue
            for line in text.splitlines():
                _, found, body = line.partition(MARK)
                try:
                    if found:
                        return msgspec.json.decode(body, type=Report)
                except msgspec.DecodeError as error:
                    if whole:
                        raise BadConfig(
                            f"the report of {_name(pod)} cannot be read ({error}); take the images train and"
                            " control from the same release"
                        ) from None
        return None

    def _read(self, pods: list[Pod]) -> Report:
        """The report of pods that ended."""
        if report := self._look_for_report(pods, whole=True):
            return report
        for pod in pods:
            if ended := crash(pod):
                raise BadConfig(
                    f"the exchange that proves the transport left no report: {_name(pod)}:"
                    f" {how_it_ended(pod, ended[1], self.config)}"
                )
        raise Failure(
            f"the exchange that proves the transport left no report in the logs of {self.name}; retry the run"
        )

    def _pods(self, name: str) -> list[Pod]:
        return self.cluster.pods(f"{RUN_LABEL}={name}")


def _name(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


def _until(holds: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_S / 2)
    return True
