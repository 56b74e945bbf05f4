"""A double of package deep_ep: its signatures and what they mean, moved over gloo, with what its kernels refuse.

`test_deep_ep_wheel.py` holds the signatures against the real wheel's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kernels.dispatch.wire import Lane, Traffic

topk_idx_t = torch.int64
calls: list[str] = []
"""Names of the calls of this process, in order."""
made: list[dict[str, Any]] = []
"""Arguments of the buffers of this process."""


class Path(NamedTuple):
    """Where one dispatch's rows went."""

    source: torch.Tensor
    """int64 [S]: the token each sent row is a copy of."""
    sent: list[int]
    received: list[int]
    topk_idx: torch.Tensor
    tokens: int
    per_rank: int


def _lane(group: dist.ProcessGroup) -> Lane:
    return Lane(group, group.rank(), [0] * group.size(), Traffic())


def _send(group: dist.ProcessGroup, path: Path, rows: torch.Tensor) -> torch.Tensor:
    return _lane(group).exchange(rows[path.source], path.sent, path.received).wait()


def _give_back(group: dist.ProcessGroup, path: Path, rows: torch.Tensor) -> torch.Tensor:
    return _lane(group).exchange(rows.contiguous(), path.received, path.sent).wait()


def _plan(group: dist.ProcessGroup, topk_idx: torch.Tensor, num_experts: int) -> Path:
    assert num_experts % group.size() == 0 and topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous()
    assert len(topk_idx) > 0, "a rank without tokens"
    per_rank = num_experts // group.size()
    to_rank = [
        ((topk_idx // per_rank == rank) & (topk_idx >= 0)).any(1).nonzero()[:, 0] for rank in range(group.size())
    ]
    sent = [len(tokens) for tokens in to_rank]
    received = _lane(group).trade(torch.tensor(sent)).tolist()
    return Path(torch.cat(to_rank), sent, received, topk_idx.clone(), len(topk_idx), per_rank)


def _arrive(group: dist.ProcessGroup, path: Path, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first = group.rank() * path.per_rank
    idx = _send(group, path, path.topk_idx)
    mine = (idx >= first) & (idx < first + path.per_rank)
    # Weights of slots that are other ranks' arrive as well; nobody may rely on them.
    return torch.where(mine, idx - first, -1), torch.where(mine, _send(group, path, weights), torch.nan)


def _rows(x: Any, send: Any) -> Any:
    if not isinstance(x, tuple):
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        return send(x)
    values, scales = x
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert scales.shape == (len(values), values.shape[1] // 128) and values.shape[1] % 128 == 0
    return send(values.view(torch.uint8)).view(torch.float8_e4m3fn), send(scales)


def _combined(
    group: dist.ProcessGroup, path: Path, x: torch.Tensor, topk_weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x) == sum(path.received)
    total = torch.zeros((path.tokens, x.shape[1]))
    total.index_add_(0, path.source, _give_back(group, path, x).float())
    if topk_weights is None:
        return total.bfloat16(), None
    assert topk_weights.dtype == torch.float32 and topk_weights.shape == (len(x), path.topk_idx.shape[1])
    table = torch.zeros(path.topk_idx.shape)
    for token, rank, values in zip(
        path.source,
        torch.repeat_interleave(torch.tensor(path.sent)),
        _give_back(group, path, topk_weights),
        strict=True,
    ):
        idx = path.topk_idx[token]
        table[token] = torch.where((idx >= 0) & (idx // path.per_rank == rank), values, table[token])
    return total.bfloat16(), table


class EPHandle:
    """V2's handle, as much of it as its user may read."""

    def __init__(self, path: Path, num_experts: int, num_sms: int) -> None:
        self.path, self.num_experts, self.num_sms = path, num_experts, num_sms


class ElasticBuffer:
    """V2."""

    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
        use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
        prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100, explicitly_destroy=False,
    ):  # fmt: skip
        calls.append("elastic")
        made.append(dict(locals()))
        assert num_bytes == self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk)
        assert num_gpu_timeout_secs >= 600 and explicitly_destroy
        self.group, self.hidden, self.most = group, hidden, num_max_tokens_per_rank
        self.num_rdma_ranks = 1
        self.destroyed = False

    @staticmethod
    def get_buffer_size_hint(
        group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, allow_hybrid_mode=True,
        allow_multiple_reduction=True,
    ):  # fmt: skip
        return group.size() * num_max_tokens_per_rank * hidden * (1 if use_fp8_dispatch else 2)

    def destroy(self):
        calls.append("destroy")
        assert not self.destroyed
        self.destroyed = True

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
        num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False, handle=None,
        do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False,
    ):  # fmt: skip
        calls.append("dispatch" if handle is None else "dispatch again")
        assert not self.destroyed
        values = x[0] if isinstance(x, tuple) else x
        assert values.shape[1] == self.hidden and self.hidden % 256 == 0 and len(values) <= self.most
        if handle is not None:
            # The real one would compute a number of multiprocessors from num_experts, which is None.
            assert topk_idx is None and num_sms > 0
            return _rows(x, lambda rows: _send(self.group, handle.path, rows)), None, None, handle, None
        assert num_experts <= 2048 and num_experts // self.group.size() <= 256
        used = topk_idx[topk_idx >= 0]
        assert len(topk_idx) == len(values) and (not len(used) or used.max() < num_experts)
        for row in topk_idx:
            named = row[row >= 0]
            assert len(named.unique()) == len(named), "an expert twice"
        path = _plan(self.group, topk_idx, num_experts)
        handle = EPHandle(path, num_experts, num_sms or 24)
        rows = _rows(x, lambda rows: _send(self.group, path, rows))
        return rows, *_arrive(self.group, path, topk_weights), handle, None

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        calls.append("combine")
        assert not self.destroyed and x.shape[1] == self.hidden
        return *_combined(self.group, handle.path, x, topk_weights), None


class Config:
    """V1's settings."""

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks * 10

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer:
    """V1, its high-throughput part."""

    num_sms = 20

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, use_fabric=None, explicitly_destroy=False,
        enable_shrink=False, comm=None,
    ):  # fmt: skip
        calls.append("legacy")
        assert num_nvl_bytes > 0 and explicitly_destroy
        self.group = group

    @staticmethod
    def set_num_sms(new_num_sms):
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config()

    @staticmethod
    def get_combine_config(num_ranks):
        return Config()

    def destroy(self):
        calls.append("destroy")

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        calls.append("layout")
        path = _plan(self.group, topk_idx, num_experts)
        in_rank = torch.zeros((len(topk_idx), self.group.size()), dtype=torch.bool)
        in_rank[path.source, torch.repeat_interleave(torch.tensor(path.sent))] = True
        by_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return torch.tensor(path.sent, dtype=torch.int32), None, by_expert, in_rank, None

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0, config=None,
        previous_event=None, async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        if handle is not None:
            calls.append("dispatch again")
            assert topk_idx is None and topk_weights is None
            return _rows(x, lambda rows: _send(self.group, handle[0], rows)), None, None, None, None, None
        calls.append("dispatch")
        path = _plan(self.group, topk_idx, len(num_tokens_per_expert))
        assert num_tokens_per_rank.tolist() == path.sent and int(is_token_in_rank.sum()) == len(path.source)
        idx, weights = _arrive(self.group, path, topk_weights)
        counts = torch.bincount(idx[idx >= 0], minlength=path.per_rank).tolist()
        return _rows(x, lambda rows: _send(self.group, path, rows)), idx, weights, counts, (path,), None

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        calls.append("combine")
        return *_combined(self.group, handle[0], x, topk_weights), None
