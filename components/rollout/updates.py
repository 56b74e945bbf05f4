"""Keeps a worker's engine at the version engines are to hold: paused, loaded, proven by broadcast, and only then resumed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from components.experience.deliveries import Order, Target
from components.role import Role
from components.rollout.engine import Collective, Engine, EngineBroken, Held, Pull
from components.weights.store import WeightsStore
from configs.failure import BadData, Failure

REPORT_AGAIN_S = 3.0
"""Seconds after which a report without a verdict is sent again."""
LOOK_S = 0.002
"""Seconds between looks for the verdict."""

T = TypeVar("T")


class Updates:
    """The versions of one engine.

    Attributes:
        held: The version the engine was proven to hold and serves; None while it serves none.
        proven: Every version it was ever proven to hold: tokens of any other are not handed in.
    """

    def __init__(self, role: Role, engine: Engine, store: WeightsStore, ranks: int = 0) -> None:
        self.role = role
        self.engine = engine
        self.store = store
        self.held: Target | None = None
        self.proven: set[int] = set()
        self._ranks = ranks
        self._life = ""
        self._standing_by: Target | None = None
        self._failed = ""
        self._took_s = 0.0
        self._resumed = 0.0

    async def follow(self, busy: bool) -> bool:
        """See that the engine holds what it should; returns whether it holds a proven version.

        An engine that loads more slowly than training publishes serves at least as long as it loaded before it loads
        again, as long as what it generates is not too stale to be trained on.

        Args:
            busy: Whether there are groups in generation.

        Raises:
            EngineBroken: the update failed in between.
            Failure: the engine was quarantined, or broadcast gave no verdict in time.
        """
        experience = self.role.experience
        order = experience.order()
        if order.coming is not None and order.coming != self._standing_by and self._ranks and self.held is not None:
            self._standing_by = order.coming
            experience.stand_by(self.role.worker, order.coming)
        if order.target not in (None, self.held) and self._due(order, busy):
            await self._update(order, order.target)
        return self.held is not None

    def lost(self) -> None:
        """The engine was opened anew: nothing is known of what it holds."""
        self.held = None
        self._life = secrets.token_hex(4)
        self.role.experience.discharge(self.role.worker)
        self.role.experience.forget_proof(self.role.worker)

    def step_aside(self) -> None:
        """Take part in no collective transfer for a while."""
        if self._ranks:
            self.role.experience.discharge(self.role.worker)

    def step_back(self) -> None:
        """Take part again."""
        if self._ranks and self.held is not None:
            self.role.experience.enlist(self.role.worker, self._life, self._ranks)

    def _due(self, order: Order, busy: bool) -> bool:
        assert order.target is not None
        if self.held is None or (order.session is not None and self.role.worker in order.session.ranks):
            return True  # the others in the group wait for this one
        behind = order.target.version - self.held.version
        if not 0 < behind <= self.role.config.loop.max_staleness or not busy:
            return True
        return time.monotonic() - self._resumed >= self._took_s

    async def _update(self, order: Order, target: Target) -> None:
        role, mode = self.role, self.role.config.rollout.update
        start = time.time()
        source = await unless_leaving(role, self._source(order, target))
        if source is None:
            return
        experience = role.experience
        fetched = time.time()
        experience.forget_proof(role.worker)
        self.held = None
        await unless_leaving(role, self.engine.pause(mode))
        await unless_leaving(role, self._load(target, source))
        held = await unless_leaving(role, self.engine.held())
        if held.label != target.label:
            raise EngineBroken(
                f"{role.worker}: the engine was given version {target.label} and says it holds {held.label}"
            )
        if not await self._verdict(target, held, time.time() - start):
            return
        await unless_leaving(role, self.engine.resume())
        end = time.time()
        self.held, self._took_s, self._resumed = target, end - start, time.monotonic()
        self.proven.add(target.version)
        self.step_back()
        how = "collective" if isinstance(source, Collective) else "pull"
        role.emit("span", target.version, kind="load", start=start, end=end, pause_s=end - fetched, transfer=how)

    async def _source(self, order: Order, target: Target) -> Pull | Collective | None:
        """How a version comes to this engine; None when training has pruned or replaced it already."""
        experience, version = self.role.experience, target.version
        try:
            manifest = await asyncio.to_thread(self.store.manifest, version)
            if manifest.digest != target.digest:
                return None
            session = order.session
            if session is not None and self.role.worker in session.ranks and session.name != self._failed:
                return Collective(session, manifest.sent)
            return Pull(await asyncio.to_thread(self.store.folder, version, self.role.start))
        except BadData:
            if experience.target() != target or version not in self.store.versions():
                return None  # training is further and has pruned it: a newer target comes
            raise

    async def _load(self, target: Target, source: Pull | Collective) -> None:
        weights = self.role.config.weights
        limit = weights.verify_timeout_s
        if isinstance(source, Collective):
            # The group has to form first.
            limit += 2 * weights.transfer_timeout_s
            self._failed = source.session.name
        try:
            await asyncio.wait_for(self.engine.load(target, source, self.role.config.rollout.update), limit)
        except TimeoutError:
            raise EngineBroken(
                f"{self.role.worker}: version {target.version} was not loaded within {limit:.0f} s"
            ) from None
        self._failed = ""

    async def _verdict(self, target: Target, held: Held, seconds: float) -> bool:
        """Report what the engine holds and wait for broadcast's verdict; False if the version is not wanted any more."""
        experience, limit, worker = self.role.experience, self.role.config.weights.verify_timeout_s, self.role.worker
        start = time.monotonic()
        reported = float("-inf")
        # A report of an earlier process, or of an earlier load, must prove nothing of this one.
        load = secrets.token_hex(4)
        while (verdict := experience.verdict(worker, load)) != "":
            self.role.check_leaving()
            now = time.monotonic()
            if verdict is not None:
                raise Failure(f"quarantined: {verdict}")
            if now - reported > REPORT_AGAIN_S:
                # A broadcast that died took the report with it.
                if reported > start and experience.target() != target:
                    return False
                reported = now
                reported_as = Target(target.version, held.digest or target.digest)
                experience.report(worker, reported_as, seconds, held.checksums, load)
            if now - start > limit:
                raise Failure(f"broadcast did not verify version {target.version} within {limit:.0f} s")
            await asyncio.sleep(LOOK_S)
        return True


async def unless_leaving(role: Role, work: Awaitable[T], each: Callable[[], None] = lambda: None) -> T:
    """Await something long, and give it up when the role is told to leave.

    Args:
        each: Called several times a second meanwhile; raises to end the wait.

    Raises:
        ToldToLeave: the role is leaving.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            role.check_leaving()
            each()
            await asyncio.wait({task}, timeout=0.1)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
