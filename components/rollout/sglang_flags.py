"""The command line and environment of an SGLang server, rendered from configuration, hardware and stack.

What a version of SGLang does not have, or what its options do to one another, is refused here in a sentence instead of
by the server after a minute. Sources: the server arguments of the wheels 0.5.9 to 0.5.23 (arg_groups/moe_hook.py and
overrides.py of 0.5.23).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from components.weights.geometry import read_geometry
from configs.failure import BadConfig
from configs.hardware import HardwareProfile
from configs.run import WeightsConfig
from configs.sglang import SGLangConfig
from configs.stack import Stack, below

SHIM = Path(__file__).resolve().parents[2] / "images" / "sglang_shim"
"""Folder that a server on a CPU needs first on its PYTHONPATH."""
CPU_TOKENS = 20_000
"""Tokens whose keys and values a server on a CPU holds by default."""
STREAM_INTERVAL = 64
"""Tokens of a completion between two of its partial results."""
CONTEXT_KEPT_BACK = 8
"""Tokens of its context that SGLang leaves unused, rounded up: six behind an input, two behind a sequence."""
NCCL_GIN_TYPES = {"proxy": "2", "efa-gda": "5"}
"""NCCL's numbers for who starts a transfer of DeepEP V2."""


class Launch(NamedTuple):
    """How a server is started."""

    arguments: list[str]
    """After `python -m sglang.launch_server`; without host, port and keys."""
    environment: dict[str, str]
    """Variables beside those that are inherited."""
    notes: list[str]
    """Sentences on what the options cost."""


def uses_cpu(config: SGLangConfig, hardware: HardwareProfile) -> bool:
    """Whether a server on `hardware` runs on the CPU."""
    return config.device == "cpu" or (config.device == "auto" and not hardware.gpus)


def render(
    config: SGLangConfig,
    weights: WeightsConfig,
    hardware: HardwareProfile,
    stack: Stack,
    folder: Path,
    tokenizer: bool = False,
) -> Launch:
    """The server of one rollout worker.

    Args:
        folder: Hugging Face folder of the policy it starts with.
        tokenizer: Whether the server also turns tokens into text, which a worker has no use for.

    Raises:
        BadConfig: the stack's SGLang has no such choice, the hardware not so many GPUs, or options contradict.
    """
    cpu = uses_cpu(config, hardware)
    check(config, weights, hardware, stack)
    arguments = [
        "--model-path", str(folder), "--dtype", weights.dtype, *([] if tokenizer else ["--skip-tokenizer-init"]),
        _increments(stack), "--stream-interval", str(STREAM_INTERVAL), "--grammar-backend", "none",
        "--log-level-http", "warning", "--context-length", str(_context(folder) + CONTEXT_KEPT_BACK),
    ]  # fmt: skip
    # Without work its scheduler would keep a core busy, which training needs.
    arguments += ["--device", "cpu", "--sleep-on-idle"] if cpu else _gpu_arguments(config, stack)
    if tokens := config.max_total_tokens or (CPU_TOKENS if cpu else 0):
        arguments += ["--max-total-tokens", str(tokens)]
    if config.routed_experts:
        arguments.append("--enable-return-routed-experts")
    return Launch(
        [*arguments, *config.extra_arguments], _environment(config, stack, cpu), list(_notes(config, stack, cpu))
    )


def check(config: SGLangConfig, weights: WeightsConfig, hardware: HardwareProfile, stack: Stack) -> None:
    """Refuse what cannot be had.

    Raises:
        BadConfig: the stack's SGLang has no such choice, the hardware not so many GPUs, or options contradict.
    """
    cpu = uses_cpu(config, hardware)
    if not cpu and weights.transfer == "collective" and weights.collective_backend == "gloo":
        raise BadConfig(
            "weights.collective_backend is gloo, which does not reach GPUs; set it to nccl, or weights.transfer to pull"
        )
    for objection in (
        *_of_version(config, weights, stack),
        *_of_shape(config, hardware, cpu),
        *_of_experts(config, stack, cpu),
    ):
        raise BadConfig(objection)


def _context(folder: Path) -> int:
    return read_geometry(folder / "config.json", str(folder / "config.json")).max_position_embeddings


def _increments(stack: Stack) -> str:
    """The flag that makes a partial result hold what is new only; it was renamed."""
    old = stack.sglang and below(stack.sglang, "0.5.17")
    return "--stream-output" if old else "--incremental-streaming-output"


