"""A cluster whose pods of a proof are processes of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from components.preflight.proof import PROOF_LABEL
from tests.components.execution import ROOT

NODE = "spec.nodeName"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def workflow(uid: str) -> dict[str, Any]:
    """Owner reference to an execution's workflow."""
    return {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "w", "uid": uid}


def jobset(name: str, uid: str, owner: str = "", run: str = "") -> dict[str, Any]:
    """A JobSet as the cluster has it: a proof of `run`, or a loop's."""
    metadata: dict[str, Any] = {"name": name, "uid": uid, "labels": {PROOF_LABEL: run} if run else {}}
    return {"metadata": metadata | ({"ownerReferences": [workflow(owner)]} if owner else {}), "spec": {}}


class LivePods:
    """As much of a cluster as the proof uses; the JobSet's pods are real processes of this machine.

    Attributes:
        others: JobSets that are there besides, by name; they have no pods.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.body: dict[str, Any] | None = None
        self.deleted: list[str] = []
        self.others: dict[str, dict[str, Any]] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.starts = True
        self.environment: dict[str, str] = {}
        self.module = ""

    def get(self, api_version: str, kind: str, name: str) -> dict[str, Any] | None:
        if kind == "Pod":
            return {"metadata": {"ownerReferences": [workflow("mine")]}}
        return self.body if self.body is not None and self.body["metadata"]["name"] == name else self.others.get(name)

    def find(self, api_version: str, kind: str, selector: str = "") -> list[dict[str, Any]]:
        label, _, value = selector.partition("=")
        there = [*self.others.values(), *([self.body] if self.body else [])]
        return [each for each in there if each["metadata"]["labels"].get(label) == value]

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        self.body = body | {"metadata": body["metadata"] | {"creationTimestamp": "2026-01-01T00:00:00Z", "uid": "u"}}
        if self.starts:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self.processes = [self._start(index, port) for index in range(2)]
        return self.body

    def _start(self, index: int, port: int) -> subprocess.Popen[bytes]:
        assert self.body is not None
        job = self.body["spec"]["replicatedJobs"][0]["template"]["spec"]
        container = job["template"]["spec"]["containers"][0]
        fields = {NODE: f"machine-{index}", INDEX: str(index)}
        given = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        command = container["command"][1:]
        if self.module:  # instead of the exchange
            place = command.index("components.preflight.exchange")
            command[place - 1 : place + 1] = [self.module]
        given |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), **self.environment}
        with (self.folder / f"log-{index}").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=os.environ | given, stdout=log, stderr=log
            )

    def pods(self, selector: str) -> list[dict[str, Any]]:
        if self.body is None or selector != f"tandem.run={self.body['metadata']['name']}":
            return []
        found = []
        for index in range(2):
            code = self.processes[index].poll() if self.processes else None
            phase = (
                "Pending" if not self.processes else "Running" if code is None else "Failed" if code else "Succeeded"
            )
            state = {"terminated": {"exitCode": code, "message": self.pod_log(f"pod-{index}", "train")}} if code else {}
            labels = self.body["spec"]["replicatedJobs"][0]["template"]["metadata"]["labels"]
            metadata = {"name": f"pod-{index}", "uid": str(index), "labels": labels}
            status = {"phase": phase, "containerStatuses": [{"state": state}]}
            found.append({"metadata": metadata, "status": status, "spec": {"containers": [{"name": "train"}]}})
        return found

    def warnings(self, name: str, reason: str = "", since: str = "") -> list[str]:
        return ["0/1 nodes are available: 1 Insufficient vpc.amazonaws.com/efa"]

    def pod_log(self, pod: str, container: str) -> str:
        return (self.folder / f"log-{pod[-1]}").read_text(errors="replace")

    def log_tail(self, pod: dict[str, Any]) -> list[str]:
        return self.pod_log(pod["metadata"]["name"], "train").splitlines()[-1:]

    def delete(self, api_version: str, kind: str, name: str, uid: str = "") -> bool:
        found = self.get(api_version, kind, name)
        if found is None or uid not in ("", found["metadata"]["uid"]):
            return False
        self.deleted.append(name)
        if self.others.pop(name, None) is None:
            for process in self.processes:
                if process.poll() is None:
                    # A pod ends with all its processes; torchrun, killed, would leave its ranks.
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                    process.kill()
                process.wait()
            self.body, self.processes = None, []
        return True

    @property
    def gone(self) -> bool:
        """Whether the proof, and nothing else, was deleted."""
        return self.body is None and len(self.deleted) == 1 and self.deleted[0].startswith("moe-proof-")
