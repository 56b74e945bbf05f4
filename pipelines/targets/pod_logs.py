"""Logs of an execution's steps and of its run's role pods, line by line, each line once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from components.cluster.api import Cluster
from pipelines.pods import of_argo

PART = "workflows.argoproj.io/node-name"
STEP_CONTAINER = "main"


class PodLogs:
    """Reads what is new in the logs of an execution."""

    def __init__(self, cluster: Cluster, selectors: tuple[str, ...], part: str) -> None:
        """Choose the pods.

        Args:
            selectors: Label selectors; a pod that fits several is read once.
            part: One step, role or pod; empty takes all.
        """
        self.cluster = cluster
        self._selectors = selectors
        self.part = part
        self.pods: set[str] = set()
        self._since: dict[str, str] = {}

    def read(self) -> Iterator[str]:
        """Lines not read before, as `[part] line`, pod by pod in order of creation."""
        found = {
            pod["metadata"]["uid"]: pod
            for selector in self._selectors
            for pod in self.cluster.find("v1", "Pod", selector)
        }
        for pod in sorted(found.values(), key=lambda pod: pod["metadata"]["creationTimestamp"]):
            part = part_of(pod)
            # A part is a step (`rl-loop(0)` an attempt at it), a role and its pod (`train/…`), or a pod.
            names = (part, part.partition("/")[0], part.partition("(")[0], pod["metadata"]["name"])
            if self.part and self.part.replace("_", "-") not in names:
                continue
            self.pods.add(pod["metadata"]["name"])
            if pod.get("status", {}).get("phase") != "Pending":
                yield from self._new_lines(pod["metadata"]["name"], part, container_of(pod))

    def _new_lines(self, pod: str, part: str, container: str) -> Iterator[str]:
        since = self._since.get(pod, "")
        for line in self.cluster.pod_log(pod, container, since=since).splitlines():
            time, _, text = line.partition(" ")
            # The server cuts at whole seconds, so what was read in this one comes again.
            if time <= since:
                continue
            self._since[pod] = time
            if not of_argo(text):
                yield f"[{part}] {text}"


def part_of(pod: dict[str, Any]) -> str:
    """The step a pod is (`preflight`), or the role and its pod (`train/quick-train-0-0-x`)."""
    metadata = pod["metadata"]
    node = metadata.get("annotations", {}).get(PART, "")
    handler = re.search(r"-comp-(.+)-\d+$", metadata["name"])
    if node.endswith(".onExit") and handler:
        return handler[1]
    if node:
        # Kubeflow nests the container under the task.
        return str(node.removesuffix(".executor").rpartition(".")[2])
    role = metadata.get("labels", {}).get("app.kubernetes.io/component", "")
    return f"{role}/{metadata['name']}" if role else str(metadata["name"])


def container_of(pod: dict[str, Any]) -> str:
    """The container that does the work."""
    names = [container["name"] for container in pod["spec"]["containers"]]
    return STEP_CONTAINER if STEP_CONTAINER in names else str(names[0])
