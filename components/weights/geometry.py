"""Geometry of a Qwen3-MoE checkpoint: read from its config.json, told as the tensors it must hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from configs.failure import BadData

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL_TYPE = "qwen3_moe"


class Geometry(msgspec.Struct, frozen=True):
    """What config.json says of the model's shape, under transformers' names (Qwen3MoeConfig)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None

    @property
    def eos_ids(self) -> list[int]:
        """Tokens that end a completion; empty when config.json names none."""
        ids = self.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else ids

    def tensors(self) -> Iterator[tuple[str, list[int]]]:
        """Name and shape of every tensor of the checkpoint."""
        hidden = self.hidden_size
        yield "model.embed_tokens.weight", [self.vocab_size, hidden]
        yield "model.norm.weight", [hidden]
        if not self.tie_word_embeddings:
            yield "lm_head.weight", [self.vocab_size, hidden]
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            yield f"{prefix}input_layernorm.weight", [hidden]
            yield f"{prefix}post_attention_layernorm.weight", [hidden]
            for name, shape in (*self._attention(), *self._mlp()):
                yield prefix + name, shape

    def fused_shapes(self) -> dict[str, list[int]]:
        """Name and shape of every parameter in memory, where a layer's experts are stacked."""
        shapes = {name: shape for name, shape in self.tensors() if ".experts." not in name}
        experts, hidden, wide = self.num_experts, self.hidden_size, self.moe_intermediate_size
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}.mlp.experts."
            shapes[f"{prefix}gate_up_proj"] = [experts, 2 * wide, hidden]
            shapes[f"{prefix}down_proj"] = [experts, hidden, wide]
        return shapes

    def _attention(self) -> Iterator[tuple[str, list[int]]]:
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        rows = {"q": (queries, self.hidden_size), "k": (keys, self.hidden_size), "v": (keys, self.hidden_size)}
        for part, (wide, deep) in {**rows, "o": (self.hidden_size, queries)}.items():
            yield f"self_attn.{part}_proj.weight", [wide, deep]
        yield "self_attn.q_norm.weight", [self.head_dim]
        yield "self_attn.k_norm.weight", [self.head_dim]

    def _mlp(self) -> Iterator[tuple[str, list[int]]]:
        hidden, wide = self.hidden_size, self.moe_intermediate_size
        yield "mlp.gate.weight", [self.num_experts, hidden]
        for expert in range(self.num_experts):
            prefix = f"mlp.experts.{expert}."
            yield f"{prefix}gate_proj.weight", [wide, hidden]
            yield f"{prefix}up_proj.weight", [wide, hidden]
            yield f"{prefix}down_proj.weight", [hidden, wide]


def read_geometry(file: Path, uri: str) -> Geometry:
    """Read a checkpoint's config.json.

    Args:
        file: The local file.
        uri: What to call it in a message.

    Raises:
        BadData: it is not JSON, names another architecture, or leaves a size out.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise BadData(f"{uri}: is missing or no JSON object; give a folder that save_pretrained wrote")
    return geometry_of({**values, "eos_token_id": _ends(values, file)}, uri)


def _ends(values: dict[str, Any], file: Path) -> Any:
    """Tokens that end a completion: engines take those of generation_config.json, should there be one, besides."""
    ends = values.get("eos_token_id")
    try:
        more = json.loads(file.with_name("generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return ends
    found = [one for each in (ends, more) for one in (each if isinstance(each, list) else [each]) if one is not None]
    return list(dict.fromkeys(found)) or None


def geometry_of(values: dict[str, Any], uri: str) -> Geometry:
    """The geometry in the values of a config.json.

    Raises:
        BadData: another architecture, a variant that the engine does not compute, or a size is left out.
    """
    architectures, model_type = values.get("architectures") or [], values.get("model_type")
    if architectures != [ARCHITECTURE] or model_type != MODEL_TYPE:
        named = ", ".join(map(str, architectures)) or "none"
        raise BadData(
            f"{uri}: architecture is {named} ({model_type}), but the loop trains {ARCHITECTURE} ({MODEL_TYPE});"
            " give such a checkpoint"
        )
    if values.get("quantization_config"):
        raise BadData(f"{uri}: the checkpoint is quantized, but the loop trains floats; give the unquantized one")
    try:
        geometry = msgspec.convert(_of_any_age(values, uri), Geometry)
    except msgspec.ValidationError as error:
        raise BadData(
            f"{uri}: {str(error)[:1].lower()}{str(error)[1:]}; give a complete Qwen3-MoE config.json"
        ) from None
    for kernel in ("hidden_size", "moe_intermediate_size"):
        if getattr(geometry, kernel) % 4:
            raise BadData(f"{uri}: {kernel} {getattr(geometry, kernel)} is no multiple of 4, which the kernels need")
    sizes = [
        size for name, size in msgspec.structs.asdict(geometry).items() if type(size) is int and name != "eos_token_id"
    ]
    if min(sizes) < 1:
        raise BadData(f"{uri}: holds a size below 1; give a complete Qwen3-MoE config.json")
    return geometry


def _of_any_age(values: dict[str, Any], uri: str) -> dict[str, Any]:
    """The values under one set of names, whichever transformers wrote them.

    Raises:
        BadData: the model is a variant that trainer and engines would not compute alike.
    """
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    for odd, is_so in (
        (f"rope_type {kind}", kind != "default"),
        ("attention_bias", bool(values.get("attention_bias"))),
        ("layers without experts", bool(values.get("mlp_only_layers")) or values.get("decoder_sparse_step", 1) != 1),
        (f"hidden_act {values.get('hidden_act')}", values.get("hidden_act", "silu") != "silu"),
        ("a sliding window", bool(values.get("use_sliding_window"))),
    ):
        if is_so:
            raise BadData(f"{uri}: the model has {odd}, which the engine does not compute; give a plain Qwen3-MoE")
    return {
        # transformers 5 writes the older key under a new name.
        "num_experts": values.get("num_local_experts"),
        "rms_norm_eps": 1e-6,
        **values,
        "rope_theta": float(rope.get("rope_theta", values.get("rope_theta", 10000.0))),
    }
