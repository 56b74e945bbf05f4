"""A policy update moves the policy the right way, and the same way every time."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch

from components.experience.group import Group, Sample, Span
from components.rollout.torch_engine import TorchEngine
from components.rollout.torch_policy import TorchPolicy
from components.train.batch import collate
from components.train.ranks import Ranks
from components.train.trainer import Trainer
from components.weights.policy import checkpoint_tensors, new_policy
from components.weights.store import digest_of, fingerprint
from configs.failure import BadConfig
from configs.run import ModelConfig, RunConfig
from configs.train import TrainConfig

Make = Callable[..., RunConfig]


def policy(seed: int = 0):
    return new_policy(ModelConfig(hidden_size=32, num_hidden_layers=2, context_length=32), 15, seed)


def digest(trainer: Trainer) -> str:
    return digest_of(fingerprint(checkpoint_tensors(trainer.model)))


def sampled(
    trainer: Trainer, groups: int, version: int = 0, seed: int = 0, lengths: tuple[int, ...] = (4, 6)
) -> list[Group]:
    """Groups the trainer's own policy sampled, rewarded for an even first token."""
    engine = TorchEngine(TorchPolicy.from_model(trainer.model))
    random = np.random.default_rng(seed)
    prompts = [[1, *random.integers(3, 15, lengths[n % len(lengths)]).tolist()] for n in range(groups)]
    made = engine.generate(prompts, group_size=4, max_new_tokens=5, seed=seed)
    result = []
    for number, prompt in enumerate(prompts):
        samples = []
        for row in range(4 * number, 4 * number + 4):
            end = int(made.lengths[row])
            sample = Sample.of(made.tokens[row, :end], made.logprobs[row, :end], version, "stop")
            sample.reward = float(made.tokens[row, 0] % 2 == 0)
            samples.append(sample)
        result.append(Group(number + 1, f"row-{number}", np.array(prompt, "<i4").tobytes(), "", samples))
    return result


def test_an_update_makes_rewarded_tokens_likelier(make_config: Make) -> None:
    trainer = Trainer(
        policy(), make_config(train={"batch_groups": 16, "learning_rate": 3e-3, "warmup_steps": 0, "steps": 40})
    )
    before = np.mean([group.rewards for group in sampled(trainer, 64, seed=99)])
    for step in range(12):
        trainer.update(sampled(trainer, 16, version=trainer.step, seed=step))
    after = np.mean([group.rewards for group in sampled(trainer, 64, seed=99)])
    assert after > before + 0.2


def test_trainer_and_sampler_agree_on_logprobs(make_config: Make) -> None:
    trainer = Trainer(policy(), make_config())
    metrics = trainer.update(sampled(trainer, 8))
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-6
    assert metrics["train/tis_clipfrac"] == 0
    assert metrics["async/staleness_max"] == 0


def test_a_repeated_step_comes_to_the_same_weights(make_config: Make) -> None:
    config = make_config()
    one, two = Trainer(policy(), config), Trainer(policy(), config)
    groups = [sampled(one, 8, seed=seed) for seed in range(3)]
    for batch in groups:
        one.update(copy.deepcopy(batch))
    torch.randn(5)  # the global random state must not matter
    for batch in groups:
        two.update(batch)
    assert digest(one) == digest(two)
    assert digest(one) != digest(Trainer(policy(), config))


def test_groups_without_signal_change_nothing_but_the_version(make_config: Make) -> None:
    trainer = Trainer(policy(), make_config())
    groups = sampled(trainer, 4)
    for group in groups:
        for sample in group.samples:
            sample.reward = 1.0
    before = digest(trainer)
    metrics = trainer.update(groups)
    assert digest(trainer) == before
    assert trainer.step == 1
    assert metrics["rollout/zero_std_fraction"] == 1
    assert "train/loss" not in metrics


def test_skipping_groups_without_signal_leaves_the_policy_gradient_as_it_is(make_config: Make) -> None:
    """Skipped rows weigh in the denominator, so the loss equals that over all rows."""
    config = make_config(train={"minibatches": 1, "load_balance": 0.0})
    trainer = Trainer(policy(), config)
    groups = sampled(trainer, 8)
    for sample in groups[0].samples:
        sample.reward = 0.0
    batch = collate(groups, config.train, 0)
    assert batch is not None and batch.rows < 32
    tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    expected = -float(batch.advantage.sum()) / tokens  # every ratio is 1 in the first update
    assert trainer.update(groups)["train/loss"] == pytest.approx(expected, abs=1e-6)


