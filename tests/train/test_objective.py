"""The objective is what the papers say, worked out by hand or by brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from components.train.batch import advantages
from components.train.objective import load_balance, surrogate
from configs.train import TrainConfig

FRESH, STALE = torch.tensor([False]), torch.tensor([True])


def one(ratio: float, advantage: float, offset: float = 0.0, stale: bool = False, **settings: float) -> float:
    """Loss of one token; `offset` is proximal minus behaviour log-probability."""
    proximal = torch.tensor([-1.0])
    loss = surrogate(
        proximal + np.log(ratio), proximal, proximal - offset, torch.tensor([advantage]),
        STALE if stale else FRESH, TrainConfig.model_validate(settings),
    ).loss  # fmt: skip
    return float(loss)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 1.0, -1.1),
        (1.5, 1.0, -1.28),  # clipped at 1 + clip_high
        (0.5, 1.0, -0.5),  # a good token may become likelier again
        (0.5, -1.0, 0.8),  # clipped at 1 - clip_low
        (1.5, -1.0, 1.5),  # a bad token may become less likely again
        (5.0, -1.0, 2.0),  # truncated at the cap
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float) -> None:
    assert one(ratio, advantage) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(("offset", "weight"), [(0.0, 1.0), (np.log(1.5), 1.5), (np.log(5.0), 2.0), (np.log(0.2), 0.2)])
def test_stale_tokens_are_weighted_up_to_the_cap(offset: float, weight: float) -> None:
    assert one(1.0, 1.0, offset, stale=True) == pytest.approx(-weight, rel=1e-5)
    assert one(1.0, 1.0, offset, stale=False) == pytest.approx(-1.0, rel=1e-5)


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    proximal = torch.tensor([-1.0 - np.log(1.5), -1.0 - np.log(1.1)]).float()
    parts = surrogate(logprobs, proximal, proximal, torch.ones(2), torch.tensor([False, False]), TrainConfig())
    parts.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0] == 0
    assert logprobs.grad[1] == pytest.approx(-1.1, rel=1e-5)
    assert parts.clipped == 1


@given(arrays.arrays(np.float32, (5, 4), elements=st.sampled_from([0.0, 0.5, 1.0])))
@settings(deadline=None)
def test_advantages_are_relative_to_the_group(rewards: np.ndarray) -> None:
    plain = advantages(rewards, "group_mean")
    np.testing.assert_allclose(plain.sum(1), 0, atol=1e-5)
    np.testing.assert_allclose(plain - plain[:, :1], rewards - rewards[:, :1], atol=1e-6)
    scaled = advantages(rewards, "group_mean_std")
    assert ((scaled == 0) == (plain == 0)).all()
    mixed = rewards.std(1) > 0
    np.testing.assert_allclose(scaled[mixed].std(1, ddof=1), 1, atol=1e-3)


@pytest.mark.parametrize("kind", ["group_mean", "group_mean_std"])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, 0.7])
def test_equal_rewards_are_no_signal_whatever_their_rounding(kind: str, reward: float) -> None:
    for size in range(2, 17):
        assert not advantages(np.full((1, size), reward), kind).any()


def test_load_balance_is_one_when_even_and_the_expert_count_over_k_when_all_go_to_one() -> None:
    even = torch.eye(4).repeat(8, 1) * 1e-3
    assert float(load_balance((even,), torch.ones(32, dtype=torch.bool), 1)) == pytest.approx(1, abs=1e-3)
    collapsed = torch.zeros(32, 4)
    collapsed[:, 2] = 50.0
    assert float(load_balance((collapsed, even), torch.ones(32, dtype=torch.bool), 1)) == pytest.approx(
        (4 + 1) / 2, abs=1e-3
    )


def test_padding_does_not_count_for_load_balance() -> None:
    random = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([random, torch.full((6, 4), 9.0)])
    valid = torch.arange(16) < 10
    assert torch.equal(load_balance((padded,), valid, 2), load_balance((random,), torch.ones(10, dtype=torch.bool), 2))
