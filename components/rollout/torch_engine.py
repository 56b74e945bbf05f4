"""The `torch` engine: samples groups in process, one prefill a prompt, log-probabilities recorded as they are drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from components.rollout.torch_policy import Cache, TorchPolicy
from components.weights.geometry import Geometry
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


class Sampling(NamedTuple):
    """How tokens are chosen."""

    temperature: float = 1.0
    """Divides the logits; ignored when greedy."""
    greedy: bool = False
    seed: int = 0


class TorchEngine:
    """Generates completions with a `TorchPolicy`."""

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = policy

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
        check_prompts(self.policy.geometry, prompts, max_new_tokens)
        limits = [max_new_tokens] * (len(prompts) * group_size)
        batch = Batch(self.policy, prompts, group_size, limits, Sampling(temperature, greedy, seed))
        while batch.running:
            batch.step()
        return batch.result()


def check_prompts(geometry: Geometry, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Refuse prompts that the policy cannot complete.

    Raises:
        BadData: a prompt is empty, holds a token outside the vocabulary, or leaves no room for the completion.
    """
    for number, prompt in enumerate(prompts):
        if not prompt or min(prompt) < 0 or max(prompt) >= geometry.vocab_size:
            raise BadData(f"prompt {number}: is empty or holds a token outside 0…{geometry.vocab_size - 1}")
        if len(prompt) + max_new_tokens > geometry.max_position_embeddings:
            raise BadData(
                f"prompt {number}: {len(prompt)} tokens and {max_new_tokens} new ones exceed the context of"
                f" {geometry.max_position_embeddings}; shorten the prompt or lower rollout.max_new_tokens"
            )


class Batch:
    """Completions that are generated together, one token a step.

    Args:
        policy: Generates them.
        prompts: Token ids, of any lengths.
        group_size: Completions a prompt.
        limits: Tokens that each completion may have [N].
        sampling: How tokens are chosen.

    Attributes:
        tokens: int64 [N, T], rows of one prompt together (N = prompts x group size).
        logprobs: float32 [N, T].
        columns: Tokens that every running row has by now.
        running: Whether a row still runs.
    """

    @torch.inference_mode()
    def __init__(
        self,
        policy: TorchPolicy,
        prompts: list[list[int]],
        group_size: int,
        limits: list[int],
        sampling: Sampling,
    ) -> None:
        self._policy = policy
        self._sampling = sampling
        self._limit = max(limits)
        self._limits = torch.tensor(limits)
        self._random = torch.Generator().manual_seed(sampling.seed)
        self.ends = torch.tensor(policy.geometry.eos_ids)
        self._prompts = [prompt for prompt in prompts for _ in range(group_size)]
        rows = len(self._prompts)
        self.tokens = torch.zeros(rows, self._limit, dtype=torch.long)
        self.logprobs = torch.zeros(rows, self._limit)
        self.columns = 0
        self.running = self._limit > 0
        self._live = torch.arange(rows)
        self._logits: torch.Tensor
        self._cache: Cache
        self._pads: torch.Tensor | None
        self._width: int
        self._fill(prompts, group_size)

    @torch.inference_mode()
    def step(self) -> None:
        """Sample the next token of every running row."""
        live, step = self._live, self.columns
        chosen, chosen_logprobs = _choose(self._logits, self._sampling, self._random)
        self.tokens[live, step], self.logprobs[live, step] = chosen, chosen_logprobs
        self.columns += 1
        # A row that finished but was not yet compacted away goes on; what it draws is cut off at the end.
        full = self._limits[live] <= self.columns
        running = ~(torch.isin(self.tokens[live, : step + 1], self.ends).any(1) | full)
        count = int(running.sum())
        if count == 0:
            self.running = False
            return
        # A full row must go: its next position may lie outside the context.
        if count < COMPACT_BELOW * live.numel() or bool(full.any()):
            self._live, chosen = live[running], chosen[running]
            self._cache = [(keys[running], values[running]) for keys, values in self._cache]
            self._pads = self._pads[running] if self._pads is not None else None
        self._logits = self._policy.forward(chosen[:, None], self._cache, self._width + step, self._pads)

    @torch.inference_mode()
    def refill(self) -> None:
        """Compute keys, values and the next token's logits anew, with the policy as it is now."""
        if self.running:
            so_far = [self._prompts[row] + self.tokens[row, : self.columns].tolist() for row in self._live.tolist()]
            self._fill(so_far, 1)

    def result(self) -> Generation:
        """What there is by now; a row that was cut has all its columns."""
        return _trimmed(
            self.tokens[:, : self.columns].numpy(), self.logprobs[:, : self.columns].numpy(),
            self.ends.numpy(), np.minimum(self._limits.numpy(), self.columns),
        )  # fmt: skip

    def _fill(self, prompts: list[list[int]], group_size: int) -> None:
        """Prefill every prompt once, for all rows that share it."""
        width = max(map(len, prompts))
        pad = torch.tensor([width - len(prompt) for prompt in prompts])
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        padded = bool(pad.any())
        prefill = self._policy.new_cache(len(prompts), width)
        logits = self._policy.forward(ids, prefill, 0, pad if padded else None)
        self._logits = logits.repeat_interleave(group_size, 0)
        self._cache = _widened(prefill, group_size, width + self._limit - self.columns)
        self._pads = pad.repeat_interleave(group_size) if padded else None
        self._width = width - self.columns


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


def _choose(logits: torch.Tensor, sampling: Sampling, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens [N] and their log-probabilities [N]; sampling by the Gumbel-max trick."""
    logprobs = F.log_softmax(logits if sampling.greedy else logits / sampling.temperature, -1)
    scores = (
        logprobs if sampling.greedy else logprobs - torch.empty_like(logprobs).exponential_(generator=random).log_()
    )
    chosen = scores.argmax(-1)
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


def _trimmed(tokens: np.ndarray, logprobs: np.ndarray, ends: np.ndarray, limits: np.ndarray) -> Generation:
    """Cut each row after its first end-of-sequence token, or at its limit."""
    ended = (tokens[..., None] == ends).any(-1)
    # A full row's further columns are zeros or draws that count for nothing.
    ended &= np.arange(tokens.shape[1]) < limits[:, None]
    finished = ended.any(axis=1)
    lengths = np.where(finished, ended.argmax(1) + 1, limits).astype(np.int32)
    keep = np.arange(tokens.shape[1]) < lengths[:, None]
    return Generation((tokens * keep).astype(np.int32), (logprobs * keep).astype(np.float32), lengths, finished)
