"""Carries each version of the weights to every engine and proves that it arrived."""

from __future__ import annotations

import time
from typing import Any

from components.experience.experience import Target
from components.role import Role, run_role
from components.weights.store import WeightsStore, open_weights
from configs.failure import BadData


def broadcast(role: Role) -> None:
    """Check every announced version in the store, make it the target, and compare what engines report with it."""
    store = open_weights(role.layout)
    experience = role.experience
    current: Target | None = None
    offered: dict[int, str] = {}
    while True:
        role.check_leaving()
        announced = experience.announced()
        if announced is not None and announced != current and _offer(role, store, announced):
            current = announced
            offered[announced.version] = announced.digest
        if (report := experience.next_report(wait_s=0.01)) is not None:
            _judge(role, offered, report)


def _offer(role: Role, store: WeightsStore, announced: Target) -> bool:
    """Make an announced version the target, once its file is what its manifest says and that is what was announced."""
    start = time.time()
    try:
        manifest = store.check(announced.version)
    except BadData:
        # Training may have published and pruned past it meanwhile; the newest one is what matters.
        if role.experience.announced() != announced:
            return False
        raise
    if manifest.digest != announced.digest:
        return False
    role.experience.set_target(announced)
    role.emit("span", announced.version, kind="verify", start=start, end=time.time(), bytes=manifest.bytes)
    return True


def _judge(role: Role, offered: dict[int, str], report: dict[str, Any]) -> None:
    """Admit the engine to the version it reports, or quarantine it."""
    worker, held = report["worker"], Target(report["version"], report["digest"])
    expected = offered.get(held.version)
    if expected is None:
        return  # offered by a process before this one: the engine reports again, or loads a newer version
    if held.digest == expected:
        role.experience.verify(worker, held)
        role.emit("verified", held.version, worker=worker, digest=held.digest, seconds=report["seconds"])
    else:
        reason = f"{worker} holds version {held.version} with digest {held.digest}, published is {expected}"
        role.experience.quarantine(worker, reason)
        role.emit("quarantined", held.version, worker=worker, sentence=reason)


if __name__ == "__main__":
    run_role("broadcast", broadcast)
