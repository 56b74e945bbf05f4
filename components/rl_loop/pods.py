"""What ails a pod, in one sentence with what the user can do about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from components.rl_loop.objects import ROLE_LABEL
from configs.failure import BadConfig, Failure, ServiceGone, failure_of
from configs.run import RunConfig

PULL_S = 20.0
"""Seconds an image may fail to come: a registry may stumble once."""
CREATE_S = 15.0
AT_ONCE = ("InvalidImageName", "ErrImageNeverPull")
PULL = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", *AT_ONCE)
CREATE = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
GANG_INDEX = "batch.kubernetes.io/job-completion-index"

Pod = dict[str, Any]


def worker_of(pod: Pod) -> str:
    """Name of the worker in a pod, such as `train` or `rollout-1`; the further pods of a gang are `train-1` and so on."""
    labels = pod["metadata"]["labels"]
    role = labels[ROLE_LABEL]
    if role == "rollout":
        return f"{role}-{labels.get(GROUP_INDEX, '0')}"
    place = labels.get(GANG_INDEX, "0")
    return role if place == "0" else f"{role}-{place}"


def container_status(pod: Pod) -> dict[str, Any]:
    """Status of the pod's container; empty before there is one."""
    return (pod["status"].get("containerStatuses") or [{}])[0]


def crash(pod: Pod) -> tuple[str, dict[str, Any]] | None:
    """The newest end of the pod's container that nobody asked for: a key that names it, and the terminated state.

    A pod that is deleted, evicted or lost with its node did not crash.
    """
    status = container_status(pod)
    conditions = pod["status"].get("conditions", [])
    if any(each["type"] == "DisruptionTarget" and each["status"] == "True" for each in conditions):
        return None
    for state in (status.get("state", {}), status.get("lastState", {})):
        ended = state.get("terminated")
        if ended and ended["exitCode"] != 0 and not pod["metadata"].get("deletionTimestamp"):
            return f"{pod['metadata']['uid']}/{ended.get('containerID', '')}", ended
    return None


def last_line(ended: dict[str, Any]) -> str:
    """The last line a container that ended had written."""
    lines = [line for line in (ended.get("message") or "").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it left no words"


def how_it_ended(pod: Pod, ended: dict[str, Any], config: RunConfig) -> str:
    """How a container ended, in words."""
    worker = worker_of(pod)
    if ended.get("reason") == "OOMKilled":
        role = pod["metadata"]["labels"][ROLE_LABEL]
        limit = getattr(config.kubernetes, role).memory_mib
        return f"{worker} was killed for its memory (limit {limit} MiB); raise kubernetes.{role}.memory_mib"
    signal = f" by signal {ended['signal']}" if ended.get("signal") else ""
    return f"{worker} ended with exit code {ended['exitCode']}{signal}; its last words: {last_line(ended)}"


class Waits:
    """Tells pods that wait for good from those that only wait: remembers since when each has waited for what.

    Args:
        config: The run's configuration.
        ready_s: Seconds in which a pod must run; None takes `kubernetes.ready_s`.
        setting: Where they are set.
    """

    def __init__(self, config: RunConfig, ready_s: float | None = None, setting: str = "kubernetes.ready_s") -> None:
        self.config = config
        self._ready_s = config.kubernetes.ready_s if ready_s is None else ready_s
        self._setting = setting
        self._since: dict[tuple[str, str], float] = {}

    def look(self, pod: Pod, warnings: Callable[[], list[str]]) -> None:
        """Look at one pod.

        Args:
            pod: As the API gives it.
            warnings: Fetches the messages of its warning events, oldest first.

        Raises:
            Failure: it will not start; says why.
        """
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        waiting = container_status(pod).get("state", {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), " ".join((waiting.get("message") or "").split())
        pending = pod["status"].get("phase") == "Pending"
        kind = "image" if reason in PULL else "create" if reason in CREATE else "start" if pending else ""
        # A pod of the same name that comes later waits anew, and so does one that waits for something else.
        for key in [key for key in self._since if key[0] == uid and key[1] != kind]:
            del self._since[key]
        if kind == "image":
            if reason in AT_ONCE or self._waited(uid, kind) > PULL_S:
                image = pod["spec"]["containers"][0]["image"]
                raise BadConfig(
                    f"pod {name} cannot get its image {image} ({reason}: {message}); name one that the nodes can pull"
                    " (kubernetes.images, or `tandem submit --images`)"
                )
        elif kind == "create":
            if self._waited(uid, kind) > CREATE_S:
                raise BadConfig(
                    f"pod {name} cannot be created ({reason}: {message}); see docs/cluster.md for what it needs"
                )
        elif kind == "start":
            self._pending(pod, warnings)

    def missing(self, role: str, since: float, told: list[str], queue: str) -> None:
        """A role that has no pod at all.

        Args:
            role: Which.
            since: Moment (monotonic) from which it should have one.
            told: Messages of events that tell why it could not be created.
            queue: Kueue queue that has not admitted it, or empty.

        Raises:
            Failure: for so long that it will not come.
        """
        waited = time.monotonic() - since
        if told and waited > CREATE_S:
            raise BadConfig(f"no pod of {role} can be created ({told[-1]}); raise the quota, or ask for less")
        if waited > (self.config.kubernetes.queue_s if queue else self._ready_s):
            why = f"queue {queue} has not admitted it" if queue else "no event tells why"
            raise ServiceGone(f"there is no pod of {role} after {waited:.0f} s: {why}")

    def _pending(self, pod: Pod, warnings: Callable[[], list[str]]) -> None:
        name, limit, told = pod["metadata"]["name"], self._ready_s, ""
        for condition in pod["status"].get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                told = f"{condition.get('reason', '')}: {condition.get('message', '')}"
                if condition.get("reason") == "SchedulingGated":
                    limit = self.config.kubernetes.queue_s
        if self._waited(pod["metadata"]["uid"], "start") > limit:
            told = told or (warnings() or ["no event tells why"])[-1]
            raise ServiceGone(
                f"pod {name} has not started after {limit:.0f} s ({told}); free or add nodes, ask for less, or raise"
                f" {self._setting}"
            )

    def _waited(self, uid: str, what: str) -> float:
        now = time.monotonic()
        return now - self._since.setdefault((uid, what), now)


def ended_for_good(pod: Pod, ended: dict[str, Any], times: str, config: RunConfig) -> Failure:
    """The failure of a role that will not be restarted."""
    return failure_of(ended["exitCode"], f"{how_it_ended(pod, ended, config)}{times}")
