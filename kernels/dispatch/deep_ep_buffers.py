"""DeepEP's two interfaces as one: tokens once a rank there, sums back, and the same way again.

Signatures and shapes are those of deep_ep 2.1.0 (deep_ep/buffers/elastic.py and legacy.py); a test compares every call
here with the sources of that wheel.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from configs.failure import BadConfig
from configs.kernels import DeepEPConfig
from kernels.dispatch.deep_ep_environment import can_size_itself

MANY_SMS = 64
"""Multiprocessors where DeepEP cannot choose: what it takes at least when it does not run beside other kernels, and what
AWS's published runs on EFA were made with."""

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""bfloat16 [T, H], or e4m3 [T, H] with float32 [T, H / 128]."""


class Arrived(NamedTuple):
    """What one rank received: R rows, one for each token with an expert here."""

    x: Rows
    idx: torch.Tensor
    """int [R, K]: local expert numbers, -1 where a slot is unused or another rank's."""
    weights: torch.Tensor
    """float32 [R, K]."""
    handle: Any


class Channel(Protocol):
    """One buffer, for up to `tokens` tokens a rank."""

    multiple: int
    """H must be a multiple of it."""
    grows: bool
    """Whether more tokens need a larger buffer."""
    most_experts: int
    """Experts of all ranks that its kernels have room for."""
    most_local: int
    """Experts of a rank."""

    def dispatch(self, x: Rows, idx: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Arrived:
        """Send [T, H] by the experts in `idx` [T, K]; collective."""

    def again(self, x: torch.Tensor, handle: Any) -> torch.Tensor:
        """bfloat16 [T, H] the way of an earlier dispatch -> [R, H]; collective."""

    def combine(
        self, x: torch.Tensor, handle: Any, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """bfloat16 [R, H] back -> sums [T, H]; float32 [R, K] back -> [T, K], each slot from its expert's rank; collective."""

    def close(self) -> None:
        """Give the memory back."""


class ElasticChannel:
    """V2.

    Args:
        library: The package deep_ep.
        group: The ranks; their NCCL communicator is in use already.
        config: DeepEP's settings.
        tokens: Most tokens of a rank, the same on all: more are a failed assertion on every rank.
        hidden: H.
        top: K.
    """

    # Combine reads rows in 16-byte vectors, 32 lanes at a time (impls/combine.cuh).
    multiple = 256
    grows = True
    # WorkspaceLayout, common/layout.cuh.
    most_experts, most_local = 2048, 256

    def __init__(
        self, library: ModuleType, group: dist.ProcessGroup, config: DeepEPConfig, tokens: int, hidden: int, top: int
    ) -> None:
        # Gradients travel as bfloat16 whatever dispatch does, so the buffer is made for that.
        size = library.ElasticBuffer.get_buffer_size_hint(
            group,
            tokens,
            hidden,
            num_topk=top,
            use_fp8_dispatch=False,
            allow_hybrid_mode=config.hybrid,
            allow_multiple_reduction=config.multiple_reduction,
        )
        check_memory(size)
        self.buffer = library.ElasticBuffer(
            group,
            num_bytes=size,
            num_max_tokens_per_rank=tokens,
            hidden=hidden,
            num_topk=top,
            deterministic=config.deterministic,
            allow_hybrid_mode=config.hybrid,
            allow_multiple_reduction=config.multiple_reduction,
            num_allocated_qps=config.num_qps,
            num_cpu_timeout_secs=config.timeout_s,
            num_gpu_timeout_secs=config.timeout_s,
            explicitly_destroy=True,
        )
        self.num_sms = config.num_sms
        if not self.num_sms and not can_size_itself(library, self.buffer.num_rdma_ranks > 1):
            self.num_sms = MANY_SMS

    def dispatch(self, x: Rows, idx: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Arrived:
        """See `Channel`."""
        rows, local, arrived, handle, _ = self.buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=num_experts, num_sms=self.num_sms
        )
        return Arrived(rows, local, arrived, handle)

    def again(self, x: torch.Tensor, handle: Any) -> torch.Tensor:
        """See `Channel`."""
        # DeepEP would choose a number of multiprocessors before it looks at the handle, from an unknown number of experts;
        # the layout in the handle holds for the number it was made with.
        rows, _, _, _, _ = self.buffer.dispatch(x, handle=handle, num_sms=handle.num_sms)
        return rows

    def combine(
        self, x: torch.Tensor, handle: Any, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Channel`."""
        sums, table, _ = self.buffer.combine(x, handle, topk_weights=weights)
        return sums, table

    def close(self) -> None:
        """See `Channel`."""
        self.buffer.destroy()


class LegacyChannel:
    """V1, its high-throughput kernels. It needs no agreement on tokens: its buffers are queues.

    Args: as `ElasticChannel`; `tokens` and `top` make no difference.
    """

    # Of the scales of fp8; the kernels themselves would be content with 8.
    multiple = 128
    grows = False
    # NUM_MAX_LOCAL_EXPERTS is 1024 (kernels/legacy); of experts altogether there is no limit.
    most_experts, most_local = 2**31 - 1, 1024

    def __init__(
        self, library: ModuleType, group: dist.ProcessGroup, config: DeepEPConfig, tokens: int, hidden: int, top: int
    ) -> None:
        if config.num_sms:
            library.Buffer.set_num_sms(config.num_sms)
        ranks, row = group.size(), hidden * torch.bfloat16.itemsize
        settings = (library.Buffer.get_dispatch_config(ranks), library.Buffer.get_combine_config(ranks))
        nvlink = max(each.get_nvl_buffer_size_hint(row, ranks) for each in settings)
        rdma = max(each.get_rdma_buffer_size_hint(row, ranks) for each in settings)
        check_memory(nvlink + rdma)
        self.buffer = library.Buffer(group, num_nvl_bytes=nvlink, num_rdma_bytes=rdma, explicitly_destroy=True)

    def dispatch(self, x: Rows, idx: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Arrived:
        """See `Channel`."""
        by_rank, by_rdma_rank, by_expert, in_rank, _ = self.buffer.get_dispatch_layout(idx, num_experts)
        rows, local, arrived, _, handle, _ = self.buffer.dispatch(
            x,
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=by_expert,
            topk_idx=idx,
            topk_weights=weights,
        )
        return Arrived(rows, local, arrived, handle)

    def again(self, x: torch.Tensor, handle: Any) -> torch.Tensor:
        """See `Channel`."""
        rows, _, _, _, _, _ = self.buffer.dispatch(x, handle=handle)
        return rows

    def combine(
        self, x: torch.Tensor, handle: Any, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Channel`."""
        sums, table, _ = self.buffer.combine(x, handle, topk_weights=weights)
        return sums, table

    def close(self) -> None:
        """See `Channel`."""
        self.buffer.destroy()


def check_memory(size: int) -> None:
    """Refuse a buffer that the GPU has no room for.

    Raises:
        BadConfig: so it is.
    """
    if not torch.cuda.is_available():
        return
    free, _ = torch.cuda.mem_get_info()
    if size > free:
        raise BadConfig(
            f"DeepEP's buffer takes {size / 2**30:.1f} GiB, but the GPU has {free / 2**30:.1f} GiB free; send fewer tokens at"
            " once, or set kernels.dispatch to hierarchical"
        )
