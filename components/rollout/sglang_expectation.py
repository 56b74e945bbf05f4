"""What a run expects of an SGLang server, and of a request before it is sent: a wrong one would kill the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from components.rollout.engine import Request
from components.rollout.sglang_client import ModelInfo, ServerInfo
from components.weights.geometry import ARCHITECTURE, read_geometry
from configs.failure import BadConfig, BadData
from configs.run import RunConfig
from configs.stack import Stack, below

SPANS_SINCE = "0.5.21"
"""SGLang version from which updates are wrapped in begin and end."""
BEYOND_INPUT = 4
"""Tokens that a sequence may have more than the longest input SGLang admits (its scheduler and model worker)."""


class Expectation:
    """The run's policy as its servers should serve it.

    Attributes:
        expert_shape: Layers and top-k of the router.
        ranks: Processes of the server, once checked.
    """

    def __init__(self, config: RunConfig, stack: Stack, start: Path) -> None:
        self._config = config
        self._stack = stack
        self._geometry = read_geometry(start / "config.json", str(start / "config.json"))
        if self._geometry.tie_word_embeddings:
            raise BadConfig(
                f"{start}: its output layer is its embedding, which SGLang's Qwen3-MoE does not serve so; set rollout.engine"
                " to torch, or give a checkpoint with an lm_head of its own"
            )
        self._context = self._geometry.max_position_embeddings
        self.ends = frozenset(self._geometry.eos_ids)
        self.expert_shape = (self._geometry.num_hidden_layers, self._geometry.num_experts_per_tok)
        self.ranks = 1
        self._longest_input = self._longest = self._context

    def check(self, url: str, info: ServerInfo, model: ModelInfo) -> None:
        """Raises BadConfig with the first thing about a server that the run cannot use."""
        for mistake in self._mistakes(info, model):
            raise BadConfig(f"the SGLang server at {url} {mistake}")
        self.ranks = info.tp_size
        self._longest_input = info.max_req_input_len
        self._longest = min(self._context, info.max_req_input_len + BEYOND_INPUT)

    def _mistakes(self, info: ServerInfo, model: ModelInfo) -> Iterator[str]:
        stack, weights = self._stack, self._config.weights
        if model.architectures and ARCHITECTURE not in model.architectures:
            yield f"serves a {model.architectures[0]}, but the run trains a {ARCHITECTURE}; start it with the run's policy"
        folder = Path(model.model_path)
        if (folder / "config.json").is_file():
            served = read_geometry(folder / "config.json", str(folder / "config.json"))
            if served != self._geometry:
                yield f"serves {folder}, which has another shape than the run's policy; start it with the run's policy"
        if stack.sglang and info.version != stack.sglang:
            yield (
                f"has version {info.version}, but stack {stack.name} names {stack.sglang}; install that version or name"
                " another stack"
            )
        if info.dtype not in ("", "auto", weights.dtype):
            yield f"serves {info.dtype}, but weights.dtype is {weights.dtype}; start it with --dtype {weights.dtype}"
        if weights.transfer == "collective" and below(info.version, SPANS_SINCE):
            yield (
                f"has version {info.version} without begin_weight_update, which ships from {SPANS_SINCE}; set"
                " weights.transfer to pull"
            )
        if self._config.sglang.routed_experts and not info.enable_return_routed_experts:
            yield "does not return routed experts; start it with --enable-return-routed-experts"

    def check_request(self, request: Request) -> None:
        """Raises BadData if a request holds a token outside the vocabulary, or is too long."""
        group, size = request.group, self._geometry.vocab_size
        begun = [one.tokens for one in request.begun if one.finish is None]
        if not request.prompt:
            raise BadData(f"group {group}: its prompt is empty")
        tokens = np.concatenate([np.array(request.prompt, np.int64), *begun])
        if tokens.min() < 0 or tokens.max() >= size:
            raise BadData(f"group {group}: holds a token outside 0…{size - 1}")
        given = len(request.prompt) + max(map(len, begun), default=0)
        if len(request.prompt) + request.max_new_tokens > self._longest or given > self._longest_input:
            raise BadData(
                f"group {group}: {len(request.prompt)} tokens and {request.max_new_tokens} new ones exceed the context of"
                f" {self._longest}; shorten the prompt or lower rollout.max_new_tokens"
            )
        if any(len(tokens) >= request.max_new_tokens for tokens in begun):
            raise BadData(
                f"group {group}: a begun completion already has {request.max_new_tokens} tokens; it is finished"
            )
