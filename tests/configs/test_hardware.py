"""Hardware profiles: committed ones load, impossible ones are refused, requests that cannot be met are objected to."""

from __future__ import annotations

from typing import Any

import pytest

from configs.document import validated
from configs.failure import BadConfig
from configs.hardware import HARDWARE, HardwareProfile, PodRequest, load_hardware, objections

WHOLE_NODE = {
    "gpus": 8, "efa_interfaces": 16, "cpu_millicores": 191000, "memory_mib": 1_900_000, "hugepages_mib": 5120,
    "one_zone": True,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(file.stem for file in HARDWARE.glob("*.yaml")))
def test_committed_profiles_load(name: str) -> None:
    assert load_hardware(name).name == name


def test_an_unknown_profile_is_told() -> None:
    with pytest.raises(BadConfig, match="hardware 'h100' is unknown; choose one of laptop, p5, p5en, p6-b200"):
        load_hardware("h100")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"efa_interfaces": 32}, "p5en.48xlarge has 16; set 16"),
        ({"instance_type": "p5.48xlarge", "efa_interfaces": 32}, "p5.48xlarge has no GPU-initiated EFA"),
        ({"instance_type": "", "efa_gda": False}, "only EC2 instances have EFA"),
        ({"instance_type": "new.48xlarge", "efa_gda": False, "efa_interfaces": 12}, "shared evenly by 8 GPUs"),
        ({"allocatable_cpu_millicores": 193_000}, "exceeds the node's 192 vCPU"),
        ({"allocatable_memory_mib": 2_100_000}, "exceeds the node's 2048"),
        ({"hugepages_mib": 5121}, "a page has 2 MiB"),
        ({"gpu": ""}, "belong together"),
        ({"capacity_types": ["cheap"]}, "'capacity_types.0' is 'cheap'"),
    ],
)
def test_an_impossible_profile_is_refused(change: dict[str, Any], words: str) -> None:
    values = load_hardware("p5en").model_dump(mode="json")
    with pytest.raises(BadConfig) as caught:
        validated(HardwareProfile, values | change, "profile")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_whole_node_fits() -> None:
    assert objections(load_hardware("p5en"), PodRequest.model_validate(WHOLE_NODE)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # 1000 x vCPU less 100, as TorchX asks for, leaves nothing for the kubelet.
        ({"cpu_millicores": 191_900}, "191900 millicores of CPU asked, but p5en gives 191450"),
        ({"gpus": 9}, "9 GPUs asked"),
        ({"memory_mib": 1_940_000}, "MiB of memory asked"),
        ({"hugepages_mib": 20_000}, "MiB of 2 MiB pages asked"),
        ({"cpu_millicores": 0, "memory_mib": 0}, "without CPU or memory"),
        ({"hugepages_mib": 0}, "EFA is asked without hugepages"),
        ({"one_zone": False}, "EFA does not cross availability zones"),
        ({"gpus": 4}, "4 GPUs own 8 EFA interfaces"),
        ({"efa_interfaces": 32}, "32 EFA interfaces asked"),
    ],
)
def test_a_request_that_cannot_be_met_is_objected_to(change: dict[str, Any], words: str) -> None:
    found = objections(load_hardware("p5en"), PodRequest.model_validate(WHOLE_NODE | change))
    assert any(words in sentence for sentence in found), found
