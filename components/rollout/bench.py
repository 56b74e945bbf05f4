"""`tandem bench rollout`: the torch engine beside transformers' generate, on the same weights and prompts."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from components.rollout.torch_engine import TorchEngine
from components.rollout.torch_policy import TorchPolicy
from components.weights.policy import EOS, PAD, new_policy
from configs.run import ModelConfig

VOCABULARY = 15
PROMPT_TOKENS = 7


def measure(prompts: int, group_size: int, max_new_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a CPU-second of both, measured in turn in this process, which has one thread.

    The model is untrained, so completions end at random; each side is counted by the tokens it really made. The
    log-probabilities the engine records are compared with transformers' forward pass over the same tokens.

    Args:
        prompts: Prompts in a batch.
        group_size: Completions a prompt.
        max_new_tokens: Tokens of a completion, at most.
        rounds: Times each is measured; the median counts.
    """
    torch.set_num_threads(1)
    model = new_policy(ModelConfig(), VOCABULARY, seed=0).eval()
    engine = TorchEngine(TorchPolicy.from_model(model))
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (prompts, PROMPT_TOKENS)).tolist()
    repeated = torch.tensor(ids).repeat_interleave(group_size, 0)

    def ours() -> int:
        made = engine.generate(ids, group_size=group_size, max_new_tokens=max_new_tokens, seed=1)
        return int(made.lengths.sum())

    @torch.inference_mode()
    def theirs() -> int:
        out = model.generate(
            repeated, attention_mask=torch.ones_like(repeated), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=max_new_tokens, pad_token_id=PAD, eos_token_id=EOS,
        )  # fmt: skip
        made = out[:, PROMPT_TOKENS:]
        ended = (made == EOS).int().cumsum(1) - (made == EOS).int()
        return int((ended == 0).sum())

    speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for call in (ours, theirs):
        call()
    for _ in range(rounds):
        for name, call in (("ours", ours), ("theirs", theirs)):
            start = time.process_time()
            speeds[name].append(call() / (time.process_time() - start))
    tokens_per_s, reference = (statistics.median(speeds[name]) for name in ("ours", "theirs"))
    return {
        "engine": "torch",
        "reference": f"transformers generate, {model.config._experts_implementation} experts",
        "prompts": prompts,
        "group_size": group_size,
        "prompt_tokens": PROMPT_TOKENS,
        "max_new_tokens": max_new_tokens,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_s": tokens_per_s,
        "reference_tokens_per_s": reference,
        "ratio": tokens_per_s / reference,
        "max_logprob_gap": _gap(engine, model, ids, group_size, max_new_tokens),
    }


@torch.inference_mode()
def _gap(engine: TorchEngine, model: Any, ids: list[list[int]], group_size: int, max_new_tokens: int) -> float:
    """Largest difference between recorded log-probabilities and transformers' own."""
    made = engine.generate(ids, group_size=group_size, max_new_tokens=max_new_tokens, seed=2)
    tokens = torch.from_numpy(made.tokens).long()
    full = torch.cat([torch.tensor(ids).repeat_interleave(group_size, 0), tokens], 1)
    logprobs = model(full).logits[:, PROMPT_TOKENS - 1 : -1].log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    kept = torch.arange(tokens.shape[1]) < torch.from_numpy(made.lengths)[:, None]
    return float((logprobs - torch.from_numpy(made.logprobs))[kept].abs().max())
