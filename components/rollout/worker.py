"""A rollout worker: leases groups, has its engine generate them, keeps the engine at a proven version, hands in."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from components.experience.experience import Ticket
from components.role import Role
from components.rollout.engine import Completion, Engine, EngineBroken, Request, State
from components.rollout.greedy import GreedyScorer
from components.rollout.prompts import PromptOrder
from components.rollout.updates import Updates, unless_leaving
from components.rollout.work import Work, begun
from components.stage_data.split import read_split
from components.weights.policy import policy_tokenizer
from components.weights.store import open_weights

IDLE_S = 0.01
"""Seconds between looks for work when the staleness bound leaves none."""
HEALTH_S = 5.0
"""Seconds between looks at the engine's health."""
ABORT_S = 5.0
"""Seconds an engine may take to give back what it has when the worker leaves."""


class Worker:
    """One rollout process and its engine.

    Args:
        role: Of this process.
        engine: Generates.
        ranks: Processes of the engine that can take part in a collective transfer; 0 when it always pulls.
    """

    def __init__(self, role: Role, engine: Engine, ranks: int = 0) -> None:
        self.role = role
        self.engine = engine
        # A process of this name that came before is gone, and with it what it held.
        role.experience.hand_back(role.worker)
        self.tokenizer = policy_tokenizer(role.start)
        self.updates = Updates(role, engine, open_weights(role.layout), ranks)
        self.updates.lost()
        self.order = PromptOrder(read_split(role.data, "train", role.config.storage), role.config.seed)
        self.held_out = read_split(role.data, "eval", role.config.storage)[: role.config.evaluate.rows]
        # The first worker also looks how good the policy is by now.
        self.scorer = GreedyScorer(self.tokenizer, role.config) if role.worker == "rollout-0" else None
        self.evaluated = -1
        self.work: dict[int, Work] = {}
        self._leaving = False
        self._generating_since = 0.0

    async def run(self) -> None:
        """Work until told to leave."""
        keeping = asyncio.create_task(self._keep_leases())
        watching = asyncio.create_task(self._watch_engine())
        try:
            await self._open()
            while True:
                self.role.check_leaving()
                try:
                    for task in (keeping, watching):
                        if task.done():
                            task.result()
                    await self._turn()
                except EngineBroken as broken:
                    await self._recover(broken)
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
                    watching = asyncio.create_task(self._watch_engine())
        finally:
            for task in (keeping, watching):
                task.cancel()
            await self._leave()

    async def _turn(self) -> None:
        """One look at everything there is to do."""
        self._collect()
        if not await self.updates.follow(bool(self.work)):
            await asyncio.sleep(IDLE_S)
            return
        await self._evaluate_when_due()
        self._lease()
        tasks = [work.task for work in self.work.values() if work.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(IDLE_S)

    def _lease(self) -> None:
        """Take up as many groups as are free, and let every one that stands still go on."""
        config, held = self.role.config, self.updates.held
        assert held is not None
        free = config.rollout.groups_per_call - len(self.work)
        if free > 0:
            oldest = held.version - config.loop.max_staleness
            for ticket in self.role.experience.lease(self.role.worker, held, free):
                # Its own lapsed ticket may come back to it after a standstill.
                if ticket.group not in self.work:
                    self.work[ticket.group] = self._begin(ticket, oldest)
        for work in self.work.values():
            if work.task is None:
                self._generating_since = self._generating_since or time.time()
                work.task = asyncio.create_task(self._generate(work))

    def _begin(self, ticket: Ticket, oldest: int) -> Work:
        row = self.order.row(ticket.group)
        prompt = self.tokenizer.encode(row.prompt).ids
        rollout = self.role.config.rollout
        return Work(ticket, row, prompt, begun(ticket, rollout.group_size, rollout.max_new_tokens, oldest))

    async def _generate(self, work: Work) -> None:
        """Generate a group to its end, taking up again what an update aborted."""
        config = self.role.config
        while not work.finished and not self._leaving:
            request = work.request(config.rollout.max_new_tokens, config.rollout.temperature, config.seed)
            async for completions in self.engine.generate(request):
                work.completions = completions

    def _collect(self) -> None:
        """Hand in what is finished.

        Raises:
            EngineBroken: the engine failed under a group.
        """
        done = [work for work in self.work.values() if work.task is not None and work.task.done()]
        for work in done:
            if (error := work.task.exception()) is not None:  # type: ignore[union-attr]
                raise error
        finished = self._finished(done)
        if not finished:
            return
        self.role.experience.hand_in([(work.ticket, work.group()) for work in finished])
        end = time.time()
        self.role.emit(
            "span", self.updates.held.version if self.updates.held else None, kind="generate",
            start=self._generating_since or end, end=end, groups=len(finished), tokens=sum(work.made for work in finished),
        )  # fmt: skip
        self._generating_since = end if self.work else 0.0

    def _finished(self, done: list[Work]) -> list[Work]:
        """Take the groups that may be handed in out of the work; one with unproven tokens goes on from before them."""
        finished = []
        for work in done:
            work.task = None
            work.keep_proven(self.updates.proven)
            if work.finished:
                finished.append(self.work.pop(work.ticket.group))
        return finished

    async def _evaluate_when_due(self) -> None:
        """Greedy exact match on the held-out prompts, every so many versions, by the first worker."""
        every, held = self.role.config.evaluate.every, self.updates.held
        if self.scorer is None or held is None or held.version // every == self.evaluated // every:
            return
        # Others need not wait meanwhile for this engine to stand by.
        self.updates.step_aside()
        with self.role.span("evaluate", held.version):
            completions = await self._greedy(self.scorer.prompts(self.held_out))
            scores = await unless_leaving(
                self.role,
                asyncio.to_thread(
                    self.scorer.judge,
                    self.held_out,
                    [completion.tokens.tolist() for completion in completions],
                    [completion.finish or "abort" for completion in completions],
                ),
            )
        self.evaluated = held.version
        self.updates.step_back()
        self.role.emit("evaluation", held.version, exact_match=float(scores.rewards.mean()), rows=len(scores.rewards))

    async def _greedy(self, prompts: Sequence[list[int]]) -> list[Completion]:
        """The likeliest completion of every prompt."""

        async def complete(number: int, prompt: list[int]) -> Completion:
            limit = self.role.config.rollout.max_new_tokens
            # No group has such an id.
            request = Request(-1 - number, prompt, [Completion.empty()], limit, greedy=True)
            return [completions async for completions in self.engine.generate(request)][-1][0]

        asked = (complete(number, prompt) for number, prompt in enumerate(prompts))
        return list(await unless_leaving(self.role, asyncio.gather(*asked)))

    async def _keep_leases(self) -> None:
        """Begin the leases anew before they lapse, also while an update is under way."""
        while True:
            await asyncio.sleep(self.role.config.rollout.lease_s / 3)
            tickets = [work.ticket for work in self.work.values()]
            if not tickets:
                continue
            own = self.role.experience.renew(self.role.worker, tickets)
            for group in [group for group in self.work if group not in own]:
                # This process stood still for so long that another has the group now.
                task = self.work.pop(group).task
                if task is not None:
                    task.cancel()

    async def _watch_engine(self) -> None:
        """Notice an engine that is dead, or that somebody else paused and may have changed.

        Raises:
            EngineBroken: it is.
        """
        while True:
            await asyncio.sleep(HEALTH_S)
            held = self.updates.held
            if held is None:
                continue
            health = await self.engine.health()
            if self.updates.held == held and health.state in (State.BROKEN, State.PAUSED):
                reason = health.sentence or "somebody else paused it"
                raise EngineBroken(f"{self.role.worker}: the engine is {health.state}: {reason}")

    async def _open(self) -> None:
        with self.role.span("open"):
            await unless_leaving(self.role, self.engine.open())

    async def _recover(self, broken: EngineBroken) -> None:
        """Open the engine anew; groups keep the proven tokens they have, and go on once it is proven again."""
        self.role.emit("engine_broken", sentence=broken.sentence)
        self.updates.lost()
        tasks = [work.task for work in self.work.values() if work.task is not None]
        await _cancelled(tasks)
        for work in self.work.values():
            work.task = None
            work.keep_proven(self.updates.proven)
        await self._open()

    async def _leave(self) -> None:
        """Hand back the work, what is there of it included, and end the engine."""
        self._leaving = True
        tasks = [work.task for work in self.work.values() if work.task is not None]
        try:
            if tasks:
                with contextlib.suppress(EngineBroken, TimeoutError):
                    await asyncio.wait_for(self.engine.abort(), ABORT_S)
                    await asyncio.wait(tasks, timeout=ABORT_S)
            self._hand_over()
            await _cancelled(tasks)
        finally:
            await self.engine.close()
            if self.scorer is not None:
                self.scorer.close()

    def _hand_over(self) -> None:
        """Hand in what is finished, keep the rest for another worker."""
        experience = self.role.experience
        self.updates.lost()
        finished = self._finished(list(self.work.values()))
        if finished:
            experience.hand_in([(work.ticket, work.group()) for work in finished])
        experience.keep([(work.ticket, work.samples()) for work in self.work.values() if work.tokens])
        experience.hand_back(self.role.worker)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks; one whose engine does not let go is left to itself."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=ABORT_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # it was seen, and nobody needs to be told once more
