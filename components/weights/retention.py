"""Retention: which versions stay in the weights store."""

from __future__ import annotations

from collections.abc import Callable, Collection

from components.weights.manifest import Manifest


def divided(
    versions: list[int], oldest: int, needed: Collection[int], manifest: Callable[[int], Manifest | None]
) -> tuple[list[int], list[int]]:
    """Versions that stay and versions that go.

    Args:
        versions: All there are, ascending.
        oldest: Versions later than this stay.
        needed: Others that stay.
        manifest: Manifest of a version, or None if it is damaged.
    """
    stay = {version for version in versions if version > oldest or version in needed}
    if len(stay) < len(versions):
        there = set(versions)
        # From the newest down, so that the base of a base is reached.
        for version in reversed(versions):
            known = manifest(version) if version in stay else None
            if known is not None and known.base is not None and known.base.version in there:
                stay.add(known.base.version)
    return sorted(stay), [version for version in versions if version not in stay]
