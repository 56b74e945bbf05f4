"""The `torch` engine: samples groups in process, one prefill a prompt, log-probabilities recorded as they are drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from components.rollout.torch_policy import Cache, TorchPolicy
from components.weights.policy import PAD
from configs.failure import BadData

COMPACT_BELOW = 0.75
"""Share of rows still running under which the cache is compacted: copying it costs about a quarter of a step."""


class Generation(NamedTuple):
    """Completions of a batch, rows of one prompt together (N = prompts x group size)."""

    tokens: np.ndarray
    """int32 [N, T]; 0 after a completion's end."""
    logprobs: np.ndarray
    """float32 [N, T]: log-probability of each token under the distribution it was sampled from; 0 after the end."""
    lengths: np.ndarray
    """int32 [N]: tokens of each completion, the end-of-sequence token included."""
    finished: np.ndarray
    """bool [N]: whether the end-of-sequence token was reached (otherwise the completion was cut)."""


class TorchEngine:
    """Generates completions with a `TorchPolicy`."""

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = policy
        self._ends = torch.tensor(policy.geometry.eos_ids)

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        *,
        group_size: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        greedy: bool = False,
        seed: int = 0,
    ) -> Generation:
        """Sample `group_size` completions a prompt.

        Args:
            prompts: Token ids, of any lengths.
            max_new_tokens: Tokens a completion may have.
            temperature: Divides the logits; ignored when greedy.
            seed: Seed of this call's sampling.

        Raises:
            BadData: a prompt is empty, holds a token outside the vocabulary, or leaves no room for the completion.
        """
        self._check(prompts, max_new_tokens)
        width = max(map(len, prompts))
        pad = torch.tensor([width - len(prompt) for prompt in prompts])
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        padded = bool(pad.any())
        prefill = self.policy.new_cache(len(prompts), width)
        logits = self.policy.forward(ids, prefill, 0, pad if padded else None).repeat_interleave(group_size, 0)
        cache = _widened(prefill, group_size, width + max_new_tokens)
        pads = pad.repeat_interleave(group_size) if padded else None
        rows = len(prompts) * group_size
        tokens = torch.zeros(rows, max_new_tokens, dtype=torch.long)
        logprobs = torch.zeros(rows, max_new_tokens)
        random = torch.Generator().manual_seed(seed)
        live = torch.arange(rows)
        for step in range(max_new_tokens):
            chosen, chosen_logprobs = _choose(logits, temperature, greedy, random)
            tokens[live, step], logprobs[live, step] = chosen, chosen_logprobs
            # A row that finished but was not yet compacted away goes on; what it draws is cut off below.
            running = ~torch.isin(tokens[live, : step + 1], self._ends).any(1)
            count = int(running.sum())
            if count == 0 or step == max_new_tokens - 1:
                break
            if count < COMPACT_BELOW * live.numel():
                live, chosen = live[running], chosen[running]
                cache = [(keys[running], values[running]) for keys, values in cache]
                pads = pads[running] if pads is not None else None
            logits = self.policy.forward(chosen[:, None], cache, width + step, pads)
        return _trimmed(tokens.numpy(), logprobs.numpy(), self._ends.numpy())

    def _check(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        geometry = self.policy.geometry
        for number, prompt in enumerate(prompts):
            if not prompt or min(prompt) < 0 or max(prompt) >= geometry.vocab_size:
                raise BadData(f"prompt {number}: is empty or holds a token outside 0…{geometry.vocab_size - 1}")
            if len(prompt) + max_new_tokens > geometry.max_position_embeddings:
                raise BadData(
                    f"prompt {number}: {len(prompt)} tokens and {max_new_tokens} new ones exceed the context of"
                    f" {geometry.max_position_embeddings}; shorten the prompt or lower rollout.max_new_tokens"
                )


def _widened(prefill: Cache, group_size: int, columns: int) -> Cache:
    """The prompts' cache, repeated for every member of a group and with room for the completion."""
    wide = []
    for pair in prefill:
        grown = []
        for part in pair:
            rows, heads, width, size = part.shape
            target = torch.empty(rows * group_size, heads, columns, size)
            target[:, :, :width] = part.repeat_interleave(group_size, 0)
            grown.append(target)
        wide.append((grown[0], grown[1]))
    return wide


def _choose(
    logits: torch.Tensor, temperature: float, greedy: bool, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens [N] and their log-probabilities [N]; sampling by the Gumbel-max trick."""
    logprobs = F.log_softmax(logits if greedy else logits / temperature, -1)
    scores = logprobs if greedy else logprobs - torch.empty_like(logprobs).exponential_(generator=random).log_()
    chosen = scores.argmax(-1)
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


def _trimmed(tokens: np.ndarray, logprobs: np.ndarray, ends: np.ndarray) -> Generation:
    """Cut each row after its first end-of-sequence token."""
    ended = (tokens[..., None] == ends).any(-1)
    finished = ended.any(axis=1)
    lengths = np.where(finished, ended.argmax(1) + 1, tokens.shape[1]).astype(np.int32)
    keep = np.arange(tokens.shape[1]) < lengths[:, None]
    return Generation((tokens * keep).astype(np.int32), (logprobs * keep).astype(np.float32), lengths, finished)
