"""Bootstrap intervals of a mean score: seeded, so that the same scores give the same interval."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_BLOCK = 256
"""Resamples drawn together, to bound memory at large numbers of rows."""


class Interval(NamedTuple):
    """A mean with the bounds of its percentile interval."""

    mean: float
    low: float
    high: float


def bootstrap_interval(scores: np.ndarray, samples: int, confidence: float, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean (Efron and Tibshirani 1993, chapter 13).

    For a paired comparison give the differences of the two scores, prompt by prompt.

    Args:
        scores: Float [N], one a prompt; N at least 1.
        samples: Resamples.
        confidence: Two-sided level (fraction).
        seed: Of the resampling.
    """
    values = np.asarray(scores, dtype=np.float64)
    random = np.random.default_rng(seed)
    means = np.empty(samples)
    for start in range(0, samples, _BLOCK):
        rows = min(_BLOCK, samples - start)
        means[start : start + rows] = values[random.integers(0, len(values), (rows, len(values)))].mean(1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(values.mean()), float(low), float(high))
