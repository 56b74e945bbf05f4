"""Grouped experts compute what transformers' do; routers are masked, counted and replayed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from components.weights.policy import new_policy
from configs.run import ModelConfig
from kernels.dispatch.all_to_all import AllToAll
from kernels.dispatch.topology import Topology
from kernels.experts import experts_of, use_grouped_experts
from kernels.routing import Routing, load_statistics, loads

GEOMETRY = ModelConfig(hidden_size=32, num_hidden_layers=2, moe_intermediate_size=16, num_experts=8)


def model() -> Any:
    return new_policy(GEOMETRY, 15, 0)


def dense(experts: Any, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Slot by slot."""
    rows = []
    for token in range(x.shape[0]):
        row = x[token] * 0
        for slot, expert in enumerate(indices[token].tolist()):
            if expert >= 0:
                gate, up = (experts.gate_up_proj[expert] @ x[token]).chunk(2)
                row = row + weights[token, slot] * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else x


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A process group of this process only: the dispatcher's whole way, without company."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "meet"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield AllToAll(Topology(dist.group.WORLD, 0, ((0,),)), GEOMETRY.num_experts)
    dist.destroy_process_group()


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize(
    ("tokens", "kind"), [(9, "mixed"), (9, "one expert"), (9, "some dropped"), (9, "all dropped"), (0, "mixed")]
)
def test_output_and_gradients_are_those_of_each_expert_by_itself(
    alone: AllToAll, dispatched: bool, tokens: int, kind: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    own, other = model(), model()
    use_grouped_experts(own, alone if dispatched else None)
    x = torch.randn(tokens, 32, generator=generator)
    weights, indices = torch.rand(tokens, 8, generator=generator).topk(2)
    if kind == "one expert":
        indices = torch.full_like(indices, 3)
    if "dropped" in kind:
        indices[1 :: 2 if kind == "some dropped" else 1] = -1
        indices[:1] = -1
    inputs = [[each.clone().requires_grad_() for each in (x, weights)] for _ in range(2)]
    mine, theirs = experts_of(own)[0], experts_of(other)[0]
    got = mine(inputs[0][0], indices, inputs[0][1])
    expected = dense(theirs, inputs[1][0], indices, inputs[1][1])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    # A sum's gradient has strides of 0, which grouped_mm refuses.
    got.sum().backward()
    (expected.sum() + sum(p.sum() * 0 for p in theirs.parameters())).backward()
    for a, b in zip([*inputs[0], *mine.parameters()], [*inputs[1], *theirs.parameters()], strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, torch.zeros_like(a) if b.grad is None else b.grad, atol=1e-5, rtol=1e-5)


def test_a_model_computes_the_same_with_them() -> None:
    ids = torch.randint(3, 15, (4, 7), generator=torch.Generator().manual_seed(0))
    own, other = model(), model()
    use_grouped_experts(own)
    assert own.config._experts_implementation != other.config._experts_implementation
    torch.testing.assert_close(own(input_ids=ids).logits, other(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


def watched(policy: Any, ids: torch.Tensor, valid: torch.Tensor, replay: Any = None, masked: bool = True) -> Any:
    with Routing(policy, masked).forward(valid, replay) as routed:
        output = policy.model(input_ids=ids).last_hidden_state
    return output, routed


def test_padding_is_neither_sent_to_experts_nor_counted() -> None:
    ids = torch.randint(3, 15, (2, 6), generator=torch.Generator().manual_seed(0))
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2]).reshape(-1)
    policy = model()
    use_grouped_experts(policy)
    plain, _ = watched(copy.deepcopy(policy), ids, torch.ones(12, dtype=torch.bool))
    masked, routed = watched(policy, ids, valid)
    torch.testing.assert_close(masked.reshape(12, -1)[valid], plain.reshape(12, -1)[valid])
    for layer in routed.choices:
        assert (layer[~valid] == -1).all() and (layer[valid] >= 0).all()
    counts = loads(routed.choices, 8)
    assert counts.shape == (2, 8) and (counts.sum(1) == 10 * 2).all()


def test_a_replayed_forward_uses_the_recorded_experts_with_weights_of_the_present_router() -> None:
    ids = torch.randint(3, 15, (2, 6), generator=torch.Generator().manual_seed(0))
    valid = torch.ones(12, dtype=torch.bool)
    policy = model()
    before, recorded = watched(policy, ids, valid, masked=False)
    again, routed = watched(policy, ids, valid, recorded.choices, masked=False)
    torch.testing.assert_close(again, before)
    # Routers that now choose otherwise.
    for router in (module.gate for name, module in policy.named_modules() if name.endswith("mlp")):
        router.weight.data = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(5))
    _, other = watched(policy, ids, valid, masked=False)
    assert not torch.equal(other.choices[0], recorded.choices[0])
    output, replayed = watched(policy, ids, valid, recorded.choices, masked=False)
    assert all(torch.equal(a, b) for a, b in zip(replayed.choices, recorded.choices, strict=True))
    output.square().sum().backward()
    gradient = policy.model.layers[0].mlp.gate.weight.grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_replayed_weights_are_the_routers_probabilities_made_to_sum_to_one() -> None:
    generator = torch.Generator().manual_seed(0)
    policy = model()
    x = torch.randn(5, 32, generator=generator)
    given = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(5)])
    router = policy.model.layers[0].mlp.gate
    with Routing(policy, False).forward(torch.ones(5, dtype=torch.bool), [given, given]):
        logits, weights, indices = router(x)
    assert torch.equal(indices, given)
    chosen = logits.softmax(-1).gather(1, given)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True))


def test_tokens_without_a_record_keep_their_routers_choice() -> None:
    ids = torch.randint(3, 15, (1, 6), generator=torch.Generator().manual_seed(0))
    valid = torch.ones(6, dtype=torch.bool)
    policy = model()
    _, own = watched(policy, ids, valid)
    given = [torch.where(torch.arange(6)[:, None] < 3, -1, (layer + 1) % 8) for layer in own.choices]
    _, replayed = watched(policy, ids, valid, given)
    assert torch.equal(replayed.choices[0][:3], own.choices[0][:3])
    assert torch.equal(replayed.choices[0][3:], given[0][3:])


def test_load_statistics_by_hand() -> None:
    even, skewed = [5.0, 5.0, 5.0, 5.0], [20.0, 0.0, 0.0, 0.0]
    assert load_statistics(torch.tensor([even])) == pytest.approx(
        {"max_load": 1, "min_load": 1, "max_violation": 0, "load_entropy": 1, "unused_experts": 0}
    )
    assert load_statistics(torch.tensor([even, skewed])) == pytest.approx(
        {"max_load": 2.5, "min_load": 0.5, "max_violation": 1.5, "load_entropy": 0.5, "unused_experts": 0.375}
    )