def test_staleness_is_counted_token_by_token() -> None:
    tokens = np.arange(3, 8)
    sample = Sample.of(tokens, np.zeros(5), 0, "stop")
    sample.spans = [Span(3, 0, 2), Span(5, 2, 5)]
    other = Sample.of(tokens, np.zeros(5), 4, "stop")
    sample.reward, other.reward = 1.0, 0.0
    batch = collate(
        [Group(1, "r", np.arange(3, 5, dtype="<i4").tobytes(), "", [sample, other])], TrainConfig(), version=5
    )
    assert batch is not None
    assert batch.staleness.tolist() == [2, 2, 0, 0, 0, 1, 1, 1, 1, 1]
    assert batch.column.tolist() == [2, 3, 4, 5, 6] * 2


@pytest.mark.parametrize("rows", [[5, 0], [2], []])
def test_a_part_of_a_batch_is_where_the_batch_is(rows: list[int]) -> None:
    """Whatever device new tensors are made on by default, as it is the CPU's where the batch is on a GPU."""
    groups = sampled(Trainer(policy(), RunConfig()), 4)
    groups[0].samples[0].reward = 2.0
    batch = collate(groups, TrainConfig(), 0)
    assert batch is not None
    chosen = torch.tensor(rows, dtype=torch.int64)
    with torch.device("meta"):
        part = batch.select(chosen)
    assert {each.device.type for each in part} == {"cpu"}
    for expected, row in enumerate(rows):
        of_row = part.row == expected
        assert (
            part.ids[expected][part.column[of_row]].tolist() == batch.ids[row][batch.column[batch.row == row]].tolist()
        )


def test_several_ranks_refuse_tied_embeddings() -> None:
    tied = policy()
    tied.config.tie_word_embeddings = True
    config = RunConfig.model_validate({"train": {"ranks": 2}})
    with pytest.raises(BadConfig, match="tie_word_embeddings"):
        Trainer(tied, config, Ranks(0, 2))


@pytest.mark.parametrize(("off_policy", "on_policy_at_first"), [("decoupled", True), ("behaviour", False)])
def test_what_the_ratio_of_stale_tokens_is_taken_to(
    make_config: Make, off_policy: str, on_policy_at_first: bool
) -> None:
    """Before the first optimizer step, ratios to the step's own policy are 1, those to the sampler's are not."""
    config = make_config(train={"minibatches": 1, "off_policy": off_policy})
    stale = sampled(Trainer(policy(seed=1), config), 8)
    trainer = Trainer(policy(seed=2), config)
    trainer.step = 3
    metrics = trainer.update(stale)
    assert (metrics["train/ppo_kl"] < 1e-6) == on_policy_at_first
    assert metrics["train/tis"] != pytest.approx(1, abs=1e-3)
    assert metrics["async/staleness_mean"] == 3


def test_decoupled_minibatches_share_the_policy_the_step_began_with(make_config: Make) -> None:
    """With a learning rate of nothing, every minibatch's ratios are 1, also the later ones'."""
    config = make_config(train={"minibatches": 4, "off_policy": "decoupled", "learning_rate": 1e-12})
    stale = sampled(Trainer(policy(seed=1), config), 8)
    trainer = Trainer(policy(seed=2), config)
    trainer.step = 1
    assert trainer.update(stale)["train/ppo_kl"] < 1e-6


def test_the_learning_rate_warms_up_and_decays(make_config: Make) -> None:
    trainer = Trainer(
        policy(), make_config(train={"steps": 20, "warmup_steps": 4, "learning_rate": 1.0, "final_learning_rate": 0.1})
    )
    rates = []
    for step in range(20):
        trainer.step = step
        rates.append(trainer._set_learning_rate())
    assert rates[:3] == pytest.approx([0.25, 0.5 * 0.95, 0.75 * 0.9])
    assert rates[10] == pytest.approx(0.5)
    assert rates[19] == pytest.approx(0.1)


def test_replayed_routing_keeps_later_minibatches_on_the_experts_the_step_began_with(make_config: Make) -> None:
    """It changes what they learn once the routers have moved, and nothing while they have not."""

    def trained(rate: float, replay: str) -> str:
        settings = {"minibatches": 4, "warmup_steps": 0, "learning_rate": rate, "router_replay": replay}
        trainer = Trainer(policy(), make_config(train=settings))
        trainer.update(sampled(trainer, 8))
        return digest(trainer)

    assert trained(1e-12, "step") == trained(1e-12, "none")
    assert trained(3e-2, "step") != trained(3e-2, "none")
