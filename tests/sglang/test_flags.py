"""The rendered command lines, beside goldens, and what is refused (TANDEM_GOLDEN=1 writes the goldens again)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from components.rollout.sglang_flags import SHIM, Launch, render
from configs.failure import BadConfig
from configs.hardware import load_hardware
from configs.run import WeightsConfig
from configs.sglang import SGLangConfig
from configs.stack import load_stack
from tests.rollout.contract_policy import Version

GOLDEN = Path(__file__).parent / "golden"
EP8: dict[str, Any] = {"tensor_parallel": 8, "expert_parallel": 8}


@pytest.fixture
def rendered(versions: list[Version]) -> Any:
    def launch(hardware: str, stack: str, weights: dict[str, Any] | None = None, **sglang: Any) -> Launch:
        config, weights_config = SGLangConfig(**sglang), WeightsConfig(**(weights or {}))
        return render(config, weights_config, load_hardware(hardware), load_stack(stack), versions[0].folder)

    return launch


@pytest.mark.parametrize(
    ("name", "hardware", "stack", "sglang"),
    (
        ("cpu", "laptop", "cpu", {}),
        ("cpu-routed-experts", "laptop", "cpu", {"routed_experts": True, "max_total_tokens": 4096}),
        ("p5en-deepep-efa", "p5en", "deepep-efa", {**EP8, "data_parallel_attention": 8}),
        ("p5en-deepep-efa-one-gpu", "p5en", "deepep-efa", {"memory_fraction": 0.7}),
        ("p5en-slime-baseline", "p5en", "slime-baseline", {"tensor_parallel": 8, "expert_parallel": 4}),
    ),
)
def test_a_command_line_is_as_recorded(
    rendered: Any, versions: list[Version], name: str, hardware: str, stack: str, sglang: dict[str, Any]
) -> None:
    launch = rendered(hardware, stack, **sglang)
    text = "\n".join(
        [*launch.arguments, "", *(f"{key}={value}" for key, value in sorted(launch.environment.items())), ""]
    )
    text = text.replace(str(versions[0].folder), "FOLDER").replace(str(SHIM), "SHIM")
    if os.environ.get("TANDEM_GOLDEN"):
        (GOLDEN / f"{name}.txt").write_text(text)
    assert text == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("hardware", "stack", "weights", "sglang", "words"),
    (
        ("laptop", "cpu", {}, {"device": "cuda"}, "laptop has no GPU"),
        ("laptop", "cpu", {}, {"tensor_parallel": 2}, "a server on a CPU has one rank"),
        ("p5en", "deepep-efa", {}, {"tensor_parallel": 16}, "more than the 8 GPUs of p5en"),
        (
            "p5en", "deepep-efa", {}, {"tensor_parallel": 16, "expert_parallel": 16, "deepep_v2_mode": "direct"},
            "direct is for one node",
        ),
        ("p5en", "deepep-efa", {}, {"tensor_parallel": 8, "expert_parallel": 4}, "spread the experts over all 8 GPUs"),
        ("p5en", "slime-baseline", {}, {"tensor_parallel": 8, "expert_parallel": 3}, "not a multiple"),
        ("p5en", "slime-baseline", {"transfer": "collective", "collective_backend": "nccl"}, {}, "no begin_weight_update"),
        ("p5en", "deepep-efa", {"transfer": "collective"}, {}, "gloo, which does not reach GPUs"),
    ),
)  # fmt: skip
def test_what_does_not_go_is_refused_in_a_sentence(
    rendered: Any, hardware: str, stack: str, weights: dict[str, Any], sglang: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadConfig, match=words) as refused:
        rendered(hardware, stack, weights, **sglang)
    assert "\n" not in str(refused.value) and ";" in str(refused.value)


def test_a_backend_that_a_version_lacks_is_refused(versions: list[Version]) -> None:
    stack = load_stack("deepep-efa").model_copy(update={"sglang": "0.5.17"})
    with pytest.raises(BadConfig, match="no deepep_v2 backend"):
        render(SGLangConfig(**EP8), WeightsConfig(), load_hardware("p5en"), stack, versions[0].folder)


def test_what_an_option_costs_is_said(versions: list[Version]) -> None:
    stack = load_stack("deepep-efa").model_copy(update={"expert_backend": "deepep", "efa_installer": ""})
    config = SGLangConfig(**EP8, deepep_mode="normal")
    launch = render(config, WeightsConfig(), load_hardware("p5en"), stack, versions[0].folder)
    assert launch.arguments[launch.arguments.index("--deepep-mode") + 1] == "normal"
    assert any("CUDA graphs" in note for note in launch.notes)
