"""The torch engine says the truth about what it samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from components.rollout.torch_engine import Generation, TorchEngine
from components.rollout.torch_policy import TorchPolicy
from components.weights.policy import EOS, new_policy
from configs.failure import BadData
from configs.run import ModelConfig

VOCABULARY = 15
MODEL = new_policy(ModelConfig(hidden_size=64, num_hidden_layers=2, context_length=64), VOCABULARY, seed=3).eval()
ENGINE = TorchEngine(TorchPolicy.from_model(MODEL))


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[1, *random.integers(3, VOCABULARY, length - 1).tolist()] for length in lengths]


@torch.inference_mode()
def transformers_logprobs(prompt: list[int], completion: list[int], temperature: float = 1.0) -> np.ndarray:
    logits = MODEL(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()


def completions(made: Generation) -> list[list[int]]:
    return [made.tokens[row, : made.lengths[row]].tolist() for row in range(len(made.lengths))]


@pytest.mark.parametrize("lengths", [[7] * 5, [2, 9, 1, 5, 9]], ids=["equal", "ragged"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_recorded_logprobs_are_those_of_transformers(lengths: list[int], temperature: float) -> None:
    asked = prompts(lengths)
    made = ENGINE.generate(asked, group_size=6, max_new_tokens=12, temperature=temperature, seed=1)
    for row, completion in enumerate(completions(made)):
        expected = transformers_logprobs(asked[row // 6], completion, temperature)
        np.testing.assert_allclose(made.logprobs[row, : len(completion)], expected, atol=2e-6)


@pytest.mark.parametrize("lengths", [[7] * 4, [2, 9, 1, 5]], ids=["equal", "ragged"])
def test_greedy_is_transformers_greedy(lengths: list[int]) -> None:
    asked = prompts(lengths)
    made = ENGINE.generate(asked, max_new_tokens=10, greedy=True)
    for prompt, completion in zip(asked, completions(made), strict=True):
        ids = torch.tensor([prompt])
        out = MODEL.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=10,
            pad_token_id=0,
            eos_token_id=EOS,
        )
        assert completion == out[0, len(prompt) :].tolist()


def test_completions_end_at_the_end_token_and_nowhere_else() -> None:
    made = ENGINE.generate(prompts([7] * 40), group_size=8, max_new_tokens=24, seed=5)
    assert made.finished.any() and not made.finished.all()
    for row, completion in enumerate(completions(made)):
        assert EOS not in completion[:-1]
        assert (completion[-1] == EOS) == made.finished[row]
        assert made.finished[row] or len(completion) == 24
        assert not made.tokens[row, len(completion) :].any() and not made.logprobs[row, len(completion) :].any()


def test_samples_follow_the_policy() -> None:
    (prompt,) = prompts([5])
    made = ENGINE.generate([prompt], group_size=20_000, max_new_tokens=1, seed=2)
    counts = np.bincount(made.tokens[:, 0], minlength=VOCABULARY)
    expected = np.exp([transformers_logprobs(prompt, [token])[0] for token in range(VOCABULARY)]) * 20_000
    assert ((counts - expected) ** 2 / expected).sum() < 40  # chi-square, 14 degrees of freedom: p < 0.0003


def test_a_seed_repeats_and_another_differs() -> None:
    one, same, other = (
        ENGINE.generate(prompts([7] * 4), group_size=4, max_new_tokens=8, seed=seed).tokens for seed in (1, 1, 2)
    )
    assert (one == same).all()
    assert (one != other).any()


def test_the_members_of_a_group_differ() -> None:
    made = ENGINE.generate(prompts([7]), group_size=16, max_new_tokens=8, seed=1)
    assert len({tuple(completion) for completion in completions(made)}) > 8


@pytest.mark.parametrize("prompt", [[], [1, VOCABULARY], [1, -1], [1] * 60])
def test_a_prompt_the_engine_cannot_serve_is_one_sentence(prompt: list[int]) -> None:
    with pytest.raises(BadData, match=r"^prompt 1: "):
        ENGINE.generate([[1, 5], prompt], max_new_tokens=8)


def test_tensors_that_do_not_fit_change_nothing() -> None:
    policy = TorchPolicy.empty(ENGINE.policy.geometry)
    stored = dict(ENGINE.policy.tensors)
    stored["lm_head.weight"] = torch.ones(3, 3)
    with pytest.raises(BadData, match=r"lm_head\.weight"):
        policy.load(stored, "test")
    stored.pop("lm_head.weight")
    with pytest.raises(BadData, match="do not match"):
        policy.load(stored, "test")
    assert not any(tensor.any() for tensor in policy.tensors.values())


def test_completions_end_at_the_tokens_the_model_names() -> None:
    model = new_policy(ModelConfig(hidden_size=64, num_hidden_layers=2, context_length=64), VOCABULARY, seed=3).eval()
    model.config.eos_token_id = [7, 9]
    made = TorchEngine(TorchPolicy.from_model(model)).generate(prompts([7] * 30), max_new_tokens=20, seed=5)
    assert made.finished.any()
    for row, completion in enumerate(completions(made)):
        assert (completion[-1] in (7, 9)) == made.finished[row]
        assert not {7, 9} & set(completion[:-1])
