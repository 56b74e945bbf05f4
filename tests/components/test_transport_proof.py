"""The proof of the transport: its pods as rendered, its exchange live between two processes, its verdict."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from components.preflight import proof as proof_module
from components.preflight.evidence import MARK, Report
from components.preflight.main import preflight
from components.preflight.proof import Proof, ProofObjects, proof_name
from components.preflight.transport import check_transport, conclude, expects_efa, wanted_of
from components.release.main import end_pods
from components.step import Step
from configs.failure import BadConfig, Failure, ServiceGone, ToldToLeave
from configs.kernels import DeepEPConfig, KernelsConfig
from configs.run import RunConfig
from configs.stack import load_stack
from tests.components.execution import ROOT, config_in, executor_input
from tests.components.transport_pods import LivePods, jobset, workflow

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


def cluster_run(expect: str = "auto", transport: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    kubernetes = {"train": {"nodes": 2}, "images": {"control": "c", "train": "r/train", "rollout": "r"}, "grace_s": 1}
    return RunConfig.model_validate(
        {
            "name": "moe",
            "storage": {"root": "s3://bucket/runs", "scratch": "/scratch"},
            "loop": {"roles": "kubernetes"},
            "train": {"ranks": 16},
            "transport": {"expect": expect, "exchange_mib": 8, "timeout_s": 150, **(transport or {})},
            **sections,
            "kubernetes": {**kubernetes, **sections.get("kubernetes", {})},
        }
    )


def efa_run(**kubernetes: Any) -> RunConfig:
    return cluster_run(hardware="p5en", stack="deepep-efa", kubernetes={"train": EFA_PODS, **kubernetes})


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
    assert pods.gone


def test_efa_is_not_proven_by_it(sockets: tuple[Report, LivePods], capsys: pytest.CaptureFixture[str]) -> None:
    report = sockets[0]
    assert not report.proven
    with pytest.raises(BadConfig) as caught:
        conclude(cluster_run("efa"), report)
    assert caught.value.sentence.startswith("EFA is not proven (transport.expect): pods ")
    assert "have no /dev/infiniband/uverbs*" in caught.value.sentence
    assert "went over a plain network interface instead of EFA" in capsys.readouterr().out


HANGS = """
import sys, threading
import components.preflight.exchange as exchange
exchange.dist.destroy_process_group = lambda: threading.Event().wait()
sys.argv[0] = "exchange"
exchange.main()
"""


def test_any_passes_with_the_note_though_a_process_does_not_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, pods = cluster_run("any"), LivePods(tmp_path)
    (tmp_path / "hangs.py").write_text(HANGS)
    pods.environment, pods.module = {"PYTHONPATH": str(ROOT)}, str(tmp_path / "hangs.py")
    entry = conclude(config, make(config, pods))
    assert pods.gone
    assert entry["carried_by"] == "tcp (lo)" and entry["expected"] == "any" and entry["not_made"] is None
    assert entry["notes"] == ["over-ethernet"]
    out = capsys.readouterr().out
    assert "transport: tcp (lo)" in out and "note: the bytes of pods" in out


def test_an_exchange_that_fails_is_told_and_deleted(tmp_path: Path) -> None:
    pods = LivePods(tmp_path)
    pods.environment = {"LOCAL_WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "0"}  # torchrun refuses
    with pytest.raises(BadConfig, match="left no report: pod-.*train ended with exit code 1") as caught:
        make(cluster_run("efa"), pods)
    assert pods.gone and "\n" not in caught.value.sentence


def test_a_pod_that_does_not_start_is_named(tmp_path: Path) -> None:
    pods = LivePods(tmp_path)
    pods.starts = False
    config = cluster_run("efa", transport={"start_s": 0.5})
    words = r"pod pod-0 has not started after 0 s .*Insufficient vpc.amazonaws.com/efa\); .* or raise transport.start_s"
    with pytest.raises(ServiceGone, match=words):
        make(config, pods)
    assert pods.gone


def test_an_exchange_that_hangs_is_ended_with_its_last_words(tmp_path: Path) -> None:
    pods = LivePods(tmp_path)
    pods.environment = {"PET_NNODES": "3"}  # a node that never comes
    config = cluster_run("efa", transport={"timeout_s": 3})
    with pytest.raises(ServiceGone, match=r"has not ended after 3 s \(transport.timeout_s\): pod-0 last said"):
        make(config, pods)
    assert pods.gone


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
    assert pods.gone


STUCK = """
import sys, time
import components.preflight.exchange as exchange
swap = exchange.swap
def stuck(size, talk):
    if size > 1:
        time.sleep(1000)
    swap(size, talk)
