"""Qwen3-MoE's forward pass in plain torch over a policy's own parameters, with a key-value cache.

It holds no copy of the weights when made from a transformers model, and needs no transformers when made from a folder
(importing it costs a CPU process more than loading the tiny model does). Log-probabilities agree with the transformers
forward to float32 rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from components.weights.geometry import Geometry, geometry_of, read_geometry
from components.weights.policy import checkpoint_views
from configs.failure import BadData

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Cache = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values a layer, each [N, kv heads, columns, head_dim]."""


class TorchPolicy:
    """A policy's parameters and their forward pass.

    Attributes:
        geometry: The model's sizes.
        tensors: Every parameter under its checkpoint name, views of the memory the forward pass reads.
    """

    def __init__(self, geometry: Geometry, fused: dict[str, torch.Tensor]) -> None:
        self.geometry = geometry
        self.tensors = checkpoint_views(fused)
        self._dtype = torch.float32
        self._p = fused
        self._head = fused.get("lm_head.weight", fused["model.embed_tokens.weight"])
        positions = torch.arange(geometry.max_position_embeddings, dtype=torch.float32)
        steps = torch.arange(0, geometry.head_dim, 2, dtype=torch.float32) / geometry.head_dim
        angles = torch.outer(positions, 1.0 / geometry.rope_theta**steps)
        angles = torch.cat([angles, angles], -1)
        self._cos, self._sin = angles.cos(), angles.sin()

    @classmethod
    def empty(cls, geometry: Geometry) -> TorchPolicy:
        """Parameters not yet loaded: write them through `tensors`."""
        return cls(geometry, {name: torch.zeros(shape) for name, shape in geometry.fused_shapes().items()})

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> TorchPolicy:
        """Share the memory of a transformers model."""
        geometry = geometry_of(model.config.to_dict(), "the model")
        return cls(geometry, {name: parameter.data for name, parameter in model.named_parameters()})

    @classmethod
    def from_folder(cls, folder: Path) -> TorchPolicy:
        """Read a Hugging Face folder of safetensors files.

        Raises:
            BadData: another architecture, or tensors that do not fit its config.json.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        policy = cls.empty(read_geometry(folder / "config.json", str(folder / "config.json")))
        stored: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                stored |= load_file(file)
            except (OSError, SafetensorError) as error:
                raise BadData(f"{file}: cannot be read ({error}); fetch the checkpoint again") from None
        policy.load(stored, str(folder))
        return policy

    def load(self, stored: dict[str, torch.Tensor], source: str) -> None:
        """Copy checkpoint tensors into the parameters.

        Raises:
            BadData: a tensor is missing, unknown or of another shape; nothing has been copied then.
        """
        if odd := sorted(self.tensors.keys() ^ stored.keys()):
            raise BadData(f"{source}: tensors do not match the model, first '{odd[0]}' ({len(odd)} in all)")
        for name, tensor in self.tensors.items():
            if tensor.shape != stored[name].shape:
                raise BadData(
                    f"{source}: '{name}' is {tuple(stored[name].shape)}, the model needs {tuple(tensor.shape)}"
                )
        for name, tensor in self.tensors.items():
            tensor.copy_(stored[name])
        self._dtype = next(iter(stored.values())).dtype

    def stored(self) -> dict[str, torch.Tensor]:
        """The parameters in the type they were loaded in, which the float32 in memory holds exactly."""
        return {name: tensor.to(self._dtype) for name, tensor in self.tensors.items()}

    def new_cache(self, rows: int, columns: int) -> Cache:
        """An empty cache for `rows` sequences of up to `columns` tokens."""
        g = self.geometry
        shape = (rows, g.num_key_value_heads, columns, g.head_dim)
        return [(torch.empty(shape), torch.empty(shape)) for _ in range(g.num_hidden_layers)]

    def forward(self, ids: torch.Tensor, cache: Cache, column: int, pad: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the last column, float32 [N, V]; appends to the cache.

        Args:
            ids: Tokens [N, T] of columns `column` to `column + T`.
            cache: Filled up to `column`.
            column: Columns already in the cache.
            pad: Padding columns at the left of each row [N], or None when there are none.
        """
        g, p = self.geometry, self._p
        rows, length = ids.shape
        end = column + length
        columns = torch.arange(column, end)
        positions = columns if pad is None else (columns - pad[:, None]).clamp_min(0)[:, None]
        mask = None if pad is None else self._mask(pad, column, end)
        x = p["model.embed_tokens.weight"][ids]
        for index, (keys, values) in enumerate(cache):
            at = f"model.layers.{index}."
            h = F.rms_norm(x, (g.hidden_size,), p[at + "input_layernorm.weight"], g.rms_norm_eps)
            q = self._heads(h, at + "self_attn.q_", positions)
            keys[:, :, column:end] = self._heads(h, at + "self_attn.k_", positions)
            v = F.linear(h, p[at + "self_attn.v_proj.weight"])
            values[:, :, column:end] = v.view(rows, length, -1, g.head_dim).transpose(1, 2)
            if length == 1:
                # The query heads that share a key head become its queries: fewer, larger products.
                q = q.reshape(rows, g.num_key_value_heads, -1, g.head_dim)
            attended = F.scaled_dot_product_attention(
                q, keys[:, :, :end], values[:, :, :end], attn_mask=mask,
                is_causal=mask is None and length > 1, enable_gqa=length > 1,
            ).view(rows, g.num_attention_heads, length, g.head_dim)  # fmt: skip
            x = x + F.linear(attended.transpose(1, 2).reshape(rows, length, -1), p[at + "self_attn.o_proj.weight"])
            h = F.rms_norm(x, (g.hidden_size,), p[at + "post_attention_layernorm.weight"], g.rms_norm_eps)
            x = x + self._experts(h.reshape(rows * length, -1), at + "mlp.").view_as(x)
        last = F.rms_norm(x[:, -1], (g.hidden_size,), p["model.norm.weight"], g.rms_norm_eps)
        return F.linear(last, self._head)

    def _heads(self, h: torch.Tensor, name: str, positions: torch.Tensor) -> torch.Tensor:
        """Queries or keys [N, heads, T, D], normalised and rotated."""
        g = self.geometry
        heads = F.linear(h, self._p[name + "proj.weight"]).view(*h.shape[:2], -1, g.head_dim)
        heads = F.rms_norm(heads, (g.head_dim,), self._p[name + "norm.weight"], g.rms_norm_eps).transpose(1, 2)
        half = g.head_dim // 2
        turned = torch.cat([-heads[..., half:], heads[..., :half]], -1)
        return heads * self._cos[positions] + turned * self._sin[positions]

    def _experts(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """The mixture of experts: tokens [M, H] sorted by expert, two grouped matrix products."""
        g, p = self.geometry, self._p
        top = g.num_experts_per_tok
        weights, chosen = F.linear(x, p[at + "gate.weight"]).softmax(-1).topk(top, -1)
        if g.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        expert, order = chosen.reshape(-1).sort()
        ends = torch.bincount(expert, minlength=g.num_experts).cumsum(0).to(torch.int32)
        inner = F.grouped_mm(x[order // top], p[at + "experts.gate_up_proj"].transpose(1, 2), offs=ends)
        gate, up = inner.chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, p[at + "experts.down_proj"].transpose(1, 2), offs=ends)
        out = out * weights.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        return out[back].view(x.shape[0], top, -1).sum(1)

    @staticmethod
    def _mask(pad: torch.Tensor, column: int, end: int) -> torch.Tensor:
        """Which columns each query sees [N, 1, T, columns]: causal, and no padding."""
        keys = torch.arange(end)
        queries = torch.arange(column, end)
        visible = (keys <= queries[:, None]) & (keys >= pad[:, None, None])
        # A padding query sees itself, so that its softmax is defined; nothing reads its result.
        return (visible | (keys == queries[:, None]))[:, None]
