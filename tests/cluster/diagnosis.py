"""What is needed to understand a failure after the fact, in one folder: logs of components and pods, objects, events."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.cluster import layout
from tests.cluster.api import Api

KINDS = {
    "pods": ("v1", "Pod"),
    "services": ("v1", "Service"),
    "deployments": ("apps/v1", "Deployment"),
    "statefulsets": ("apps/v1", "StatefulSet"),
    "jobs": ("batch/v1", "Job"),
    "workflows": ("argoproj.io/v1alpha1", "Workflow"),
    "cronworkflows": ("argoproj.io/v1alpha1", "CronWorkflow"),
    "jobsets": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "leaderworkersets": ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    "nodes": ("v1", "Node"),
}
LOG_LINES = 500


def collect(folder: Path) -> Path:
    """Write what can be had into `folder`; what the API refuses is noted there and is no failure. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    trouble: list[str] = []

    def attempt(what: str, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:  # a report of a failure must not fail itself
            trouble.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:500]}")

    for log in sorted((layout.STATE / "log").glob("*.log")):
        attempt(log.name, functools.partial(shutil.copy, log, folder / log.name))
    api = Api(layout.KUBECONFIG, layout.NAME)
    attempt("events", lambda: _write_events(api, folder / "events.txt"))
    for name, (version, kind) in KINDS.items():
        attempt(name, functools.partial(_write_objects, api, version, kind, folder / f"{name}.yaml"))
    attempt("pod logs", lambda: _write_pod_logs(api, folder / "pods", attempt))
    if trouble:
        (folder / "not-collected.txt").write_text("\n".join(trouble) + "\n")
    return folder


def _write_events(api: Api, path: Path) -> None:
    lines = []
    for each in api.list("v1", "Event"):
        subject = each["involvedObject"]
        last = each.get("lastTimestamp") or each.get("eventTime") or each["metadata"]["creationTimestamp"]
        where = f"{subject.get('namespace', '')}/{subject['kind']}/{subject['name']}"
        lines.append(f"{last} {each['type']:8} {where} {each.get('reason')}: {each.get('message')}")
    path.write_text("\n".join(sorted(lines)) + "\n")


def _write_objects(api: Api, version: str, kind: str, path: Path) -> None:
    objects = api.list(version, kind)
    for each in objects:
        each["metadata"].pop("managedFields", None)
    path.write_text(yaml.safe_dump_all(objects))


def _write_pod_logs(api: Api, folder: Path, attempt: Callable[[str, Callable[[], object]], None]) -> None:
    folder.mkdir(exist_ok=True)
    for pod in api.list("v1", "Pod"):
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            label = f"{namespace}/{name}/{container['name']}"
            attempt(f"log of {label}", functools.partial(_write_log, api, namespace, name, container["name"], folder))


def _write_log(api: Api, namespace: str, pod: str, container: str, folder: Path) -> None:
    text = api.core.read_namespaced_pod_log(pod, namespace, container=container, tail_lines=LOG_LINES)
    (folder / f"{namespace}.{pod}.{container}.log").write_text(str(text))
