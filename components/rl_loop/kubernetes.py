"""The loop's roles as pods: created or adopted, watched, stopped, and removed by one DELETE."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from components.rl_loop.claim import API as LEASE
from components.rl_loop.claim import Claim
from components.rl_loop.cluster import LoopCluster, pod_name
from components.rl_loop.objects import (
    INPUTS,
    JOBSET,
    LEADER_WORKER_SET,
    REDIS_PORT,
    ROLE_LABEL,
    RUN_LABEL,
    Identity,
    LoopObjects,
)
from components.rl_loop.pods import Pod, Waits, crash, ended_for_good, how_it_ended, last_line, worker_of
from components.role import Inputs
from components.storage.layout import RunLayout
from components.train.catalogue import latest_checkpoint
from configs.failure import BAD_CONFIG, BAD_DATA, TOLD_TO_LEAVE, Failure, ServiceGone
from configs.run import RunConfig

LOOK_S = 1.0
"""Seconds between looks at the pods."""
API_GONE_S = 60.0
"""Seconds the API server may be away, as it is while it is upgraded."""
CANCEL_S = 0.8
"""Seconds the DELETE at a cancel may take: Kubeflow Pipelines grants a cancelled step less than one."""
CLAIM_S = 60.0
GONE_S = 30.0
ROLES = ("train", "reward", "broadcast", "rollout", "redis")


def redis_url(config: RunConfig) -> str:
    """Address of a run's Redis inside its namespace."""
    return f"redis://{config.name}-redis:{REDIS_PORT}/0"


