"""Deliveries: which version of the weights engines are to hold, which they were proven to hold, and how it comes to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from components.broadcast.session import Session
from components.experience.connection import RunRedis


class Target(msgspec.Struct, frozen=True):
    """The weights version engines are to hold."""

    version: int
    digest: str

    @property
    def label(self) -> str:
        """As engines and Redis are told it."""
        return f"{self.version}:{self.digest}"

    @classmethod
    def of(cls, label: str) -> Target | None:
        """The version that `label` names; None if it is not one of ours, such as an engine's label before its first."""
        version, _, digest = label.partition(":")
        return cls(int(version), digest) if version.isdigit() and digest else None


class Order(NamedTuple):
    """What engines are told: the version to hold, and how it comes to them."""

    target: Target | None
    """The version to hold; None before the first."""
    session: Session | None
    """The process group it is sent through to the engines in it; the others, or all if None, read it from the store."""
    coming: Target | None
    """The version the next collective transfer will carry: engines that will take part stand by, and go on generating."""


class Member(NamedTuple):
    """An engine that takes part in collective transfers."""

    ranks: int
    """Processes of its that receive weights."""
    life: str
    """Changes every time the engine is opened."""


class Deliveries(RunRedis):
    """What training, broadcast and the engines tell one another of versions."""

    def announce(self, version: int, digest: str) -> None:
        """Training published a version."""
        self._do(self.redis.hset, self.key("weights"), mapping={"announced": Target(version, digest).label})

    def announced(self) -> Target | None:
        """The newest version training published."""
        return _target(self._do(self.redis.hget, self.key("weights"), "announced"))

    def call(self, target: Target) -> None:
        """A collective transfer of this version is to begin: engines that will take part stand by."""
        self._do(self.redis.hset, self.key("weights"), "coming", target.label)

    def set_target(self, target: Target, session: Session | None = None) -> None:
        """Broadcast checked a version in the store: engines are to hold it.

        Args:
            session: The process group that sends it to the engines in it.
        """
        order = {"target": target.label, "session": msgspec.json.encode(session) if session else b"", "coming": b""}
        self._do(self.redis.hset, self.key("weights"), mapping=order)

    def target(self) -> Target | None:
        """The version engines are to hold, or None before the first."""
        return self.order().target

    def order(self) -> Order:
        """The version engines are to hold, and how it comes."""
        label, session, coming = self._do(self.redis.hmget, self.key("weights"), "target", "session", "coming")
        return Order(_target(label), msgspec.json.decode(session, type=Session) if session else None, _target(coming))

    def enlist(self, worker: str, life: str, ranks: int) -> None:
        """An engine is serving: the next collective transfer counts on it.

        Args:
            life: Another one every time the engine is opened, since an engine that was opened anew is in no group.
            ranks: Processes of its that receive weights.
        """
        self._do(self.redis.hset, self.key("members"), worker, f"{ranks}:{life}")

    def discharge(self, worker: str) -> None:
        """An engine left, or was left behind: it takes part in no collective transfer until it is enlisted again."""
        self._do(self.redis.hdel, self.key("members"), worker)

    def members(self) -> dict[str, Member]:
        """The engines that take part in collective transfers, by worker, in order of name."""
        found = self._do(self.redis.hgetall, self.key("members"))
        pairs = ((name.decode(), text.decode().partition(":")) for name, text in sorted(found.items()))
        return {name: Member(int(ranks), life) for name, (ranks, _, life) in pairs}

    def stand_by(self, worker: str, target: Target) -> None:
        """An engine is ready to receive a version."""
        self._do(self.redis.hset, self.key("standing_by"), worker, target.label)

    def standing_by(self, target: Target) -> set[str]:
        """Workers whose engines are ready to receive a version."""
        found = self._do(self.redis.hgetall, self.key("standing_by"))
        return {worker.decode() for worker, label in found.items() if label.decode() == target.label}

    def report(
        self, worker: str, held: Target, seconds: float, checksums: dict[str, str] | None = None, load: str = ""
    ) -> None:
        """An engine reports the version it holds: by the digest of its own memory, or by checksums of its parameters.

        Args:
            load: Names this load of the engine; the verdict names it again.
        """
        body = msgspec.json.encode(
            {
                "worker": worker,
                "version": held.version,
                "digest": held.digest,
                "seconds": seconds,
                "checksums": checksums or {},
                "load": load,
            }
        )
        pipeline = self.redis.pipeline()
        # What an earlier process of this name was quarantined for says nothing about this report.
        pipeline.hdel(self.key("quarantined"), worker)
        pipeline.rpush(self.key("reports"), body)
        self._do(pipeline.execute)

    def next_report(self, wait_s: float) -> dict[str, Any] | None:
        """The next engine report, waiting up to `wait_s` seconds."""
        popped = self._do(self.redis.blpop, self.key("reports"), timeout=wait_s)
        return msgspec.json.decode(popped[1]) if popped else None

    def verify(self, worker: str, held: Target, load: str = "") -> None:
        """Broadcast compared an engine's report with the store: it may serve that version."""
        pipeline = self.redis.pipeline()
        pipeline.hset(self.key("verified"), worker, held.label)
        pipeline.hset(self.key("verdicts"), worker, f"{load}:")
        self._do(pipeline.execute)

    def forget_proof(self, worker: str) -> None:
        """A worker's engine is being changed: what it was proven to hold counts no longer."""
        self._do(self.redis.hdel, self.key("verified"), worker)

    def held_versions(self) -> set[int]:
        """Every version that some engine was last proven to hold."""
        held = (_target(label) for label in self._do(self.redis.hvals, self.key("verified")))
        return {target.version for target in held if target is not None}

    def quarantine(self, worker: str, reason: str, load: str = "") -> None:
        """An engine did not prove the version it should hold: it gets no work until it does."""
        pipeline = self.redis.pipeline()
        pipeline.hdel(self.key("verified"), worker)
        pipeline.hset(self.key("quarantined"), worker, reason)
        pipeline.hset(self.key("verdicts"), worker, f"{load}:{reason}")
        self._do(pipeline.execute)

    def verdict(self, worker: str, load: str) -> str | None:
        """Why a load of an engine was quarantined, empty if it was proven, None while there is no verdict."""
        found = self._do(self.redis.hget, self.key("verdicts"), worker)
        about, _, reason = found.decode().partition(":") if found else ("", "", "")
        return reason if found and about == load else None

    def quarantined(self, worker: str) -> str:
        """Why a worker is quarantined, or an empty string."""
        reason = self._do(self.redis.hget, self.key("quarantined"), worker)
        return reason.decode() if reason else ""

    def readmit(self, worker: str) -> None:
        """Lift a quarantine."""
        self._do(self.redis.hdel, self.key("quarantined"), worker)

    def verified(self, worker: str) -> Target | None:
        """The version a worker was proven to hold."""
        return _target(self._do(self.redis.hget, self.key("verified"), worker))


def _target(text: bytes | None) -> Target | None:
    return None if text is None else Target.of(text.decode())
