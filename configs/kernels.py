"""KernelsConfig: how tokens travel between the ranks that hold the experts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.document import Document


class DeepEPConfig(Document):
    """DeepEP's own settings, for `kernels.dispatch: deep_ep` (or `auto`, where it may be chosen)."""

    api: Literal["auto", "elastic", "legacy"] = "auto"
    """`elastic` is V2's ElasticBuffer, `legacy` V1's Buffer, which cannot cross nodes on EFA; `auto` takes V2 if it is
    installed."""
    num_sms: int = Field(default=0, ge=0, multiple_of=2)
    """Multiprocessors its kernels take; 0 leaves it to DeepEP, except where DeepEP cannot read the speed of the network (EFA):
    there it is 64."""
    num_qps: int = Field(default=0, ge=0)
    """Queue pairs it opens, at most; 0 leaves it to DeepEP (65 or 129). Fewer may help a network with few of them, and cost
    throughput elsewhere: measure it."""
    max_tokens: int = Field(default=0, ge=0)
    """Tokens a rank may dispatch at once. 0 agrees on it among the ranks at every dispatch and grows; a number spares that
    exchange; then more tokens are an error, and no token may name an expert twice."""
    gin: Literal["environment", "proxy", "efa-gda"] = "environment"
    """Who starts transfers between nodes (V2): what NCCL_GIN_TYPE says (on EFA, unset means the proxy), a thread of the CPU
    (type 2), the GPU over EFA (type 5; needs Amazon's fork of DeepEP)."""
    hybrid: bool = True
    """Whether V2 goes over the rail to a node and by NVLink from there, or straight to every rank."""
    multiple_reduction: bool = True
    """Whether V2 sums results in bfloat16 on their way; false sums once at the end: more exact, and more bytes."""
    deterministic: bool = False
    """Whether V2 sorts what arrives, so that the same tokens give the same bits."""
    timeout_s: int = Field(default=600, ge=600)
    """Seconds a kernel waits for other ranks. Ranks that compile DeepEP's kernels at their first dispatch may be minutes
    apart, so less is refused."""


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
    deep_ep: DeepEPConfig = DeepEPConfig()
