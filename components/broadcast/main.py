"""Carries each version of the weights to every engine and proves that it arrived."""

from __future__ import annotations

import time

from components.experience.experience import Target
from components.role import Role, run_role
from components.weights.store import WeightsStore
from configs.failure import BadData


def broadcast(role: Role) -> None:
    """Check every announced version in the store, make it the target, and compare what engines report with it."""
    store = WeightsStore(role.layout.weights)
    experience = role.experience
    current: Target | None = None
    while True:
        role.check_leaving()
        announced = experience.announced()
        if announced is not None and announced != current:
            current = _offer(role, store, announced) or current
        if (report := experience.next_report(wait_s=0.01)) is not None:
            _judge(role, store, report)


def _offer(role: Role, store: WeightsStore, announced: Target) -> Target | None:
    """Make an announced version the target, once its file is what its manifest says."""
    start = time.time()
    try:
        manifest = store.check(announced.version)
    except BadData:
        # Training may have published and pruned past it meanwhile; the newest one is what matters.
        if role.experience.announced() != announced:
            return None
        raise
    if manifest.digest != announced.digest:
        return None
    role.experience.set_target(announced)
    role.emit("span", announced.version, kind="verify", start=start, end=time.time(), bytes=manifest.bytes)
    return announced


def _judge(role: Role, store: WeightsStore, report: dict[str, object]) -> None:
    """Admit the engine to its version, or quarantine it."""
    worker, held = str(report["worker"]), Target(int(str(report["version"])), str(report["digest"]))
    expected = store.manifest(held.version).digest if held.version in store.versions() else None
    if held.digest == expected:
        role.experience.readmit(worker)
        role.experience.verify(worker, held)
        role.emit("verified", held.version, worker=worker, digest=held.digest, seconds=report["seconds"])
    else:
        reason = f"{worker} holds version {held.version} with digest {held.digest}, the store has {expected}"
        role.experience.quarantine(worker, reason)
        role.emit("quarantined", held.version, worker=worker, sentence=reason)


if __name__ == "__main__":
    run_role("broadcast", broadcast)
