"""The catalogue of a run's durable checkpoints: which are complete, which is newest (needs no torch)."""

from __future__ import annotations

import re

import msgspec

from components.storage.layout import RunLayout

COMPLETE = re.compile(r"^(step-\d{6})/_digests\.json$")


class TrainerState(msgspec.Struct):
    """What state.json says."""

    step: int
    issued: int
    """Groups issued when the checkpoint was made: the data cursor."""
    weights: str
    """Digest of the policy's tensors."""


def latest_checkpoint(layout: RunLayout) -> str | None:
    """Name of the newest complete checkpoint, such as `step-000050`."""
    keys = layout.store.child("checkpoints").list()
    return max((match[1] for key in keys if (match := COMPLETE.match(key))), default=None)


def prune_checkpoints(layout: RunLayout, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints."""
    store = layout.store.child("checkpoints")
    for name in sorted({match[1] for key in store.list() if (match := COMPLETE.match(key))})[:-keep]:
        # Without this key the folder no longer counts as complete, whatever happens to the rest.
        store.delete(f"{name}/_digests.json")
        store.delete(name)
