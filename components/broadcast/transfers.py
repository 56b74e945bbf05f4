"""Collective transfers: one version to all serving engines at once, never waiting long for one that is gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from components.experience.deliveries import Member, Target
from components.role import Role
from components.weights.store import WeightsStore
from configs.failure import Failure, ServiceGone

if TYPE_CHECKING:
    from components.broadcast.collective import Sender


class Transfers:
    """Rank 0 of the process groups that carry versions to SGLang engines.

    The group lasts as long as its members do. When one joins, leaves or fails, a new group is formed for the next version;
    engines that a transfer did not reach read the version from the store.
    """

    def __init__(self, role: Role, store: WeightsStore, judge: Callable[[], None]) -> None:
        """
        Args:
            judge: Looks at one report, should there be any: engines wait for verdicts before they stand by.
        """
        self.role = role
        self.store = store
        self._judge = judge
        self._sender: Sender | None = None
        self._members: dict[str, Member] = {}
        self._formed = 0

    def carry(self, target: Target) -> bool:
        """Send a version to the engines that stand by; returns whether there were any.

        Engines that did not get it see the target without a session afterwards, and pull.
        """
        workers = self._standing_by(target)
        if not workers:
            return False
        start, experience, limit = time.time(), self.role.experience, self.role.config.weights.transfer_timeout_s
        try:
            sender = self._group(workers)
            experience.set_target(target, sender.session)
            sender.join(limit)
            manifest = self.store.manifest(target.version)
            tensors = self.store.load(target.version)
            reached = sender.send({name: tensors[name] for name, _, _ in manifest.sent}, limit)
        except (Failure, RuntimeError) as failure:  # torch raises the latter for a connection that breaks at once
            self.close()
            self._leave_behind(target, dict.fromkeys(workers, str(failure)))
        else:
            self._leave_behind(target, {worker: sender.lost.get(worker, "") for worker in workers.keys() - reached})
            self.role.emit(
                "span", target.version, kind="transfer", start=start, end=time.time(), bytes=manifest.bytes,
                engines=len(reached),
            )  # fmt: skip
        # Who did not get it, or opens its engine anew from now on, pulls.
        experience.set_target(target)
        return True

    def _leave_behind(self, target: Target, reasons: dict[str, str]) -> None:
        """These engines take part in no transfer until they have proven a version again."""
        for worker, reason in sorted(reasons.items()):
            self.role.experience.discharge(worker)
            self.role.emit("left_behind", target.version, worker=worker, sentence=reason)

    def close(self) -> None:
        """End the group; engines that wait in it fail at once."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _standing_by(self, target: Target) -> dict[str, Member]:
        """The engines that will take part; one that does not answer in time is left out from now on."""
        experience, limit = self.role.experience, self.role.config.weights.transfer_timeout_s
        if not experience.members():
            return {}
        experience.call(target)
        end = time.monotonic() + limit
        while True:
            members, ready = experience.members(), experience.standing_by(target)
            if members.keys() <= ready or time.monotonic() > end:
                break
            self.role.check_leaving()
            self._judge()
        self._leave_behind(target, dict.fromkeys(members.keys() - ready, f"was not ready within {limit:g} s"))
        return {worker: member for worker, member in members.items() if worker in ready}

    def _group(self, workers: dict[str, Member]) -> Sender:
        """The group of exactly these engines."""
        if self._sender is None or self._members != workers or self._sender.lost:
            # Only here is torch needed: the image of a broadcast that does not send has none.
            from components.broadcast.collective import Sender

            self.close()
            weights = self.role.config.weights
            self._formed += 1
            name = f"{self.role.config.name}-{int(time.time())}-{self._formed}"
            self._members = workers
            ranks = {worker: member.ranks for worker, member in workers.items()}
            self._sender = Sender(name, weights.collective_backend, self._address(), ranks, weights.bucket_mib << 20)
        return self._sender

    def _address(self) -> str:
        """Where the engines reach this process."""
        if self.role.layout.scratch_is_shared:
            return "127.0.0.1"
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError as error:
            raise ServiceGone(f"this host's own name does not resolve ({error})") from None
