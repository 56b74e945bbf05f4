"""The figures of one policy update, summed over minibatches and ranks."""

from __future__ import annotations

import torch

from components.train.ranks import Ranks
from kernels.routing import load_statistics


class Sums:
    """Adds up what each minibatch gives, and sums it over the ranks once, at the end.

    Args:
        ranks: Those that share the minibatches.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._sums: dict[str, torch.Tensor] = {}
        self._loads: torch.Tensor | None = None
        self._gap = torch.zeros(2, dtype=torch.float64)

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add this rank's share of `train/<name>`."""
        value = value.detach().double().cpu()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def count_loads(self, counts: torch.Tensor) -> None:
        """Add tokens by layer and expert [layers, E]."""
        self._loads = counts if self._loads is None else self._loads + counts

    def compare(self, gaps: torch.Tensor) -> None:
        """Add differences between the trainer's and the sampler's log-probabilities."""
        self._gap += torch.stack([gaps.double().sum().cpu(), torch.tensor(float(gaps.numel()), dtype=torch.float64)])

    def metrics(self) -> dict[str, float]:
        """The step's metrics; collective."""
        assert self._loads is not None
        values = torch.stack([*self._sums.values(), *self._gap])
        counted = torch.cat([values, self._loads.reshape(-1).double().cpu()])
        summed = self.ranks.total(counted)
        *sums, gap, compared = summed[: len(values)].tolist()
        metrics = {f"train/{name}": value for name, value in zip(self._sums, sums, strict=True)}
        if compared:
            metrics["train/train_rollout_logprob_abs_diff"] = gap / compared
        spread = load_statistics(summed[len(values) :].reshape(self._loads.shape))
        return metrics | {f"train/moe/{name}": value for name, value in spread.items()}
