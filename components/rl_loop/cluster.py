"""The cluster as rl_loop sees it: its own pod, the run's pods with their warnings and last words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from components.cluster.api import ANSWER_S, Cluster
from configs.failure import BadConfig, Failure

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOG_LINES = 8
RIGHTS = "`tandem install` gives the ServiceAccount its rights"


class LoopCluster(Cluster):
    """The namespace in which rl_loop runs.

    Args:
        limit_s: Seconds one request may take.
        namespace: Of the pods; None takes this pod's.
        **place: Context and kubeconfig, outside of a pod.

    Raises:
        BadConfig: this process is not in a pod, and no namespace is named.
    """

    def __init__(self, limit_s: float = ANSWER_S, namespace: str | None = None, **place: Any) -> None:
        super().__init__(namespace or own_namespace(), rights=RIGHTS, limit_s=limit_s, **place)

    def pods(self, selector: str) -> list[dict[str, Any]]:
        """Pods with the labels of `selector`, oldest first."""
        return sorted(self.find("v1", "Pod", selector), key=lambda pod: pod["metadata"]["creationTimestamp"])

    def warnings(self, name: str, reason: str = "", since: str = "") -> list[str]:
        """Messages of warning events about the objects of a name, oldest first.

        Args:
            name: Of the object.
            reason: Only events with it.
            since: RFC 3339 time in UTC; only events after it.
        """
        found = [
            (_moment(event), event)
            for event in self.find("v1", "Event")
            if event.get("type") == "Warning"
            and event["involvedObject"].get("name") == name
            and reason in ("", event.get("reason"))
            and _moment(event) >= since
        ]
        found.sort(key=lambda pair: pair[0])
        return [" ".join((event.get("message") or event.get("reason") or "").split()) for _, event in found]

    def log_tail(self, pod: dict[str, Any]) -> list[str]:
        """The last lines of a pod's log; nothing if there is none."""
        try:
            text = self.pod_log(pod["metadata"]["name"], pod["spec"]["containers"][0]["name"], tail=LOG_LINES)
        except Failure:
            return []
        # Each line comes after its time.
        return [words for line in text.splitlines() if (words := line.partition(" ")[2].strip())]


def _moment(event: dict[str, Any]) -> str:
    """When an event was last seen (RFC 3339, UTC)."""
    return event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or ""


def own_namespace() -> str:
    """Namespace of this pod.

    Raises:
        BadConfig: this process is not in a pod.
    """
    file = SERVICE_ACCOUNT / "namespace"
    if not file.exists():
        raise BadConfig(
            "loop.roles is kubernetes, but rl_loop is in no pod with a ServiceAccount; run it by `tandem submit`"
        )
    return file.read_text().strip()


def pod_name() -> str:
    """Name of this pod; the host's name is the same, but cut off after 63 characters."""
    return os.environ.get("KFP_POD_NAME", "") or os.environ.get("HOSTNAME", "") or os.uname().nodename
