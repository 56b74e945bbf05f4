"""Experience: the groups of a run on their way from ticket to durable update, in Redis Streams.

A group is in exactly one place at any time: the ticket stream while a worker holds it, the sample stream until it is
scored, the scored stream until a durable checkpoint covers the update it was trained in. Every move is one Lua script,
so a killed worker, a restarted Redis (append-only file on) or a resumed run can neither lose a group nor count it
twice: a lapsed lease goes to another worker, a second copy of a group is refused, and a training step that is repeated
after a crash takes the very batch recorded for it the first time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

import msgspec
import redis
from redis.backoff import ConstantBackoff, ExponentialBackoff, NoBackoff
from redis.retry import Retry

from components.experience.group import Group, decode_group, encode_group
from configs.failure import Failure, ServiceGone
from configs.run import RunConfig

STAGES = ("running", "generated", "scored", "trained")


class Ticket(NamedTuple):
    """A lease on one group."""

    entry: str
    """Id of the entry in the ticket stream."""
    group: int


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


class Delivered(NamedTuple):
    """A group handed to the reward role."""

    entry: str
    group: Group


class Experience:
    """A run's groups. Every method is one round trip; none blocks.

    Raises:
        ServiceGone: from any method, when Redis has not answered for about ten seconds.
    """

    def __init__(self, url: str, config: RunConfig) -> None:
        self.config = config
        self.redis = redis.Redis.from_url(
            url,
            password=os.environ.get("REDIS_PASSWORD"),
            socket_timeout=10,
            socket_connect_timeout=5,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), retries=8),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
        )
        self._prefix = f"tandem:{{{config.name}}}:"
        self._scripts = {
            name: self.redis.register_script(_source(name)) for name in ("lease", "pass", "drop", "take", "commit")
        }

    def hurry(self) -> None:
        """From now on fail within a second instead of ten when Redis is away: this process is told to leave, and a Redis
        that leaves as well does not come back."""
        self.redis.set_retry(Retry(ConstantBackoff(0.2), 2))

    def open(self) -> None:
        """Make the streams and consumer groups; harmless when they exist."""
        for stream, consumers in (("tickets", "rollout"), ("samples", "reward"), ("scored", "train")):
            try:
                self._do(self.redis.xgroup_create, self.key(stream), consumers, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def key(self, name: str) -> str:
        """The Redis key of one of the run's structures."""
        return self._prefix + name

    def lease(self, worker: str, held: Target, limit: int) -> list[Ticket]:
        """Lease up to `limit` groups to a worker that was proven to hold `held`.

        Raises:
            Failure: the worker is not proven to hold that version.
        """
        train, loop = self.config.train, self.config.loop
        lease_ms = int(self.config.rollout.lease_s * 1000)
        try:
            entries = self._run(
                "lease",
                ["counters", "state", "tickets", "verified"],
                [
                    worker,
                    limit,
                    held.version,
                    held.digest,
                    train.batch_groups,
                    loop.max_staleness,
                    train.steps,
                    lease_ms,
                ],
            )
        except redis.ResponseError as error:
            if "UNVERIFIED" in str(error):
                raise Failure(f"{error}; an engine serves only a version it was verified to hold") from None
            raise
        return [Ticket(entry.decode(), int(group)) for entry, group in entries]

    def hand_in(self, groups: list[tuple[Ticket, Group]]) -> int:
        """Hand in generated groups; returns how many were not handed in before by someone else."""
        return self._pass("tickets", "rollout", "samples", "running", "generated", [(t.entry, g) for t, g in groups])

    def hand_back(self, worker: str) -> int:
        """Make every ticket of a worker claimable at once (it leaves, or is known to be dead)."""
        return self._expire("tickets", "rollout", worker)

    def holder(self) -> str:
        """The worker that holds the most tickets, or an empty string."""
        consumers = self._do(self.redis.xpending, self.key("tickets"), "rollout")["consumers"]
        return max(consumers, key=lambda one: one["pending"])["name"].decode() if consumers else ""

    def deliver(self, consumer: str, limit: int) -> list[Delivered]:
        """Generated groups for the reward role; those another consumer left behind come first."""
        stream, lease_ms = self.key("samples"), int(self.config.rollout.lease_s * 1000)
        _, claimed, *_ = self._do(
            self.redis.xautoclaim, stream, "reward", consumer, min_idle_time=lease_ms, count=limit
        )
        entries = [entry for entry in claimed if entry[1]]
        if len(entries) < limit:
            read = self._do(self.redis.xreadgroup, "reward", consumer, {stream: ">"}, count=limit - len(entries))
            entries += read[0][1] if read else []
        return [Delivered(entry.decode(), decode_group(fields[b"p"])) for entry, fields in entries]

    def release_samples(self, consumer: str) -> int:
        """Make every sample a dead reward process held deliverable again."""
        return self._expire("samples", "reward", consumer)

    def score(self, scored: list[Delivered]) -> int:
        """Pass scored groups on to training; returns how many were not passed on before."""
        return self._pass("samples", "reward", "scored", "generated", "scored", scored)

    def drop_generated(self, delivered: list[Delivered], reason: str) -> int:
        """Drop groups that could not be scored."""
        pairs = [part for item in delivered for part in (item.entry, item.group.id)]
        return int(self._run("drop", ["counters", "state", "samples"], ["reward", "generated", reason, *pairs]))

    def take(self, step: int) -> list[Group]:
        """The batch of training step `step` (it makes version `step`), or nothing while too few groups are ready.

        Stale groups are dropped on the way. Once taken, a step keeps its batch until `commit`.
        """
        payloads = self._run(
            "take",
            ["counters", "state", "scored", "ready", f"batch:{step}"],
            [step, self.config.train.batch_groups, self.config.loop.max_staleness],
        )
        return [decode_group(payload) for payload in payloads]

    def commit(self, step: int) -> None:
        """Acknowledge every group trained up to `step`: a durable checkpoint covers them."""
        first = self.counters().get("durable_step", 0) + 1
        batches = [f"batch:{number}" for number in range(first, step + 1)]
        if batches:
            self._run("commit", ["counters", "state", "scored", *batches], [step])

    def recount(self, step: int, issued: int) -> None:
        """Start the counts of a Redis that lost everything from what a durable checkpoint knows.

        Groups that were on their way when it was lost count as dropped with reason `lost`.
        """
        durable = step * self.config.train.batch_groups
        lost = issued - durable
        counts = {"issued": issued, "trained": durable, "durable": durable, "durable_step": step}
        counts |= {"dropped": lost, "dropped:lost": lost} if lost else {}
        self._do(self.redis.hset, self.key("counters"), mapping=counts)

    def batches(self, first: int, last: int) -> dict[int, list[int]]:
        """Group ids of the batches taken and not yet committed for steps `first` to `last`."""
        found = {}
        for step in range(first, last + 1):
            items = self._do(self.redis.lrange, self.key(f"batch:{step}"), 0, -1)
            if items:
                found[step] = [int(item.split()[1]) for item in items]
        return found

    def close(self, reason: str = "run_ended") -> int:
        """Drop whatever is still on its way to training; returns how many groups that were."""
        states = {
            int(group): stage.decode() for group, stage in self._do(self.redis.hgetall, self.key("state")).items()
        }
        dropped = 0
        for stream, consumers, stage in (
            ("tickets", "rollout", "running"),
            ("samples", "reward", "generated"),
            ("scored", "train", "scored"),
        ):
            entries = self._do(self.redis.xrange, self.key(stream))
            pairs = [
                part
                for entry, fields in entries
                if states.get(int(fields[b"g"])) == stage
                for part in (entry, fields[b"g"])
            ]
            if pairs:
                dropped += int(self._run("drop", ["counters", "state", stream], [consumers, stage, reason, *pairs]))
        self._do(self.redis.delete, self.key("ready"))
        return dropped

    def announce(self, version: int, digest: str) -> None:
        """Training published a version."""
        self._do(self.redis.hset, self.key("weights"), mapping={"announced": f"{version}:{digest}"})

    def announced(self) -> Target | None:
        """The newest version training published."""
        return _target(self._do(self.redis.hget, self.key("weights"), "announced"))

    def set_target(self, target: Target) -> None:
        """Broadcast checked a version in the store: engines are to hold it."""
        self._do(self.redis.hset, self.key("weights"), "target", f"{target.version}:{target.digest}")

    def target(self) -> Target | None:
        """The version engines are to hold, or None before the first."""
        return _target(self._do(self.redis.hget, self.key("weights"), "target"))

    def report(self, worker: str, held: Target, seconds: float) -> None:
        """An engine reports the version it holds, by the digest of its own memory."""
        body = msgspec.json.encode(
            {"worker": worker, "version": held.version, "digest": held.digest, "seconds": seconds}
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

    def verify(self, worker: str, held: Target) -> None:
        """Broadcast compared an engine's report with the manifest: it may serve that version."""
        self._do(self.redis.hset, self.key("verified"), worker, f"{held.version}:{held.digest}")

    def quarantine(self, worker: str, reason: str) -> None:
        """An engine did not prove the version it should hold: it gets no work until it does."""
        pipeline = self.redis.pipeline()
        pipeline.hdel(self.key("verified"), worker)
        pipeline.hset(self.key("quarantined"), worker, reason)
        self._do(pipeline.execute)

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

    def beat(self, seconds: float) -> None:
        """The loop is alive, and will say so again within `seconds`."""
        self._do(self.redis.set, self.key("heartbeat"), 1, px=int(seconds * 1000))

    def heartbeat(self) -> bool:
        """Whether the loop has said lately that it is alive."""
        return bool(self._do(self.redis.exists, self.key("heartbeat")))

    def emit(self, events: list[bytes]) -> None:
        """Append events (JSON objects) to the run's event stream, capped at 100 000."""
        pipeline = self.redis.pipeline(transaction=False)
        for event in events:
            pipeline.xadd(self.key("events"), {"e": event}, maxlen=100_000, approximate=True)
        self._do(pipeline.execute)

    def events(self, after: str, limit: int = 1000) -> tuple[list[bytes], str]:
        """The oldest events after the entry `after` (empty: from the first), and the entry of the last of them."""
        entries = self._do(self.redis.xrange, self.key("events"), min=f"({after}" if after else "-", count=limit)
        return [fields[b"e"] for _, fields in entries], entries[-1][0].decode() if entries else after

    def forget_events(self, last: str) -> None:
        """Delete the events up to the entry `last`: they are written down elsewhere."""
        milliseconds, _, number = last.partition("-")
        self._do(self.redis.xtrim, self.key("events"), minid=f"{milliseconds}-{int(number) + 1}", approximate=False)

    def counters(self) -> dict[str, int]:
        """issued, generated, scored, trained, durable, dropped, dropped:<reason>, reclaimed, duplicates, durable_step."""
        return {key.decode(): int(value) for key, value in self._do(self.redis.hgetall, self.key("counters")).items()}

    def stages(self) -> dict[str, int]:
        """Groups now in each stage."""
        counts = dict.fromkeys(STAGES, 0)
        for stage in self._do(self.redis.hvals, self.key("state")):
            counts[stage.decode()] += 1
        return counts

    def lengths(self) -> dict[str, int]:
        """Entries now in each stream."""
        return {name: self._do(self.redis.xlen, self.key(name)) for name in ("tickets", "samples", "scored")}

    def _pass(self, source: str, consumers: str, target: str, stage: str, enters: str, groups: list[Any]) -> int:
        flat: list[Any] = []
        for entry, group in groups:
            flat += (entry, group.id, group.oldest_version, encode_group(group))
        return int(self._run("pass", ["counters", "state", source, target], [consumers, stage, enters, *flat]))

    def _expire(self, stream: str, consumers: str, consumer: str) -> int:
        pending = self._do(
            self.redis.xpending_range,
            self.key(stream),
            consumers,
            min="-",
            max="+",
            count=100_000,
            consumername=consumer,
        )
        ids = [entry["message_id"] for entry in pending]
        if ids:
            idle = int(self.config.rollout.lease_s * 1000) + 1
            self._do(
                self.redis.xclaim, self.key(stream), consumers, consumer, min_idle_time=0, message_ids=ids, idle=idle,
                justid=True,
            )  # fmt: skip
        return len(ids)

    def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        return self._do(self._scripts[script], keys=[self.key(key) for key in keys], args=arguments)

    def _do(self, command: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise ServiceGone(f"Redis does not answer ({error}); see the log redis.log of the run") from None


def wait_until_loaded(experience: Experience, limit_s: float, each: Callable[[], None] = lambda: None) -> None:
    """Wait until Redis answers and has read its append-only file.

    Args:
        experience: Whose Redis.
        limit_s: Seconds to wait.
        each: Called at every look; raises to end the wait.

    Raises:
        ServiceGone: it has not within that time.
    """
    end = time.monotonic() + limit_s
    client = redis.Redis(connection_pool=experience.redis.connection_pool, retry=Retry(NoBackoff(), retries=0))
    while True:
        each()
        try:
            client.ping()
            return
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if time.monotonic() > end:
                raise ServiceGone(f"Redis was not ready within {limit_s:.0f} s ({error}); see redis.log") from None
            time.sleep(0.05)


def _target(text: bytes | None) -> Target | None:
    if text is None:
        return None
    version, _, digest = text.decode().partition(":")
    return Target(int(version), digest)


def _source(name: str) -> str:
    return resources.files("components.experience").joinpath(f"scripts/{name}.lua").read_text()
