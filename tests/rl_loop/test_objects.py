"""The objects of a loop on Kubernetes, compared with the committed ones.

`TANDEM_REGENERATE=1 pytest tests/rl_loop/test_objects.py` writes them again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.preflight.cluster import pod_objections
from components.rl_loop.kubernetes import redis_url
from components.rl_loop.objects import INPUTS, Identity, LoopObjects
from components.role import Inputs
from configs.run import RunConfig
from configs.stack import Images

GOLDEN = Path(__file__).parent / "golden"
OWNER = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "w", "uid": "u"}
SMALL: dict[str, Any] = {}
GPU_NODE = {
    "gpus": 8,
    "efa_interfaces": 16,
    "cpu_millicores": 180_000,
    "memory_mib": 1_800_000,
    "hugepages_mib": 5120,
    "one_zone": True,
}
LARGE = {
    "hardware": "p5en",
    "rollout": {"workers": 16},
    "train": {"ranks": 128, "expert_parallel": 8},
    "kubernetes": {
        "queue": "tandem",
        "redis_storage_gib": 50,
        "exclusive_topology": "topology.kubernetes.io/zone",
        "train": {**GPU_NODE, "nodes": 16, "capacity": "reserved"},
        "rollout": {**GPU_NODE, "nodes": 2, "capacity": "spot"},
    },
}


def objects_of(values: dict[str, Any], **identity: str) -> LoopObjects:
    kubernetes = {
        "images": {"control": "r/control@sha256:1", "train": "r/train@sha256:2", "rollout": "r/rollout@sha256:3"},
        **values.get("kubernetes", {}),
    }
    base = {
        "name": "golden",
        "storage": {"root": "s3://bucket/runs", "scratch": "/scratch"},
        "loop": {"roles": "kubernetes"},
    }
    config = RunConfig.model_validate({**base, **values, "kubernetes": kubernetes})
    inputs = Inputs(redis_url(config), "s3://bucket/runs/golden/data/manifest.json", "s3://bucket/runs/golden/start")
    return LoopObjects(config, inputs, Identity(**{"tracking_run": "r1", "job": "j1", **identity}))


@pytest.mark.parametrize(("name", "values"), [("laptop", SMALL), ("p5en", LARGE)])
def test_objects_are_the_committed_ones(name: str, values: dict[str, Any]) -> None:
    objects = objects_of(values)
    rendered = [objects.jobset(OWNER), *objects.owned({**OWNER, "kind": "JobSet"})]
    for each in rendered:
        if each["kind"] == "ConfigMap":
            each["data"] = "the configuration"
        each["metadata"].get("annotations", {}).pop(INPUTS, None)
    text = yaml.safe_dump_all(rendered, sort_keys=True, width=120)
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("TANDEM_REGENERATE"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def pods_of(objects: LoopObjects) -> list[dict[str, Any]]:
    jobs = objects.jobset()["spec"]["replicatedJobs"]
    templates = [job["template"]["spec"]["template"] for job in jobs]
    for each in objects.owned():
        spec = each.get("spec", {})
        templates += [spec["template"]] if "template" in spec else []
        templates += [spec["leaderWorkerTemplate"]["workerTemplate"]] if "leaderWorkerTemplate" in spec else []
    return templates


@pytest.mark.parametrize("values", [SMALL, LARGE])
def test_no_pod_has_more_power_than_the_restricted_standard(values: dict[str, Any]) -> None:
    pods = pods_of(objects_of(values))
    assert len(pods) == 5
    for pod in pods:
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert not any("hostPath" in volume for volume in spec["volumes"])


def test_only_a_host_path_for_gdrcopy_needs_a_privileged_container() -> None:
    values = {**LARGE, "kubernetes": {**LARGE["kubernetes"], "gdrcopy": "host-path"}}
    privileged = [
        pod["spec"]["containers"][0]["name"]
        for pod in pods_of(objects_of(values))
        if pod["spec"]["containers"][0]["securityContext"].get("privileged")
    ]
    assert privileged == ["train", "rollout"]


def test_devices_are_requested_and_limited_alike() -> None:
    train = pods_of(objects_of(LARGE))[0]["spec"]
    resources = train["containers"][0]["resources"]
    for name, amount in {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "16", "hugepages-2Mi": "5120Mi"}.items():
        assert resources["requests"][name] == resources["limits"][name] == amount
    assert train["nodeSelector"]["karpenter.sh/capacity-type"] == "reserved"
    (shm,) = [volume for volume in train["volumes"] if volume["name"] == "shared-memory"]
    assert shm["emptyDir"]["medium"] == "Memory"


def test_a_retry_finds_the_same_inputs_and_another_configuration_does_not() -> None:
    first = objects_of(SMALL)
    assert first.digest == objects_of(SMALL, job="another execution").digest
    assert first.digest != objects_of({"train": {"steps": 7}}).digest


def test_images_come_from_the_configuration_or_the_stack() -> None:
    with_own = pods_of(objects_of(SMALL))[0]["spec"]["containers"][0]["image"]
    assert with_own == "r/train@sha256:2"
    from_stack = objects_of({"kubernetes": {"images": None}})
    assert isinstance(from_stack.images, Images)
    assert "train" in pods_of(from_stack)[0]["spec"]["containers"][0]["image"]


@pytest.mark.parametrize(("transfer", "image"), [("pull", "control"), ("collective", "train")])
def test_broadcast_has_torch_only_where_it_sends(transfer: str, image: str) -> None:
    values = {"rollout": {"engine": "sglang"}, "weights": {"transfer": transfer}}
    jobs = objects_of(values).jobset()["spec"]["replicatedJobs"]
    images = {job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0]["image"] for job in jobs}
    assert images["broadcast"].startswith(f"r/{image}@")


def test_training_ranks_are_spread_evenly_over_the_pods() -> None:
    objects = objects_of({"train": {"ranks": 4}, "kubernetes": {"train": {"nodes": 2}}})
    train = objects.jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert train["completions"] == 2
    values = {each["name"]: each.get("value") for each in train["template"]["spec"]["containers"][0]["env"]}
    assert (values["PET_NNODES"], values["PET_NPROC_PER_NODE"]) == ("2", "2")
    assert list(pod_objections(objects.config)) == []


def test_more_training_ranks_than_gpus_are_refused() -> None:
    config = objects_of({**LARGE, "train": {"ranks": 160, "expert_parallel": 8}}).config
    assert any("train.ranks is 160, but kubernetes.train has 128 GPUs" in each for each in pod_objections(config))
