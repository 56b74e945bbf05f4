"""The proof of the transport: its pods as rendered, its exchange live between two processes, its verdict."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from components.preflight import proof as proof_module
from components.preflight.evidence import MARK, Report
from components.preflight.main import preflight
from components.preflight.proof import Proof, ProofObjects, proof_name
from components.preflight.transport import check_transport, conclude, wanted_of
from components.step import Step
from configs.failure import BadConfig, Failure, ServiceGone, ToldToLeave
from configs.run import RunConfig
from configs.stack import load_stack
from tests.components.execution import ROOT, config_in, executor_input

EFA_PODS = {
    "nodes": 4,
    "gpus": 8,
    "efa_interfaces": 16,
    "cpu_millicores": 180_000,
    "memory_mib": 1_800_000,
    "hugepages_mib": 5120,
    "one_zone": True,
    "capacity": "reserved",
}
NODE = "spec.nodeName"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def cluster_run(expect: str = "auto", **sections: Any) -> RunConfig:
    kubernetes = {"train": {"nodes": 2}, "images": {"control": "c", "train": "r/train", "rollout": "r"}, "grace_s": 1}
    return RunConfig.model_validate(
        {
            "name": "moe",
            "storage": {"root": "s3://bucket/runs", "scratch": "/scratch"},
            "loop": {"roles": "kubernetes"},
            "train": {"ranks": 16},
            "transport": {"expect": expect, "exchange_mib": 8, "timeout_s": 60},
            **sections,
            "kubernetes": {**kubernetes, **sections.get("kubernetes", {})},
        }
    )


def efa_run(**kubernetes: Any) -> RunConfig:
    return cluster_run(hardware="p5en", stack="deepep-efa", kubernetes={"train": EFA_PODS, **kubernetes})


class LivePods:
    """As much of a cluster as the proof uses; the JobSet's pods are real processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.body: dict[str, Any] | None = None
        self.deleted: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.starts = True
        self.environment: dict[str, str] = {}

    def get(self, api_version: str, kind: str, name: str) -> dict[str, Any] | None:
        return self.body if self.body is not None and self.body["metadata"]["name"] == name else None

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
        given |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), **self.environment}
        with (self.folder / f"log-{index}").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *container["command"][1:]], cwd=ROOT, env=os.environ | given, stdout=log, stderr=log
            )

    def pods(self, selector: str) -> list[dict[str, Any]]:
        if self.body is None:
            return []
        assert selector == f"tandem.run={self.body['metadata']['name']}"
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

    def delete(self, api_version: str, kind: str, name: str) -> bool:
        self.deleted.append(name)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        there, self.body, self.processes = self.body is not None, None, []
        return there


def make(config: RunConfig, pods: LivePods) -> Report:
    return Proof(config, wanted_of(config, load_stack(config.stack)), pods).make()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, LivePods]:
    """What a real exchange over gloo between two processes proves."""
    pods = LivePods(tmp_path_factory.mktemp("proof"))
    return make(cluster_run("efa"), pods), pods


def test_a_live_exchange_over_sockets_is_told_as_such(sockets: tuple[Report, LivePods]) -> None:
    report, pods = sockets
    assert report.carried_by == "tcp (lo)" and report.seconds > 0 and report.gib_s > 0
    assert [node.node for node in report.evidence.nodes] == ["machine-0", "machine-1"]
    assert all(node.sent == 8 * 2**20 <= node.moved.plain["lo"] for node in report.evidence.nodes)
    assert pods.deleted == ["moe-proof"]


def test_efa_is_not_proven_by_it(sockets: tuple[Report, LivePods], capsys: pytest.CaptureFixture[str]) -> None:
    report = sockets[0]
    assert not report.proven
    with pytest.raises(BadConfig) as caught:
        conclude(cluster_run("efa"), report)
    assert caught.value.sentence.startswith("EFA is not proven (transport.expect): pods ")
    assert "have no /dev/infiniband/uverbs*" in caught.value.sentence
    assert "went over a plain network interface instead of EFA" in capsys.readouterr().out


def test_any_passes_with_the_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = cluster_run("any")
    entry = conclude(config, make(config, LivePods(tmp_path)))
    assert entry["carried_by"] == "tcp (lo)" and entry["expected"] == "any" and entry["not_made"] is None
    assert entry["notes"] == ["over-ethernet"]
    out = capsys.readouterr().out
    assert "transport: tcp (lo)" in out and "note: the bytes of pods" in out


