"""Tiny policies for the engine contract, and what each of them thinks of a completion."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from components.experience.deliveries import Target
from components.rollout.torch_policy import TorchPolicy
from components.warm_start.tokenizer import character_tokenizer
from components.weights.policy import EOS, new_policy, save_policy
from configs.run import ModelConfig

GEOMETRY = ModelConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32, context_length=512,
)  # fmt: skip
TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz")
VOCAB = TOKENIZER.get_vocab_size()
LAST = VOCAB - 1
"""A token that is never sampled and that the end of the sequence always follows."""


class Version(NamedTuple):
    """A version of the policy."""

    target: Target
    folder: Path
    policy: TorchPolicy

    def logprobs(self, prompt: list[int], tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log-probability of each token of a completion, float32 [T]."""
        ids = [*prompt, *tokens.tolist()]
        cache = self.policy.new_cache(1, len(ids))
        logits = [self.policy.forward(torch.tensor([prompt]), cache, 0)]
        logits += [
            self.policy.forward(torch.tensor([[token]]), cache, column)
            for column, token in enumerate(ids[len(prompt) : -1], len(prompt))
        ]
        scores = torch.log_softmax(torch.cat(logits[: len(tokens)]) / temperature, -1)
        return scores[range(len(tokens)), tokens.tolist()].numpy()


def make_version(folder: Path, number: int, geometry: ModelConfig = GEOMETRY) -> Version:
    """A random policy whose completions end after `LAST` and nowhere else."""
    model = new_policy(geometry, VOCAB, number).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)  # sharp enough that versions differ clearly
            if name.endswith("o_proj.weight"):
                parameter[0] = 0
            if name.endswith("down_proj"):
                parameter[:, 0] = 0
        # Nothing but the embedding writes the first place of the hidden state, and the head turns on it.
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.model.embed_tokens.weight[LAST, 0] = -4.0
        model.lm_head.weight[:, 0] = 0.0
        for token, pull in ((EOS, -40.0), (LAST, -30.0)):
            model.lm_head.weight[token] = 0.0
            model.lm_head.weight[token, 0] = pull
    save_policy(model, TOKENIZER, folder)
    return Version(Target(number, f"digest-{number}"), folder, TorchPolicy.from_folder(folder))
