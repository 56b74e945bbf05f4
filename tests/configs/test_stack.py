"""Stacks: committed ones are coherent, and each known clash has a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from configs.failure import BadConfig
from configs.hardware import load_hardware
from configs.stack import Stack, below, incompatibilities, known_stacks, load_stack


@pytest.mark.parametrize("name", known_stacks())
def test_committed_stacks_are_coherent(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert incompatibilities(stack) == []


def test_an_unknown_stack_is_told() -> None:
    with pytest.raises(BadConfig, match="stack 'gpu' is unknown; choose one of cpu, deepep-efa, slime-baseline"):
        load_stack("gpu")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("slime-baseline", {"torch": "2.10.0"}, "sglang 0.5.9 pins torch 2.9.1"),
        ("slime-baseline", {"sglang_build": "stock"}, "slime 0.2.4 runs on a patched sglang"),
        ("slime-baseline", {"libfabric": "2.6.0amzn1.0"}, "EFA installer 1.49.0 brings libfabric 2.4.0amzn5.0"),
        ("slime-baseline", {"expert_backend": "deepep_v2", "deep_ep": "2.1.0"}, "has no deepep_v2 backend"),
        ("slime-baseline", {"expert_backend": "deepep", "deep_ep": "1.2.1"}, "cannot run on EFA"),
        (
            "deepep-efa",
            {"sglang": "0.5.17", "torch": "2.11.0"},
            "has no deepep_v2 backend, which first ships in 0.5.19",
        ),
        ("deepep-efa", {"torch": "2.12.0"}, "sglang 0.5.23 pins torch 2.14.1"),
        ("deepep-efa", {"deep_ep": "1.2.1"}, "has no ElasticBuffer"),
        ("deepep-efa", {"deep_ep": ""}, "needs deep_ep, but the stack has none"),
        ("deepep-efa", {"deep_ep_build": "none"}, "depends on sgl-deep-ep"),
        ("deepep-efa", {"deep_ep_build": "sgl-deep-ep"}, "delivers out of order"),
        ("deepep-efa", {"nccl": "2.30.7"}, "GIN on EFA needs NCCL 2.31.2-1 or later, but the stack loads 2.30.7"),
        ("deepep-efa", {"nccl": "2.29.1"}, "deep_ep 2.1.0 needs NCCL 2.30.4 or later"),
        ("deepep-efa", {"nccl": ""}, "but the stack loads none"),
        ("deepep-efa", {"aws_ofi_nccl": "1.19.2"}, "GIN needs aws-ofi-nccl 1.21 or later"),
        (
            "deepep-efa",
            {"efa_installer": "1.49.0", "libfabric": "2.4.0amzn5.0"},
            "needs EFA installer 1.50 or later, but the stack has 1.49.0",
        ),
        ("deepep-efa", {"efa_driver": "3.1.0"}, "needs EFA driver 3.3.0 or later"),
        ("deepep-efa", {"gdrcopy": "2.4"}, "needs GDRCopy 2.5 or later"),
        ("deepep-efa", {"gin": "none"}, "set gin to proxy or efa-gda"),
    ],
)
def test_a_known_clash_has_a_sentence(name: str, change: dict[str, Any], words: str) -> None:
    found = incompatibilities(load_stack(name).model_copy(update=change))
    assert any(words in sentence for sentence in found), found
    assert not any("\n" in sentence for sentence in found)


def test_upstream_kernels_work_through_the_proxy() -> None:
    change = {"deep_ep_build": "sgl-deep-ep", "gin": "proxy"}
    assert incompatibilities(load_stack("deepep-efa").model_copy(update=change)) == []


@pytest.mark.parametrize(
    ("stack", "hardware", "words"),
    [
        ("deepep-efa", "p5", "gin efa-gda does not work on p5.48xlarge"),
        ("deepep-efa", "laptop", "has no EFA interface"),
        ("slime-baseline", "laptop", "has no GPU"),
    ],
)
def test_a_stack_and_its_hardware_are_compared(stack: str, hardware: str, words: str) -> None:
    found = incompatibilities(load_stack(stack), load_hardware(hardware))
    assert any(words in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("stack", "hardware"), [("deepep-efa", "p5en"), ("deepep-efa", "p6-b200"), ("slime-baseline", "p5")]
)
def test_intended_pairs_fit(stack: str, hardware: str) -> None:
    assert incompatibilities(load_stack(stack), load_hardware(hardware)) == []


def test_the_digest_follows_the_content() -> None:
    stack = load_stack("cpu")
    assert stack.digest == Stack.model_validate(stack.model_dump()).digest
    assert stack.digest != stack.model_copy(update={"torch": "2.14.1"}).digest


@pytest.mark.parametrize(
    ("version", "floor", "older"),
    [
        ("2.31.2-1", "2.31.2-1", False),
        ("2.31.2", "2.31.2-1", True),
        ("2.6.0amzn1.0", "2.6", False),
        ("2.4.0amzn5.0", "2.6", True),
        ("0.5.9", "0.5.19", True),
        ("", "1", True),
    ],
)
def test_versions_are_compared_as_versions(version: str, floor: str, older: bool) -> None:
    assert below(version, floor) is older
