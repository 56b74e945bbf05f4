"""Experience: the groups of a run on their way from ticket to durable update, in Redis Streams.

A group is in exactly one place at any time: the ticket stream while a worker holds it, the sample stream until it is
scored, the scored stream until a durable checkpoint covers the update it was trained in. Every move is one Lua script,
so a killed worker, a restarted Redis (append-only file on) or a resumed run can neither lose a group nor count it
twice: a lapsed lease goes to another worker, a second copy of a group is refused, and a training step that is repeated
after a crash takes the very batch recorded for it the first time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import redis

from components.experience.deliveries import Deliveries, Target
from components.experience.group import Group, Sample, decode_group, decode_partial, encode_group
from configs.failure import Failure

STAGES = ("running", "generated", "scored", "trained")


class Ticket(NamedTuple):
    """A lease on one group."""

    entry: str
    """Id of the entry in the ticket stream."""
    group: int
    partial: list[Sample] | None = None
    """What an earlier worker already made of the group's completions."""


class Delivered(NamedTuple):
    """A group handed to the reward role."""

    entry: str
    group: Group


class Experience(Deliveries):
    """A run's groups, and the deliveries of weights to those who generate them. Every method is one round trip; none blocks.

    Raises:
        ServiceGone: from any method, when Redis has not answered for about ten seconds.
    """

    def open(self) -> None:
        """Make the streams and consumer groups; harmless when they exist."""
        for stream, consumers in (("tickets", "rollout"), ("samples", "reward"), ("scored", "train")):
            try:
                self._do(self.redis.xgroup_create, self.key(stream), consumers, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

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
                ["counters", "state", "tickets", "verified", "partials"],
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
        return [
            Ticket(entry.decode(), int(group), decode_partial(partial) if partial else None)
            for entry, group, partial in entries
        ]

    def renew(self, worker: str, tickets: list[Ticket]) -> set[int]:
        """Begin the leases of a worker anew; returns the groups that are still its own."""
        own = set(self._run("renew", ["tickets"], [worker, *(ticket.entry for ticket in tickets)]))
        return {ticket.group for ticket in tickets if ticket.entry.encode() in own}

    def keep(self, partials: list[tuple[Ticket, list[Sample]]]) -> None:
        """Keep what a worker has of groups it leaves unfinished; whoever leases one next is given it."""
        flat = [part for ticket, samples in partials for part in (ticket.group, encode_group(samples))]
        if flat:
            self._run("keep", ["state", "partials"], flat)

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
        self._do(self.redis.delete, self.key("ready"), self.key("partials"))
        return dropped

    def beat(self, seconds: float) -> None:
        """The loop is alive, and will say so again within `seconds`."""
        self._do(self.redis.set, self.key("heartbeat"), 1, px=int(seconds * 1000))

    def heartbeat(self) -> bool:
        """Whether the loop has said lately that it is alive."""
        return bool(self._do(self.redis.exists, self.key("heartbeat")))

    def occupy(self, what: str, seconds: float) -> None:
        """Training is at something that moves no group, and will say so again within `seconds` if it still is."""
        self._do(self.redis.set, self.key("occupation"), what, px=int(seconds * 1000))

    def occupation(self) -> str:
        """What training has lately said it is at, or an empty string."""
        return (self._do(self.redis.get, self.key("occupation")) or b"").decode()

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
        return int(
            self._run("pass", ["counters", "state", source, target, "partials"], [consumers, stage, enters, *flat])
        )

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
