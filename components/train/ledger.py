"""The ledger: which groups each durable update was trained on, written beside the checkpoints and kept for good."""

from __future__ import annotations

import msgspec


class Ledger(msgspec.Struct):
    """The groups of the steps since the checkpoint before."""

    step: int
    """The checkpoint's step."""
    groups: dict[int, list[int]]
    """Group ids by step."""
