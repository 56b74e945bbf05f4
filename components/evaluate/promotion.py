"""Promotion: when the alias `champion` moves.

The rule: the candidate becomes champion if its mean score exceeds the champion's, on the same prompts, by more than
`evaluate.margin`, **and** the lower bound of the paired bootstrap interval of the difference is above 0. The first
guards against wins too small to matter, the second against wins that another choice of prompts would undo. While there
is no champion, the baseline (the checkpoint the run started from) stands in for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from components.evaluate.interval import Interval, bootstrap_interval
from components.tracking.registry import CHAMPION, Registry, Version
from configs.failure import BadData
from configs.run import EvaluateConfig

REPLACED = "champion.replaced"
"""Tag on a promoted version: the number of the champion before it, or `none`."""
NONE = "none"


class Decision(NamedTuple):
    """Whether the candidate is promoted, and why."""

    promoted: bool
    difference: Interval
    """Candidate minus champion, with its paired bootstrap interval."""
    reason: str


def decide(candidate: np.ndarray, champion: np.ndarray, rule: EvaluateConfig, seed: int) -> Decision:
    """Apply the rule to the scores of both on the same prompts (float [N] each, in the same order)."""
    difference = bootstrap_interval(candidate - champion, rule.bootstrap_samples, rule.confidence, seed)
    level = f"{rule.confidence:.0%} interval {difference.low:+.4f} to {difference.high:+.4f}"
    if not difference.mean > rule.margin:
        return Decision(
            False, difference, f"the difference {difference.mean:+.4f} does not exceed the margin {rule.margin:g}"
        )
    if not difference.low > 0:
        return Decision(False, difference, f"the difference {difference.mean:+.4f} may be chance ({level})")
    return Decision(True, difference, f"the candidate is better by {difference.mean:+.4f} ({level})")


def opponent(registry: Registry, version: str) -> Version | None:
    """The champion that version `version` is compared with; None when there is none yet.

    A step that died after it had moved the alias finds the candidate as champion: it is compared with the champion it
    replaced, so that a retry decides as the first try did.
    """
    champion = registry.by_alias(CHAMPION)
    if champion is None or champion.number != version:
        return champion
    replaced = champion.tags.get(REPLACED, NONE)
    return None if replaced == NONE else registry.get(replaced)


def promote(registry: Registry, version: str, champion: Version | None) -> None:
    """Move the alias to `version`, and note which champion it replaces."""
    registry.tag(version, {REPLACED: champion.number if champion else NONE})
    registry.point(CHAMPION, version)


def model_uri(registry: Registry, champion: Version) -> str:
    """Where a champion's weights lie.

    Raises:
        BadData: its version has no tag that says it.
    """
    uri = champion.tags.get("model_uri") or champion.tags.get("checkpoint_uri")
    if not uri:
        raise BadData(
            f"{registry.name} version {champion.number} is {CHAMPION} but has no tag model_uri;"
            f" set the tag to its Hugging Face folder, or remove the alias"
        )
    return uri