class LoopPods:
    """The roles of one run in a cluster.

    Args:
        config: The run's configuration.
        layout: Where its things lie.
        inputs: What the roles are started with.
        tracking_run: Id of the run on the tracking server, forwarded to the pods.
        cluster: The run's namespace.
        cancelling: A second connection with a short limit, for the DELETE from a signal handler.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        inputs: Inputs,
        tracking_run: str,
        cluster: LoopCluster,
        cancelling: LoopCluster,
    ) -> None:
        self.config = config
        self.layout = layout
        self.cluster = cluster
        pod = cluster.get("v1", "Pod", pod_name()) or {"metadata": {}}
        self.owner = workflow_of(pod)
        # Kubeflow Pipelines labels its pods with the run; to Argo alone the workflow is the run.
        job = pod["metadata"].get("labels", {}).get("pipeline/runid") or (self.owner or {}).get("uid", "")
        self.objects = LoopObjects(config, inputs, Identity(tracking_run, job))
        self.adopted = False
        self._cancelling = cancelling
        self._jobset: dict[str, Any] = {}
        self._crashes: dict[str, int] = {}
        self._told: set[str] = set()
        self._uids: dict[str, set[str]] = {}
        self._awaited: set[str] = set()
        self._waiting = True
        self._cancelled = False
        self._waits = Waits(config)
        self._looked = self._answered = self._started = time.monotonic()
        self._seen: dict[str, float] = {}
        self.redis_url = inputs.redis_url
        # The kinds are looked up now, not in the signal handler.
        for api_version, kind in ((JOBSET, "JobSet"), (LEASE, "Lease")):
            cancelling.get(api_version, kind, config.name)
        labels = self.objects.jobset()["metadata"]["labels"]
        self.claim = Claim(cluster, config.name, pod_name(), labels, self.owner)

    def open(self, each: Callable[[], None]) -> None:
        """Claim the run; create its objects, or adopt those that an earlier loop with the same inputs left running.

        Args:
            each: Called while waiting; raises to end the wait.

        Raises:
            Failure: another loop of the run is alive, or the cluster refuses the objects.
        """
        self.claim.take(CLAIM_S, each)
        name = self.config.name
        found = self.cluster.get(JOBSET, "JobSet", name)
        if found is not None and self._usable(found):
            self.adopted = True
            if self.owner is not None:
                # Their owner now is the execution that goes on with them.
                self.cluster.patch(JOBSET, "JobSet", name, {"metadata": {"ownerReferences": [self.owner]}})
        else:
            if found is not None:
                self.cluster.delete(JOBSET, "JobSet", name)
            # Pods may outlast the JobSet they belonged to, and two trainers must never run at once.
            self._wait_gone(GONE_S + self.config.kubernetes.grace_s, each)
            each()
            found = self.cluster.create(self.objects.jobset(self.owner))
        self._jobset = found
        # No controller reference: Kueue would take the engines for a part of the JobSet and not count them.
        owner = {"apiVersion": JOBSET, "kind": "JobSet", "name": name, "uid": found["metadata"]["uid"]}
        for body in self.objects.owned(owner):
            # What runs already may have been scaled, which is not to be undone.
            if not self.adopted or self.cluster.get(body["apiVersion"], body["kind"], body["metadata"]["name"]) is None:
                self.cluster.apply(body)

    def start(self) -> None:
        """Nothing is left to start: the pods wait for Redis by themselves."""

    def check(self) -> list[dict[str, object]]:
        """Look at the pods, about once a second; returns the restarts since the last look, as events.

        Raises:
            Failure: a role ended for good, or cannot start.
        """
        if self._cancelled or time.monotonic() - self._looked < LOOK_S:
            return []
        self._looked = time.monotonic()
        try:
            self.claim.renew()
            found = self.cluster.get(JOBSET, "JobSet", self.config.name)
            pods = self.cluster.pods(f"{RUN_LABEL}={self.config.name}")
        except ServiceGone:
            # The roles need no API server; it may be restarting.
            if time.monotonic() - self._answered > API_GONE_S:
                raise
            return []
        self._answered = time.monotonic()
        if found is None or found["metadata"].get("deletionTimestamp"):
            raise Failure(f"JobSet {self.config.name} was deleted by someone else; retry the run to go on")
        self._jobset = found
        # What still terminates was told to; it says nothing about the pods that come after it.
        pods = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
        restarts = [event for pod in pods if (event := self._look_at(pod))]
        self._look_for_missing(pods)
        present = {pod["metadata"]["labels"][ROLE_LABEL] for pod in pods}
        self._waiting = len(present) < len(ROLES) or any(pod["status"].get("phase") == "Pending" for pod in pods)
        self._look_at_jobset(pods)
        return restarts

    def waiting(self) -> bool:
        """Whether a pod waits for a node, an image or a queue, for which `check` has limits of its own."""
        return self._waiting and not self._condition("Completed")

    def finished(self) -> bool:
        """Whether training has made its last step durable."""
        return self._condition("Completed") and self._trained()

    def last_words(self, worker: str) -> str:
        """The last line a worker wrote, or why it is silent."""
        try:
            pods = [pod for pod in self._pods() if worker_of(pod) == worker]
            if not pods:
                return f"there is no pod of {worker}"
            if ended := crash(pods[-1]):
                return last_line(ended[1])
            lines = self.cluster.log_tail(pods[-1])
        except Failure as failure:
            return f"unknown, because {failure.sentence}"
        return lines[-1] if lines else "it left none"

    def cancel(self) -> None:
        """The first act at a signal: delete everything, by one call that is safe in a signal handler."""
        self._cancelled = True
        if not self.claim.held:
            return
        for api_version, kind in ((JOBSET, "JobSet"), (LEASE, "Lease")):
            try:
                self._cancelling.delete(api_version, kind, self.config.name)
            except Failure as failure:
                print(f"note: {failure.sentence}; the pods end by themselves", flush=True)

    def stop(self) -> None:
        """Let the roles hand back their work and leave, while Redis stays."""
        name = self.config.name
        if not self.claim.held or self._cancelled:
            return
        if not self._condition("Completed"):
            self.cluster.patch(JOBSET, "JobSet", name, {"spec": {"suspend": True}})
        self.cluster.patch(LEADER_WORKER_SET, "LeaderWorkerSet", f"{name}-rollout", {"spec": {"replicas": 0}})
        end = time.monotonic() + self.config.kubernetes.grace_s + 5.0
        while time.monotonic() < end:
            self.claim.renew()
            if not [pod for pod in self._pods() if pod["metadata"]["labels"][ROLE_LABEL] != "redis" and _runs(pod)]:
                return
            time.sleep(0.2)

    def remove(self, finished: bool) -> None:
        """Delete everything.

        Args:
            finished: Whether Redis' volume is of no more use; else a retry goes on with it.
        """
        if not self.claim.held or self._cancelled:
            return
        if finished and self.config.kubernetes.redis_storage_gib:
            policy = {"persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"}}
            self.cluster.patch("apps/v1", "StatefulSet", f"{self.config.name}-redis", {"spec": policy})
        if self._jobset:
            self.cluster.delete(JOBSET, "JobSet", self.config.name, uid=self._jobset["metadata"]["uid"])
        self.claim.release()

    def _pods(self) -> list[Pod]:
        return self.cluster.pods(f"{RUN_LABEL}={self.config.name}")

    def _usable(self, jobset: dict[str, Any]) -> bool:
        same = jobset["metadata"].get("annotations", {}).get(INPUTS) == self.objects.digest
        states = {c["type"] for c in jobset.get("status", {}).get("conditions", []) if c["status"] == "True"}
        going = "Completed" not in states or self._trained()
        stopped = jobset["spec"].get("suspend", False) and not self.config.kubernetes.queue
        return (
            same
            and going
            and "Failed" not in states
            and not stopped
            and not jobset["metadata"].get("deletionTimestamp")
        )

    def _trained(self) -> bool:
        return latest_checkpoint(self.layout) == f"step-{self.config.train.steps:06d}"

    def _condition(self, kind: str) -> bool:
        conditions = self._jobset.get("status", {}).get("conditions", [])
        return any(each["type"] == kind and each["status"] == "True" for each in conditions)

    def _look_at(self, pod: Pod) -> dict[str, object] | None:
        """One pod: raises when it cannot start or ended for good; the restart, if it is one not told yet."""
        worker, uid = worker_of(pod), pod["metadata"]["uid"]
        self._waits.look(pod, lambda: self.cluster.warnings(pod["metadata"]["name"]))
        seen = self._uids.setdefault(worker, set())
        replaced = bool(seen) and uid not in seen
        seen.add(uid)
        if worker == "redis" and replaced and not self.config.kubernetes.redis_storage_gib:
            raise ServiceGone(
                "the pod of Redis was replaced, and its groups went with it; retry the run, which goes on from the last"
                " checkpoint (kubernetes.redis_storage_gib gives Redis a volume)"
            )
        ended = crash(pod)
        if ended is None or ended[0] in self._told:
            if not replaced:
                return None
            if worker in self._awaited:
                self._awaited.remove(worker)
                return None
            return {"restarted": worker, "exit_code": None, "sentence": f"the pod of {worker} was replaced"}
        self._told.add(ended[0])
        if not _runs(pod):
            # Its Job makes another pod, which is this restart; a gang is made anew as a whole.
            self._awaited |= {worker, *(other for other in self._uids if _one_gang(worker, other))}
        code = ended[1]["exitCode"]
        if code == TOLD_TO_LEAVE:
            return {"restarted": worker, "exit_code": code, "sentence": f"{worker} was told to leave"}
        self._crashes[worker] = self._crashes.get(worker, 0) + 1
        if code in (BAD_CONFIG, BAD_DATA):
            raise ended_for_good(pod, ended[1], "", self.config)
        if self._crashes[worker] > self.config.loop.max_restarts:
            times = f" (once more after {self.config.loop.max_restarts} restarts)"
            raise ended_for_good(pod, ended[1], times, self.config)
        return {"restarted": worker, "exit_code": code, "sentence": how_it_ended(pod, ended[1], self.config)}

    def _look_for_missing(self, pods: list[Pod]) -> None:
        present = {pod["metadata"]["labels"][ROLE_LABEL] for pod in pods}
        for role in ROLES:
            if role in present or self._condition("Completed"):
                self._seen[role] = time.monotonic()
                continue
            since = self._seen.setdefault(role, self._started)
            held = self.config.kubernetes.queue if self._jobset["spec"].get("suspend") else ""
            told = []
            if not held and time.monotonic() - since > 5.0:
                made = self._jobset["metadata"]["creationTimestamp"]
                told = self.cluster.warnings(self._maker(role), "FailedCreate", made)
            self._waits.missing(role, since, told, held)

    def _maker(self, role: str) -> str:
        """Name of the object that creates the pods of a role."""
        return f"{self.config.name}-{role}" + ("" if role in ("rollout", "redis") else "-0")

    def _look_at_jobset(self, pods: list[Pod]) -> None:
        if not self._condition("Failed"):
            return
        for pod in reversed(pods):
            if ended := crash(pod):
                raise ended_for_good(pod, ended[1], "", self.config)
        conditions = self._jobset["status"]["conditions"]
        raise Failure(f"JobSet {self.config.name} failed: {conditions[-1].get('message', 'it does not say why')}")

    def _wait_gone(self, limit_s: float, each: Callable[[], None]) -> None:
        end = time.monotonic() + limit_s
        while self.cluster.get(JOBSET, "JobSet", self.config.name) is not None or self._pods():
            each()
            if time.monotonic() > end:
                raise ServiceGone(f"the pods of an earlier loop of run {self.config.name} do not end; delete them")
            self.claim.renew()
            time.sleep(0.5)


def _runs(pod: Pod) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def _one_gang(worker: str, other: str) -> bool:
    return all(name.partition("-")[0] == "train" for name in (worker, other))


def workflow_of(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """Owner reference to the workflow an object belongs to; None if it belongs to none."""
    for owner in (found or {}).get("metadata", {}).get("ownerReferences", []):
        if owner["kind"] == "Workflow":
            return {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}
    return None
