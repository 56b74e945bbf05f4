"""Tiny policies with known answers, for tests that publish and evaluate."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from components.warm_start.tokenizer import character_tokenizer
from components.weights.policy import EOS, new_policy, save_policy
from configs.run import ModelConfig

LETTERS = "abcdefghijkl"
CHARACTERS = LETTERS + LETTERS.upper()
CHARACTERS_BY_TOKEN = sorted(CHARACTERS)
GEOMETRY = ModelConfig(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=16, context_length=32,
)  # fmt: skip


def upper_case_policy(known: str, seed: int = 0) -> PreTrainedModel:
    """A policy that answers a letter in `known` with its upper case, and any other with nothing.

    Embeddings are one-hot and attention and experts add nothing, so the head alone maps a token to the next one.
    """
    tokenizer = character_tokenizer(CHARACTERS)
    model = new_policy(GEOMETRY, tokenizer.get_vocab_size(), seed).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(tokenizer.get_vocab_size(), GEOMETRY.hidden_size))
        model.lm_head.weight.zero_()
        for token in range(EOS + 1, tokenizer.get_vocab_size()):
            letter = CHARACTERS_BY_TOKEN[token - EOS - 1]
            following = tokenizer.token_to_id(letter.upper()) if letter in known else EOS
            model.lm_head.weight[following, token] = 1.0
    return model


def save_upper_case(folder: Path, known: str) -> None:
    """Write such a policy as a Hugging Face folder."""
    save_policy(upper_case_policy(known), character_tokenizer(CHARACTERS), folder)
