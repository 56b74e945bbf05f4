"""KernelsConfig: how tokens travel between the ranks that hold the experts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.document import Document


class KernelsConfig(Document):
    """Expert parallelism in training; without effect while `train.expert_parallel` is 1."""

    dispatch: Literal["auto", "all_to_all", "hierarchical", "deep_ep"] = "auto"
    """How tokens travel: straight to every expert (`all_to_all`), once to a node and on from there (`hierarchical`), by
    DeepEP (GPUs), or whichever is fastest here for this model's shapes (`auto`: by a cost model and a measurement)."""
    wire: Literal["same", "fp8"] = "same"
    """Type of a token between nodes: that of the activations, or e4m3 with a scale per 128 values (then results come back
    as bfloat16). `all_to_all` knows only the former."""
    chunks: int = Field(default=0, ge=0, le=16)
    """Parts in which `hierarchical` overlaps its two levels; 0 chooses by size."""
