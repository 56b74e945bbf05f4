"""The DeepEP adapter on real GPUs of one node. It runs where there are two GPUs and a deep_ep that can be imported:

torchrun --nproc-per-node 2 -m pytest tests/kernels/dispatch/test_deep_ep_gpu.py
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from configs.kernels import DeepEPConfig, KernelsConfig
from kernels.dispatch.contract import Dispatcher
from kernels.dispatch.deep_ep import DeepEP
from kernels.dispatch.deep_ep_environment import prepare
from kernels.dispatch.topology import Topology
from tests.kernels.dispatch.deep_ep_suite import carried, check_results
from tests.kernels.dispatch.suite import Case, Outcome, expert, tokens_of

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2
    or importlib.util.find_spec("deep_ep") is None
    or int(os.environ.get("WORLD_SIZE", "1")) < 2,
    reason="needs two GPUs, package deep_ep, and torchrun",
)


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    prepare(DeepEPConfig())
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group = dist.group.WORLD
    assert group is not None
    yield Topology(group, dist.get_rank(), (tuple(range(dist.get_world_size())),))
    dist.destroy_process_group()


@pytest.mark.parametrize("api", ["elastic", "legacy"])
@pytest.mark.parametrize("wire", ["same", "fp8"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"routing": "one_expert", "top": 1},
        {"dropped": 0.5},
        {"routing": "none"},
        {"routing": "duplicates"},
        {"tokens": 0},
    ],
    ids=str,
)
def test_result_and_gradients_are_the_dense_ones(api: str, wire: str, changes: dict, topology: Topology) -> None:
    ranks = topology.size
    tokens = tuple(changes.get("tokens", 200 + 50 * rank) if rank else 128 for rank in range(ranks))
    case = Case(
        seed=3,
        tokens=tokens,
        experts=8 * ranks,
        top=changes.get("top", 4),
        hidden=1024,
        routing=changes.get("routing", "uniform"),
        dropped=changes.get("dropped", 0.0),
        dtype=torch.bfloat16,
    )
    kernels = KernelsConfig(dispatch="deep_ep", wire=wire, deep_ep=DeepEPConfig(api=api))  # type: ignore[arg-type]
    backend: Dispatcher = DeepEP(topology, case.experts, kernels)
    own = tokens_of(case, topology.rank, ranks)
    x, weights = own.x.cuda().requires_grad_(), own.weights.cuda().requires_grad_()
    got = backend.dispatch(x, own.idx.cuda(), weights)
    first = backend.local_experts.start
    numbers = torch.arange(first, first + backend.num_local_experts).repeat_interleave(got.counts).cuda()
    result = backend.combine((expert(got.x.float(), numbers) * got.weights[:, None]).bfloat16(), got.route)
    result.backward(own.gradient.cuda())
    assert x.grad is not None and weights.grad is not None
    outcome = Outcome(got.x, got.weights, got.counts, result, x.grad, weights.grad)
    outcome = Outcome(*(each.detach().cpu() for each in outcome))
    check_results(own, carried(own, case, wire), outcome, f"rank {topology.rank}")
    backend.close()