exchange.swap, exchange.TELL_AT = stuck, 0.2
sys.argv[0] = "exchange"
exchange.main()
"""


def test_an_exchange_that_is_stuck_tells_where(tmp_path: Path) -> None:
    pods = LivePods(tmp_path)
    (tmp_path / "stuck.py").write_text(STUCK)
    pods.environment, pods.module = {"PYTHONPATH": str(ROOT)}, str(tmp_path / "stuck.py")
    report = make(cluster_run("efa", {"timeout_s": 100}), pods)
    assert pods.gone and not report.proven and report.seconds == 0
    problem = report.problems[0]
    assert problem.key == "failed" and "it has not ended after 20 s; rank " in problem.sentence
    assert "is stuck in the exchange itself);" in problem.sentence
    assert not {"no-traffic", "over-ethernet"} & {each.key for each in report.problems}


def test_a_report_of_another_release_is_one_sentence(tmp_path: Path) -> None:
    pods = LivePods(tmp_path)
    (tmp_path / "older.py").write_text(f"print({MARK!r} + '{{\"carried_by\": 3}}')")
    pods.module = str(tmp_path / "older.py")
    with pytest.raises(BadConfig, match="the report of pod-. cannot be read .* images train and control from the same"):
        make(cluster_run("any"), pods)
    assert pods.gone


def test_the_exchange_starts_deep_eps_transfers_as_training_does(tmp_path: Path) -> None:
    pods = LivePods(tmp_path)
    pods.environment = {"NCCL_GIN_TYPE": ""}
    kernels = {"deep_ep": {"gin": "efa-gda"}}
    report = make(cluster_run("any", train={"ranks": 16, "expert_parallel": 2}, kernels=kernels), pods)
    assert {node.host.environment["NCCL_GIN_TYPE"] for node in report.evidence.nodes} == {"5"}
    assert "gin-unset" not in {problem.key for problem in report.problems}


def test_neither_a_loop_nor_anothers_proof_is_touched(tmp_path: Path) -> None:
    config = cluster_run("any", {"start_s": 0.2})
    others = {
        # A run may have this name, and other executions of this run a proof.
        "moe-proof": jobset("moe-proof", "a", "mine"),
        "moe-proof-live": jobset("moe-proof-live", "b", "theirs", run="moe"),
        "moe-proof-by-hand": jobset("moe-proof-by-hand", "c", run="moe"),
        "other-proof-mine": jobset("other-proof-mine", "d", "mine", run="other"),
    }
    left = {"moe-proof-left": jobset("moe-proof-left", "e", "mine", run="moe")}
    for owner in (workflow("mine"), None):
        pods = LivePods(tmp_path)
        pods.starts, pods.others = False, {**others, **left}
        with pytest.raises(ServiceGone):
            Proof(config, wanted_of(config, load_stack("cpu")), pods, owner).make()  # type: ignore[arg-type]
        assert pods.others == (others if owner else {**others, **left})
        assert pods.deleted[:-1] == (["moe-proof-left"] if owner else []) and pods.body is None


def test_release_ends_the_proofs_of_its_own_execution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = LivePods(tmp_path)
    monkeypatch.setattr("components.rl_loop.cluster.LoopCluster", lambda: pods)
    pods.others = {
        "moe": jobset("moe", "a", "mine"),
        "moe-proof": jobset("moe-proof", "b", "mine"),
        "x": jobset("x", "c", "mine", run="moe"),
        "y": jobset("y", "d", "theirs", run="moe"),
    }
    end_pods(cluster_run())
    assert pods.deleted == ["moe", "x"] and list(pods.others) == ["moe-proof", "y"]


@pytest.mark.parametrize("name", ["a", "moe", "a" * 40, "moe-proof", "a" * 23 + "-" + "b" * 16])
def test_no_run_has_the_name_of_a_proof(name: str) -> None:
    config = cluster_run(name=name)
    names = {proof_name(config, execution) for execution in "ab"}
    assert len(names) == 2
    for made in names:
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", made) and len(f"{made}-train-0-0-abcde") <= 63
        with pytest.raises(ValidationError):
            cluster_run(name=made)


def test_where_efa_is_not_expected_no_failure_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = LivePods(tmp_path)
    pods.starts = False
    monkeypatch.setattr("components.rl_loop.cluster.LoopCluster", lambda: pods)
    stack = load_stack("cpu")
    entry = check_transport(cluster_run("any", {"start_s": 0.2}), stack)
    assert (
        entry["not_made"].startswith("pod pod-0 has not started") and "the transport was not" in capsys.readouterr().out
    )
    with pytest.raises(ServiceGone):
        check_transport(cluster_run("efa", {"start_s": 0.2}), stack)

    def told(self: Proof) -> Report:
        raise ToldToLeave("told to leave")

    monkeypatch.setattr(Proof, "make", told)
    with pytest.raises(ToldToLeave):
        check_transport(cluster_run("any"), stack)


def test_pods_are_trainings_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = efa_run(queue="tandem", gdrcopy="host-path", exclusive_topology="topology.kubernetes.io/zone")
    wanted = wanted_of(config, load_stack(config.stack))
    owner = workflow("u")
    name = proof_name(config, "1")
    made = ProofObjects(config, wanted, name).proof(owner)
    assert made["metadata"]["name"] == name and made["metadata"]["ownerReferences"] == [owner]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tandem"
    assert made["metadata"]["labels"]["tandem.run"] == name  # the loop must not take them for its own
    assert made["metadata"]["labels"]["tandem.run/proof"] == "moe"
    job = made["spec"]["replicatedJobs"][0]["template"]
    assert (job["spec"]["parallelism"], job["spec"]["completions"], job["spec"]["backoffLimit"]) == (2, 2, 0)
    assert job["spec"]["activeDeadlineSeconds"] == 900 + 150 + 60
    pod = job["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert container["image"] == "r/train"
    asked = {"memory": "1800000Mi", "hugepages-2Mi": "5120Mi", "nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "16"}
    assert container["resources"] == {"requests": {"cpu": "180000m", **asked}, "limits": asked}
    assert pod["spec"]["nodeSelector"] == {
        "node.kubernetes.io/instance-type": "p5en.48xlarge",
        "karpenter.sh/capacity-type": "reserved",
    }
    labels = {"tandem.run": name, "app.kubernetes.io/component": "train"}
    apart = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert apart["topologyKey"] == "kubernetes.io/hostname" and apart["labelSelector"]["matchLabels"] == labels
    zone = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert zone["labelSelector"]["matchLabels"] == labels.copy() and labels.items() <= pod["metadata"]["labels"].items()
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["PET_NNODES"] == "2" and values["PET_NPROC_PER_NODE"] == "8"
    assert values["PET_MASTER_ADDR"] == f"{name}-train-0-0.{name}"
    assert values["PET_RDZV_CONF"] == "timeout=1050"
    assert "REDIS_PASSWORD" not in values and [one for one in container["envFrom"] if "secretRef" in one] == []
    assert {one["name"] for one in container["volumeMounts"]} == {"scratch", "shared-memory", "gdrcopy"}
    assert {one["name"] for one in pod["spec"]["volumes"]} == {"scratch", "shared-memory", "gdrcopy"}
    sent = container["command"][container["command"].index("--wanted") + 1]
    assert msgspec.json.decode(sent) == {
        "efa": True, "gin": "none", "deep_ep_gin": "environment", "deep_ep_build": "amazon", "interfaces": 16, "gpus": 8
    }  # fmt: skip


def test_gin_is_wanted_where_deep_ep_may_run() -> None:
    config = efa_run().model_copy(update={"train": efa_run().train.model_copy(update={"expert_parallel": 8})})
    assert wanted_of(config, load_stack("deepep-efa")).gin == "efa-gda"
    assert wanted_of(efa_run(), load_stack("deepep-efa")).gin == "none"
    proxy = config.model_copy(update={"kernels": KernelsConfig(deep_ep=DeepEPConfig(gin="proxy"))})
    assert wanted_of(proxy, load_stack("deepep-efa")).gin == "proxy"


def test_one_training_pod_without_efa_needs_no_proof() -> None:
    config = cluster_run(train={"ranks": 1}, kubernetes={"train": {"nodes": 1}})
    assert check_transport(config, load_stack("cpu"))["not_made"] == "training is one pod"


def test_training_on_one_node_takes_no_second_one_for_a_proof(capsys: pytest.CaptureFixture[str]) -> None:
    one = efa_run(train={**EFA_PODS, "nodes": 1})
    assert expects_efa(efa_run()) and not expects_efa(one)
    entry = check_transport(one, load_stack("deepep-efa"))
    assert (entry["not_made"], entry["expected"]) == ("training is one pod", "any")
    assert "note: EFA is not proven: training is one node" in capsys.readouterr().out
    asked = one.model_copy(update={"transport": one.transport.model_copy(update={"expect": "efa"})})
    assert expects_efa(asked)


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
