"""Why a pod does not run, as one sentence: images, scheduling, memory, missing secrets, lost nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


@dataclass(frozen=True)
class Trouble:
    """What holds a pod up.

    Attributes:
        sentence: What is wrong, without the pod's name.
        lasting: Whether waiting mends nothing: a person must act.
    """

    sentence: str
    lasting: bool


def trouble(pod: dict[str, Any]) -> Trouble | None:
    """What holds a pod up or ended it, or None for one that starts, runs or is done.

    Args:
        pod: A Pod as the API server returns it.
    """
    status = pod.get("status", {})
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        if found := _of_container(container, pod):
            return found
    if status.get("reason") in ("Evicted", "NodeLost", "NodeShutdown", "Terminated"):
        return Trouble(f"was removed from its node ({_words(status.get('message') or status['reason'])})", False)
    for condition in status.get("conditions", []):
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return Trouble(
                f"is taken from its node ({_words(condition.get('message') or condition.get('reason'))})", False
            )
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _of_scheduling(condition)
    return None


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> Trouble | None:
    waiting = container.get("state", {}).get("waiting", {})
    reason, words = waiting.get("reason", ""), _words(waiting.get("message", ""))
    if reason in IMAGE_REASONS:
        return Trouble(f"image {container['image']} cannot be pulled ({reason}: {words or 'no such image'})", True)
    if reason in CONFIG_REASONS:
        return Trouble(f"cannot start ({words or reason})", True)
    for state in (container.get("state", {}), container.get("lastState", {})):
        ended = state.get("terminated", {})
        if ended.get("reason") == "OOMKilled":
            limit = _memory_limit(pod, container["name"])
            return Trouble(
                f"ran out of memory{f' at its limit of {limit}' if limit else ''} (OOMKilled); ask for more", True
            )
    if reason == "CrashLoopBackOff":
        return Trouble(f"ends again and again ({words})", True)
    return None


def _of_scheduling(condition: dict[str, Any]) -> Trouble:
    if condition.get("reason") == "SchedulingGated":
        return Trouble("waits for a queue to admit it", False)
    return Trouble(f"finds no node: {_words(condition.get('message', 'no reason given'))}", False)


def _memory_limit(pod: dict[str, Any], container: str) -> str:
    spec = pod.get("spec", {})
    for one in [*spec.get("containers", []), *spec.get("initContainers", [])]:
        if one["name"] == container:
            return str(one.get("resources", {}).get("limits", {}).get("memory", ""))
    return ""


def moment(text: str | None) -> datetime | None:
    """A time of the API server, or None."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def last_line(log: str, prefix: str = "") -> str:
    """The last line of a log with times that begins with `prefix` (a step's own sentence does), else the last one."""
    lines = [line.partition(" ")[2].strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not of_argo(line)]
    own = [line for line in lines if prefix and line.startswith(prefix)]
    return (own or lines or [""])[-1]


def of_argo(line: str) -> bool:
    """Whether Argo's executor wrote a line into a container's log."""
    return re.match(r"time=\S+ level=\S+ msg=.* argo=true|Error: exit status \d+$", line) is not None


def _words(text: str | None) -> str:
    return " ".join((text or "").split())[:300]
