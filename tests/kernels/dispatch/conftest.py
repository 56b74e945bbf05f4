"""Fleets that the tests of one process share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.kernels.dispatch.fleet import Fleet


@pytest.fixture(scope="session")
def fleet() -> Iterator[Callable[[int], Fleet]]:
    """The fleet of so many ranks."""
    fleets: dict[int, Fleet] = {}
    yield lambda world: fleets.setdefault(world, Fleet(world))
    for each in fleets.values():
        each.stop()
