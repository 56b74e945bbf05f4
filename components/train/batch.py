"""A training batch: scored groups as tensors, groups without a learning signal left out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from components.experience.group import Group
from components.weights.policy import PAD
from configs.train import TrainConfig


class Batch(NamedTuple):
    """N completions, right-padded to L tokens; per-token values are flat over the M completion tokens."""

    ids: torch.Tensor
    """int64 [N, L]: prompt and completion."""
    lengths: torch.Tensor
    """int64 [N]: tokens that are not padding."""
    row: torch.Tensor
    """int64 [M]: which completion a token belongs to."""
    column: torch.Tensor
    """int64 [M]: where in `ids` the token stands."""
    behaviour: torch.Tensor
    """float32 [M]: log-probability under the policy that sampled the token."""
    advantage: torch.Tensor
    """float32 [M]: the completion's advantage."""
    staleness: torch.Tensor
    """int64 [M]: versions between the sampling policy and the one being trained."""

    @property
    def rows(self) -> int:
        """Completions in the batch (N)."""
        return self.ids.shape[0]

    def select(self, rows: torch.Tensor, width: int = 0) -> Batch:
        """The completions `rows`, in that order; of none, a row of padding, which a model takes and which counts for
        nothing.

        Args:
            rows: int64, places in this batch.
            width: L of the result; 0 takes the longest completion's.
        """
        if not rows.numel():
            return self._none()
        place = torch.full((self.rows,), -1, device=self.ids.device)
        place[rows] = torch.arange(rows.numel(), device=self.ids.device)
        kept = place[self.row] >= 0
        width = width or int(self.lengths[rows].max())
        return Batch(
            self.ids[rows, :width], self.lengths[rows], place[self.row[kept]], self.column[kept],
            self.behaviour[kept], self.advantage[kept], self.staleness[kept],
        )  # fmt: skip

    def _none(self) -> Batch:
        no = slice(0, 0)
        padding = torch.full((1, 2), PAD, device=self.ids.device)
        return Batch(
            padding, self.lengths.new_zeros(1), self.row[no], self.column[no],
            self.behaviour[no], self.advantage[no], self.staleness[no],
        )  # fmt: skip

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(*(each.to(device) for each in self))


def advantages(rewards: np.ndarray, kind: str) -> np.ndarray:
    """Group-relative advantages [groups, G] of rewards [groups, G].

    Args:
        kind: `group_mean` subtracts the group's mean (Dr. GRPO, arXiv 2503.20783); `group_mean_std` also divides by its
            standard deviation (GRPO, arXiv 2402.03300).
    """
    # Rounding must not make a signal of a group whose rewards are all the same.
    differing = rewards.max(1, keepdims=True) > rewards.min(1, keepdims=True)
    centred = np.where(differing, rewards - rewards.mean(1, keepdims=True), 0.0)
    if kind == "group_mean_std":
        centred = centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    return centred


def collate(groups: list[Group], config: TrainConfig, version: int) -> Batch | None:
    """Tensors of the groups whose completions differ in reward; None if none do.

    Args:
        groups: Scored groups of equal size.
        version: The version being trained, from which staleness counts.
    """
    values = advantages(np.array([group.rewards for group in groups]), config.advantage)
    useful = [
        (group.prompt_ids, sample, advantage)
        for group, row in zip(groups, values, strict=True)
        if np.any(row != 0)
        for sample, advantage in zip(group.samples, row, strict=True)
    ]
    if not useful:
        return None
    prompts = np.array([len(prompt) for prompt, _, _ in useful])
    tokens = [sample.token_ids for _, sample, _ in useful]
    lengths = prompts + np.array([len(part) for part in tokens])
    ids = np.full((len(useful), lengths.max()), PAD, np.int64)
    for row, (prompt, _, _) in enumerate(useful):
        ids[row, : lengths[row]] = np.concatenate([prompt, tokens[row]])
    sizes = lengths - prompts
    return Batch(
        ids=torch.from_numpy(ids),
        lengths=torch.from_numpy(lengths),
        row=torch.from_numpy(np.repeat(np.arange(len(useful)), sizes)),
        column=torch.from_numpy(np.concatenate([np.arange(a, b) for a, b in zip(prompts, lengths, strict=True)])),
        behaviour=torch.from_numpy(np.concatenate([sample.behaviour_logprobs for _, sample, _ in useful])),
        advantage=torch.from_numpy(np.repeat(np.array([a for _, _, a in useful], np.float32), sizes)),
        staleness=torch.from_numpy(
            version - np.concatenate([sample.versions for _, sample, _ in useful]).astype(np.int64)
        ),
    )