def _gpu_arguments(config: SGLangConfig, stack: Stack) -> list[str]:
    arguments = ["--tp-size", str(config.tensor_parallel), "--mem-fraction-static", f"{config.memory_fraction:g}"]
    if config.data_parallel_attention > 1:
        arguments += ["--dp-size", str(config.data_parallel_attention), "--enable-dp-attention"]
    if config.expert_parallel > 1:
        arguments += ["--ep-size", str(config.expert_parallel)]
        if stack.expert_backend != "none":
            arguments += ["--moe-a2a-backend", stack.expert_backend]
        if stack.expert_backend == "deepep":
            arguments += ["--deepep-mode", config.deepep_mode]
        if stack.expert_backend == "deepep_v2":
            arguments += ["--deepep-v2-mode", config.deepep_v2_mode]
    return arguments


def _environment(config: SGLangConfig, stack: Stack, cpu: bool) -> dict[str, str]:
    found = {
        "HF_HUB_OFFLINE": "1",
        # A health check that generates hangs for 20 s while the server is paused, and then marks it unhealthy.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # The context is given a little longer than the model's; what is sent stays within the model's.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Seconds that an idle connection stays open, far beyond the client's own: a worker whose loop stood still must not
        # send on one that is being closed.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "300",
        # A server that is told to stop would otherwise wait for requests that a pause holds up for good.
        "SGL_FORCE_SHUTDOWN": "1",
    }
    if cpu:
        return found | {"PYTHONPATH": str(SHIM), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    if config.expert_parallel > 1 and stack.expert_backend == "deepep_v2" and stack.gin in NCCL_GIN_TYPES:
        found["NCCL_GIN_TYPE"] = NCCL_GIN_TYPES[stack.gin]
        if stack.gin == "efa-gda":
            found["NCCL_SYM_GIN_KERNELS_ENABLE"] = "0"
    return found


def _notes(config: SGLangConfig, stack: Stack, cpu: bool) -> Iterator[str]:
    if cpu or config.expert_parallel == 1:
        return
    if stack.expert_backend == "deepep" and config.deepep_mode == "normal":
        yield "sglang.deepep_mode normal makes SGLang run without CUDA graphs; `auto` keeps them for decoding"
    if stack.expert_backend == "deepep_v2":
        yield "expert_backend deepep_v2 makes SGLang run prefills without CUDA graphs"


def _of_version(config: SGLangConfig, weights: WeightsConfig, stack: Stack) -> Iterator[str]:
    version = stack.sglang
    if not version:
        return
    if weights.transfer == "collective" and below(version, "0.5.21"):
        yield (
            f"weights.transfer is collective, but sglang {version} of stack {stack.name} has no begin_weight_update, which"
            " ships from 0.5.21; set weights.transfer to pull or take a newer sglang"
        )
    if config.expert_parallel > 1 and stack.expert_backend == "deepep_v2" and below(version, "0.5.19"):
        yield (
            f"sglang {version} of stack {stack.name} has no deepep_v2 backend, which first ships in 0.5.19; take sglang"
            " 0.5.19 or later"
        )


def _of_shape(config: SGLangConfig, hardware: HardwareProfile, cpu: bool) -> Iterator[str]:
    ranks = config.tensor_parallel
    if not cpu and not hardware.gpus:
        yield f"sglang.device is cuda, but hardware {hardware.name} has no GPU; set sglang.device to auto or cpu"
    if cpu and (ranks, config.expert_parallel, config.data_parallel_attention) != (1, 1, 1):
        yield (
            "a server on a CPU has one rank, but sglang.tensor_parallel, expert_parallel or data_parallel_attention is"
            " above 1; set them to 1 or name hardware with GPUs"
        )
    if not cpu and ranks > hardware.gpus:
        if config.expert_parallel > 1 and config.deepep_v2_mode == "direct":
            yield (
                f"sglang.deepep_v2_mode direct is for one node, but {ranks} GPUs are more than the {hardware.gpus} of"
                f" {hardware.name}; set hybrid"
            )
        yield (
            f"sglang.tensor_parallel {ranks} is more than the {hardware.gpus} GPUs of {hardware.name}, and a server that a"
            " worker starts stays on its node; lower it, or start such servers yourself and name them in sglang.urls"
        )


def _of_experts(config: SGLangConfig, stack: Stack, cpu: bool) -> Iterator[str]:
    ranks, experts = config.tensor_parallel, config.expert_parallel
    if cpu or experts == 1:
        return
    if stack.expert_backend != "none" and experts != ranks:
        yield (
            f"expert_backend {stack.expert_backend} makes SGLang spread the experts over all {ranks} GPUs of a server,"
            f" but sglang.expert_parallel is {experts}; set it to {ranks}, or to 1 to go without"
        )
    if ranks % experts:
        yield f"sglang.tensor_parallel {ranks} is not a multiple of sglang.expert_parallel {experts}; choose a multiple"
