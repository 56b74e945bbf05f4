"""Carries each version of the weights to every engine and proves that it arrived."""

from __future__ import annotations

import time
from typing import Any

from components.broadcast.transfers import Transfers
from components.experience.deliveries import Target
from components.role import Role, run_role
from components.weights.geometry import read_geometry
from components.weights.proof import Split, difference, engine_checksums
from components.weights.store import open_weights
from configs.failure import BadData
from configs.hardware import load_hardware

REMEMBERED = 8
"""Versions whose checksums are kept for engines that report late."""


class Broadcast:
    """Checks every announced version in the store, makes it the target, and compares what engines report with it."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.store = open_weights(role.layout)
        self.transfers = Transfers(role, self.store, self._look) if role.config.collective else None
        self.current: Target | None = None
        self.offered: dict[int, list[Target]] = {}
        """Every target of a version's number so far, the one that counts last."""
        self._expected: dict[Target, dict[str, str]] = {}

    def run(self) -> None:
        """Work until told to leave."""
        experience = self.role.experience
        try:
            while True:
                self.role.check_leaving()
                announced = experience.announced()
                if announced is not None and announced != self.current and self._is_published(announced):
                    self.current = announced
                    self.offered.setdefault(announced.version, []).append(announced)
                    self._offer(announced)
                self._look()
        finally:
            if self.transfers is not None:
                self.transfers.close()

    def _look(self) -> None:
        """Judge the next report, if one comes soon."""
        if (report := self.role.experience.next_report(wait_s=0.01)) is not None:
            self._judge(report)

    def _is_published(self, announced: Target) -> bool:
        """Whether the store holds what was announced, whole."""
        start = time.time()
        try:
            if self.store.manifest(announced.version).digest != announced.digest:
                return False
            manifest = self.store.check(announced.version)
        except BadData:
            # Training may have published and pruned past it meanwhile; the newest one is what matters.
            if self.role.experience.announced() != announced:
                return False
            raise
        if manifest.digest != announced.digest:
            return False
        self.role.emit(
            "span", announced.version, kind="verify", start=start, end=time.time(), bytes=manifest.bytes,
            stored_bytes=manifest.stored_bytes,
        )  # fmt: skip
        return True

    def _offer(self, announced: Target) -> None:
        """Make a version the target; engines that take part in collective transfers are sent it."""
        experience = self.role.experience
        # A broadcast that was started anew offers what engines hold already; nobody stands by for that.
        if self.transfers is None or experience.target() == announced or not self.transfers.carry(announced):
            experience.set_target(announced)

    def _judge(self, report: dict[str, Any]) -> None:
        """Admit the engine to the version it reports, or quarantine it."""
        worker, held = report["worker"], Target(report["version"], report["digest"])
        offered = self.offered.get(held.version, [])
        if not offered or held in offered[:-1]:
            return  # offered by a process before this one, or replaced since: the engine reports again, or loads a newer one
        reason = ""
        if held != offered[-1]:
            reason = (
                f"{worker} holds version {held.version} with digest {held.digest}, published is {offered[-1].digest}"
            )
        elif report["checksums"]:
            if (checksums := self._checksums(held)) is None:
                return
            if wrong := difference(checksums, report["checksums"]):
                reason = f"{worker} does not hold version {held.version}: {wrong}"
        elif self.role.config.rollout.engine == "sglang":
            reason = f"{worker} gave no checksums for version {held.version}"
        experience = self.role.experience
        if reason:
            experience.quarantine(worker, reason, report["load"])
            self.role.emit("quarantined", held.version, worker=worker, sentence=reason)
        else:
            experience.verify(worker, held, report["load"])
            self.role.emit("verified", held.version, worker=worker, digest=held.digest, seconds=report["seconds"])

    def _checksums(self, target: Target) -> dict[str, str] | None:
        """What an SGLang engine must say of a version; None when the store has let it go."""
        if target not in self._expected:
            config, file, version = self.role.config, self.role.start / "config.json", target.version
            split = Split(config.sglang.tensor_parallel, config.sglang.expert_parallel)
            device = config.sglang.device_on(load_hardware(config.hardware))
            try:
                tensors = self.store.mapped(version)
                if self.store.manifest(version).digest != target.digest:
                    return None
                geometry = read_geometry(file, str(file))
                self._expected[target] = engine_checksums(tensors, geometry, device, split)
            except BadData:
                if version in self.store.versions():
                    raise
                return None
            for old in list(self._expected)[:-REMEMBERED]:
                del self._expected[old]
        return self._expected[target]


def broadcast(role: Role) -> None:
    """Carry and prove versions until told to leave."""
    Broadcast(role).run()


if __name__ == "__main__":
    run_role("broadcast", broadcast)