def test_an_exchange_that_fails_is_told_and_deleted(tmp_path: Path) -> None:
    pods = LivePods(tmp_path)
    pods.environment = {"LOCAL_WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "0"}  # torchrun refuses
    with pytest.raises(BadConfig, match="left no report: pod-.*train ended with exit code 1") as caught:
        make(cluster_run("efa"), pods)
    assert pods.deleted == ["moe-proof"] and "\n" not in caught.value.sentence


def test_a_pod_that_does_not_start_is_named(tmp_path: Path) -> None:
    pods = LivePods(tmp_path)
    pods.starts = False
    config = cluster_run("efa", kubernetes={"ready_s": 0.5})
    with pytest.raises(ServiceGone, match="pod pod-0 has not started after 0 s .*Insufficient vpc.amazonaws.com/efa"):
        make(config, pods)
    assert pods.deleted == ["moe-proof"]


def test_an_exchange_that_hangs_is_ended_with_its_last_words(tmp_path: Path) -> None:
    pods = LivePods(tmp_path)
    pods.environment = {"PET_NNODES": "3"}  # a node that never comes
    config = cluster_run("efa", transport={"timeout_s": 3})
    with pytest.raises(ServiceGone, match=r"has not ended after 3 s \(transport.timeout_s\): pod-0 last said"):
        make(config, pods)
    assert pods.deleted == ["moe-proof"]


def test_told_to_leave_it_deletes_its_pods(tmp_path: Path) -> None:
    pods = LivePods(tmp_path)
    pods.starts = False

    def leave(number: int, frame: Any) -> None:
        raise ToldToLeave("told to leave")

    before = signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(ToldToLeave):
            make(cluster_run("efa"), pods)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert pods.deleted == ["moe-proof"]


def test_what_an_earlier_preflight_left_goes_first(tmp_path: Path, sockets: tuple[Report, LivePods]) -> None:
    pods = LivePods(tmp_path)
    pods.starts = False
    pods.create(ProofObjects(cluster_run(), sockets[0].evidence.wanted).proof())
    with pytest.raises(ServiceGone):
        make(cluster_run("any", kubernetes={"ready_s": 0.2}), pods)
    assert pods.deleted == ["moe-proof", "moe-proof"]


def test_pods_are_trainings_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = efa_run(queue="tandem", gdrcopy="host-path", exclusive_topology="topology.kubernetes.io/zone")
    wanted = wanted_of(config, load_stack(config.stack))
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "w", "uid": "u"}
    made = ProofObjects(config, wanted).proof(owner)
    assert made["metadata"]["name"] == proof_name(config) == "moe-proof" and made["metadata"]["ownerReferences"] == [
        owner
    ]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tandem"
    assert made["metadata"]["labels"]["tandem.run"] == "moe-proof"  # the loop must not take them for its own
    job = made["spec"]["replicatedJobs"][0]["template"]
    assert (job["spec"]["parallelism"], job["spec"]["completions"], job["spec"]["backoffLimit"]) == (2, 2, 0)
    assert job["spec"]["activeDeadlineSeconds"] == 900 + 60 + 60
    pod = job["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert container["image"] == "r/train"
    asked = {"memory": "1800000Mi", "hugepages-2Mi": "5120Mi", "nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "16"}
    assert container["resources"] == {"requests": {"cpu": "180000m", **asked}, "limits": asked}
    assert pod["spec"]["nodeSelector"] == {
        "node.kubernetes.io/instance-type": "p5en.48xlarge",
        "karpenter.sh/capacity-type": "reserved",
    }
    labels = {"tandem.run": "moe-proof", "app.kubernetes.io/component": "train"}
    apart = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert apart["topologyKey"] == "kubernetes.io/hostname" and apart["labelSelector"]["matchLabels"] == labels
    zone = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert zone["labelSelector"]["matchLabels"] == labels.copy() and labels.items() <= pod["metadata"]["labels"].items()
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["PET_NNODES"] == "2" and values["PET_NPROC_PER_NODE"] == "8"
    assert values["PET_MASTER_ADDR"] == "moe-proof-train-0-0.moe-proof"
    assert "REDIS_PASSWORD" not in values and [one for one in container["envFrom"] if "secretRef" in one] == []
    assert {one["name"] for one in container["volumeMounts"]} == {"scratch", "shared-memory", "gdrcopy"}
    assert {one["name"] for one in pod["spec"]["volumes"]} == {"scratch", "shared-memory", "gdrcopy"}
    sent = container["command"][container["command"].index("--wanted") + 1]
    assert msgspec.json.decode(sent) == {
        "efa": True, "gin": "none", "deep_ep_build": "amazon", "interfaces": 16, "gpus": 8
    }  # fmt: skip


def test_gin_is_wanted_where_deep_ep_may_run() -> None:
    config = efa_run().model_copy(update={"train": efa_run().train.model_copy(update={"expert_parallel": 8})})
    assert wanted_of(config, load_stack("deepep-efa")).gin == "efa-gda"
    assert wanted_of(efa_run(), load_stack("deepep-efa")).gin == "none"


def test_one_training_pod_without_efa_needs_no_proof() -> None:
    config = cluster_run(train={"ranks": 1}, kubernetes={"train": {"nodes": 1}})
    assert check_transport(config, load_stack("cpu"))["not_made"] == "training is one pod"


def test_one_machine_says_what_it_is(tmp_path: Path) -> None:
    stack = load_stack("cpu")
    assert check_transport(config_in(tmp_path), stack)["not_made"] == "the run is on one machine"
    given = executor_input(
        config_in(tmp_path, transport={"expect": "efa"}), {"checkpoint": ""}, tmp_path, artifacts=("manifest",)
    )
    with pytest.raises(Failure, match="transport.expect is efa, but this machine has no EFA device in") as caught:
        preflight(Step("preflight", given))
    assert caught.value.exit_code == 64
    device = tmp_path / "infiniband/rdmap0/device"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1d0f\n")
    with pytest.raises(BadConfig, match="all roles run on this one machine"):
        check_transport(config_in(tmp_path, transport={"expect": "efa"}), stack, tmp_path)


def test_a_report_that_other_lines_surround_is_found(sockets: tuple[Report, LivePods]) -> None:
    report, _ = sockets
    line = f"2026-11-03T10:00:00.1Z [0] {MARK}{msgspec.json.encode(report).decode()}"
    assert msgspec.json.decode(line.partition(MARK)[2], type=Report) == report
    assert proof_module.PODS == 2
