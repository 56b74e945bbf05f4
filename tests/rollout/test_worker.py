"""A worker keeps its engine at proven versions, and nothing it generated is lost or taken for something else."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from components.broadcast.main import Broadcast
from components.experience.audit import audit
from components.experience.deliveries import Target
from components.experience.group import Group
from components.experience.redis_server import RedisServer
from components.role import Inputs, Role
from components.rollout.engine import Collective, Completion, EngineBroken, Health, Pull, Request, State, UpdateMode
from components.rollout.in_process import InProcessEngine
from components.rollout.torch_policy import TorchPolicy
from components.rollout.worker import Worker
from components.stage_data.rows import SourceRow
from components.stage_data.split import MANIFEST, split_rows, write_splits
from components.stage_data.tasks import task_rows
from components.storage.layout import RunLayout
from components.warm_start.tokenizer import character_tokenizer
from components.weights.geometry import read_geometry
from components.weights.policy import checkpoint_tensors, new_policy, save_policy
from components.weights.store import open_weights
from configs.failure import Failure, ToldToLeave
from configs.run import RunConfig
from tests.cluster.api import wait_for

TOKENS = 400
TOKENIZER = character_tokenizer("0123456789+=")
LIMIT_S = 120.0


class Site:
    """A run's Redis, weights and broadcast, with workers started by hand; its policy never ends by itself."""

    def __init__(self, config: RunConfig, redis_url: str) -> None:
        self.config = config
        self.layout = RunLayout(config)
        rows = [SourceRow(row, f"row {number}") for number, row in enumerate(task_rows("add2r", 40, 0), 1)]
        store = self.layout.store.child("data")
        write_splits(store, split_rows(rows, 0.1, "test"), "test")
        self.inputs = Inputs(redis_url, f"{store.uri}/{MANIFEST}", "")
        self.layout.scratch.mkdir(parents=True, exist_ok=True)
        self.policies = [new_policy(config.model, TOKENIZER.get_vocab_size(), seed) for seed in range(3)]
        for policy in self.policies:
            policy.config.eos_token_id = None
        save_policy(self.policies[0], TOKENIZER, self.layout.scratch / "start")
        self.weights = open_weights(self.layout)
        self.broadcast = Role("broadcast", "broadcast", config, self.inputs)
        self.broadcast.experience.open()
        self.experience = self.broadcast.experience
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with pytest.raises(ToldToLeave):
            Broadcast(self.broadcast).run()

    def publish(self, version: int) -> None:
        """Training publishes another policy."""
        manifest = self.weights.publish(version, checkpoint_tensors(self.policies[version]))
        self.experience.announce(version, manifest.digest)

    def engine(self, kind: type[InProcessEngine] = InProcessEngine) -> InProcessEngine:
        file = self.layout.scratch / "start" / "config.json"
        return kind(TorchPolicy.empty(read_geometry(file, str(file))))

    def worker(self, name: str, engine: InProcessEngine | None = None) -> Worker:
        return Worker(Role("rollout", name, self.config, self.inputs), engine or self.engine())

    def run(self, worker: Worker, until: Callable[[], bool], each: Callable[[], None] = lambda: None) -> None:
        """Run a worker until something is so, then have it leave."""

        async def watch() -> None:
            end = asyncio.get_running_loop().time() + LIMIT_S
            while not until():
                each()
                assert asyncio.get_running_loop().time() < end, "it did not come to that"
                await asyncio.sleep(0.005)
            worker.role.leaving = True

        async def both() -> None:
            watching = asyncio.create_task(watch())
            try:
                await worker.run()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

        with pytest.raises(ToldToLeave):
            asyncio.run(both())

    def handed_in(self) -> list[Group]:
        return [item.group for item in self.experience.deliver("reward", 100)]

    def close(self) -> None:
        self.broadcast.leaving = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def make_site(make_config: Callable[..., RunConfig], redis_server: RedisServer) -> Iterator[Callable[..., Site]]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    sites = []

    def make(**rollout: Any) -> Site:
        config = make_config(
            model={"hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 32, "context_length": 512},
            rollout={"group_size": 4, "groups_per_call": 2, "max_new_tokens": TOKENS, "lease_s": 30, **rollout},
        )
        sites.append(Site(config, redis_server.url))
        return sites[-1]

    yield make
    for site in sites:
        site.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def balanced(site: Site) -> bool:
    return audit(site.experience, site.layout).findings == []


def test_what_a_leaving_worker_had_is_continued_by_another(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.publish(0)
    first = site.worker("rollout-1")
    site.run(first, lambda: any(work.tokens > 200 for work in first.work.values()))
    left = {work.ticket.group: work.samples() for work in first.work.values()}
    assert left and all(0 < len(sample.token_ids) < TOKENS for samples in left.values() for sample in samples)
    assert not site.handed_in() and balanced(site)

    second = site.worker("rollout-2")
    site.run(second, lambda: site.experience.counters().get("generated", 0) >= 2)
    for group in site.handed_in():
        for sample, begun in zip(group.samples, left[group.id], strict=True):
            count = len(begun.token_ids)
            assert len(sample.token_ids) == TOKENS and sample.finish == "length"
            assert sample.token_ids[:count].tolist() == begun.token_ids.tolist()
            assert np.array_equal(sample.behaviour_logprobs[:count], begun.behaviour_logprobs)
            assert [tuple(span) for span in sample.spans] == [(0, 0, TOKENS)]
    assert balanced(site) and site.experience.redis.hlen(site.experience.key("partials")) == len(second.work)


def test_a_partial_of_an_older_version_is_continued_and_kept(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.publish(0)
    first = site.worker("rollout-1")
    site.run(first, lambda: any(work.tokens > 200 for work in first.work.values()))
    begun = {work.ticket.group: work.samples() for work in first.work.values()}
    site.publish(1)
    # Until broadcast has checked it, a worker that begins still gets the version before.
    wait_for("version 1", 30, lambda: site.experience.target() == site.experience.announced())
    second = site.worker("rollout-2")
    site.run(second, lambda: site.experience.counters().get("generated", 0) >= 2)
    assert second.updates.proven == {1}
    groups = [group for group in site.handed_in() if group.id in begun]
    assert groups
    for group in groups:
        for sample, earlier in zip(group.samples, begun[group.id], strict=True):
            count = len(earlier.token_ids)
            assert [tuple(span) for span in sample.spans] == [(0, 0, count), (1, count, TOKENS)]
            assert sample.token_ids[:count].tolist() == earlier.token_ids.tolist()


def test_a_report_of_an_earlier_process_proves_nothing(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.publish(0)
    target = Target(0, site.weights.manifest(0).digest)
    worker = site.worker("rollout-1", site.engine(Scrambled))
    stale = threading.Event()

    def report_as_the_dead_did() -> None:
        if not stale.is_set() and site.experience.target() == target:
            stale.set()
            for _ in range(20):
                site.experience.report("rollout-1", target, 0.1)

    with pytest.raises(Failure, match="quarantined: rollout-1 holds version 0"):
        site.run(worker, lambda: False, report_as_the_dead_did)
    assert stale.is_set() and not site.handed_in()


@pytest.mark.parametrize("update", ["in_place", "retract", "abort"])
def test_running_generations_go_on_with_new_weights(update: str, make_site: Callable[..., Site]) -> None:
    site = make_site(update=update)
    site.publish(0)
    worker = site.worker("rollout-1")

    def publish_when_under_way() -> None:
        if site.experience.announced() == Target(0, site.weights.manifest(0).digest) and any(
            work.tokens > 100 for work in worker.work.values()
        ):
            site.publish(1)

    site.run(worker, lambda: site.experience.counters().get("generated", 0) >= 2, publish_when_under_way)
    groups = site.handed_in()
    assert groups and worker.updates.proven == {0, 1}
    for sample in (sample for group in groups[:2] for sample in group.samples):
        assert [span.version for span in sample.spans] == [0, 1]
        assert sample.spans[0].end == sample.spans[1].start and sample.spans[1].end == TOKENS
    assert balanced(site)


class Deaf(InProcessEngine):
    """Says that it loaded, and did not."""

    async def load(self, target: Target, source: Pull | Collective, mode: UpdateMode) -> None:
        tensors = {name: tensor.clone() for name, tensor in self.policy.tensors.items()}
        await super().load(target, source, mode)
        if target.version:
            self.policy.load(tensors, "memory")


class Scrambled(InProcessEngine):
    """Holds something else than it was given, from the first version on."""

    async def load(self, target: Target, source: Pull | Collective, mode: UpdateMode) -> None:
        await super().load(target, source, mode)
        next(iter(self.policy.tensors.values())).add_(1.0)
        await asyncio.sleep(0.5)  # so that reports of others come first


def test_an_engine_with_other_weights_than_it_says_serves_nothing(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.publish(0)
    worker = site.worker("rollout-1", site.engine(Deaf))

    def publish_when_under_way() -> None:
        if worker.work and site.experience.announced() == Target(0, site.weights.manifest(0).digest):
            site.publish(1)

    with pytest.raises(Failure, match=r"quarantined: rollout-1 holds version 1 with digest .*, published is"):
        site.run(worker, lambda: False, publish_when_under_way)
    assert site.experience.verified("rollout-1") is None
    assert all(span.version == 0 for group in site.handed_in() for one in group.samples for span in one.spans)
    assert balanced(site)


class Frail(InProcessEngine):
    """Breaks once, in the middle."""

    opened = 0

    async def open(self) -> None:
        self.opened += 1
        await self.resume()

    async def generate(self, request: Request) -> AsyncIterator[list[Completion]]:
        async for completions in super().generate(request):
            yield completions
            if self.opened == 1 and len(completions[0].tokens) > 50:
                raise EngineBroken("it broke")


class Meddled(Frail):
    """Somebody else pauses it once."""

    async def generate(self, request: Request) -> AsyncIterator[list[Completion]]:
        async for completions in InProcessEngine.generate(self, request):
            yield completions
            if self.opened == 1 and len(completions[0].tokens) > 50:
                self._going.clear()

    async def health(self) -> Health:
        return Health(State.READY if self._going.is_set() else State.PAUSED)


class Slow(InProcessEngine):
    """Loads for as long as it is let."""

    async def load(self, target: Target, source: Pull | Collective, mode: UpdateMode) -> None:
        if target.version:
            await asyncio.sleep(3600)
        await super().load(target, source, mode)


def test_a_worker_that_loads_leaves_when_it_is_told(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.publish(0)
    worker = site.worker("rollout-1", site.engine(Slow))

    def publish_when_under_way() -> None:
        under_way = any(work.tokens > 100 for work in worker.work.values())
        if under_way and site.experience.announced() == Target(0, site.weights.manifest(0).digest):
            site.publish(1)

    site.run(worker, lambda: worker.updates.held is None and bool(worker.updates.proven), publish_when_under_way)
    assert site.experience.redis.hlen(site.experience.key("partials")) > 0 and balanced(site)


@pytest.mark.parametrize("kind", [Frail, Meddled])
def test_an_engine_that_breaks_is_proven_again_and_its_groups_go_on(
    kind: type[Frail], make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.rollout.worker.HEALTH_S", 0.2)
    site = make_site()
    site.publish(0)
    engine = site.engine(kind)
    assert isinstance(engine, Frail)
    worker = site.worker("rollout-1", engine)
    site.run(worker, lambda: site.experience.counters().get("generated", 0) >= 2)
    assert engine.opened == 2
    assert all(len(sample.token_ids) == TOKENS for group in site.handed_in() for sample in group.samples)
    assert site.experience.counters().get("reclaimed", 0) == 0 and balanced(site)


def test_leases_of_long_generations_are_renewed(make_site: Callable[..., Site]) -> None:
    site = make_site(lease_s=0.9)
    site.publish(0)
    worker = site.worker("rollout-1")
    lapsed: list[bytes] = []

    def held(minimum_ms: int) -> list[bytes]:
        pending = site.experience.redis.xpending_range(
            site.experience.key("tickets"), "rollout", min="-", max="+", count=10, idle=minimum_ms
        )
        return [entry["message_id"] for entry in pending]

    def let_them_lapse_once() -> None:
        if worker.work and not lapsed:
            site.experience.hand_back("rollout-1")
            lapsed.extend(held(900))

    def renewed() -> bool:
        return bool(lapsed) and set(lapsed) <= set(held(0)) - set(held(900))

    site.run(worker, renewed, let_them_lapse_once)
