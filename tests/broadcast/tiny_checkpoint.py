"""A tiny checkpoint that is the same wherever it is made, for checksums that a real server once gave."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from components.weights.geometry import Geometry, geometry_of

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 15, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "norm_topk_prob": True, "dtype": "float32", "bos_token_id": 1,
    "eos_token_id": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


def geometry(**changes: object) -> Geometry:
    return geometry_of(CONFIG | changes, "config.json")


def tensors(shapes: Geometry) -> dict[str, np.ndarray]:
    """float32 weights that follow from their names."""
    return {
        name: np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32) / 50
        for name, shape in shapes.tensors()
    }


def save(folder: Path, **changes: object) -> None:
    """Write the checkpoint, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors(geometry(**changes)), folder / "model.safetensors", metadata={"format": "pt"})
