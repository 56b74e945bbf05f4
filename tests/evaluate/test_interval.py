import numpy as np
import pytest

from components.evaluate.interval import bootstrap_interval
from components.evaluate.promotion import decide
from configs.run import EvaluateConfig


def test_the_interval_agrees_with_scipy_and_repeats() -> None:
    from scipy.stats import bootstrap

    scores = np.random.default_rng(3).random(300) < 0.7
    ours = bootstrap_interval(scores, 4000, 0.95, seed=1)
    assert ours == bootstrap_interval(scores, 4000, 0.95, seed=1)
    theirs = bootstrap(
        (scores.astype(float),), np.mean, method="percentile", n_resamples=4000, rng=2
    ).confidence_interval
    assert ours.low == pytest.approx(theirs.low, abs=0.01) and ours.high == pytest.approx(theirs.high, abs=0.01)
    assert ours.mean == scores.mean()


def test_the_interval_narrows_with_more_prompts() -> None:
    few = bootstrap_interval(np.array([0.0, 1.0] * 20), 1000, 0.95)
    many = bootstrap_interval(np.array([0.0, 1.0] * 500), 1000, 0.95)
    assert many.high - many.low < few.high - few.low


def scores(right: int, of: int = 200) -> np.ndarray:
    return (np.arange(of) < right).astype(float)


@pytest.mark.parametrize(
    ("candidate", "champion", "margin", "promoted", "why"),
    [
        (150, 50, 0.0, True, "better by \\+0.5"),
        (50, 50, 0.0, False, "does not exceed the margin"),
        (40, 50, 0.0, False, "does not exceed the margin"),
        (150, 50, 0.6, False, "does not exceed the margin 0.6"),
        (51, 50, 0.0, False, "may be chance"),
    ],
)
def test_the_rule(candidate: int, champion: int, margin: float, promoted: bool, why: str) -> None:
    decision = decide(scores(candidate), scores(champion), EvaluateConfig(margin=margin), seed=0)
    assert decision.promoted is promoted
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(decision.reason)


def test_pairing_counts_prompts_not_means() -> None:
    """The same two means: one win a prompt won by nobody else, and wins that the champion has elsewhere."""
    rule = EvaluateConfig()
    nested = decide(scores(110), scores(100), rule, seed=0)
    crossed = decide(scores(110), scores(100)[::-1].copy(), rule, seed=0)
    assert nested.difference.mean == pytest.approx(crossed.difference.mean)
    assert nested.promoted and not crossed.promoted
