"""What every engine has to do, as test functions over a fixture `subject`; collected beside each engine's own tests.

    from tests.rollout.contract import *  # noqa: F403

A subject's engine is open, holds version 1 and is resumed when a test begins, and is brought back to that by `reset`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from components.rollout.engine import Completion, Engine, Pull, Request, State, UpdateMode
from configs.failure import BadData, Failure
from tests.rollout.contract_policy import LAST, VOCAB, Version

MODES: tuple[UpdateMode, ...] = ("in_place", "retract", "abort")
PROMPT = [1, 7, 12, 5, 20, 9]
LONG = 300
"""Tokens that take long enough for something to happen meanwhile."""
GAP = 1e-5
"""Largest difference of a log-probability from the project's own forward pass, in float32."""

T = TypeVar("T")


class Subject:
    """An engine under test, its event loop, and the versions it can load."""

    def __init__(self, engine: Engine, versions: list[Version]) -> None:
        self.engine = engine
        self.first, self.second, self.third = versions
        self._runner = asyncio.Runner()
        self._groups = 0

    def run(self, work: Coroutine[Any, Any, T], limit_s: float = 120.0) -> T:
        """Run a coroutine in the engine's loop."""
        return self._runner.run(asyncio.wait_for(work, limit_s))

    def stop(self) -> None:
        """Close the engine and its loop."""
        self.run(self.engine.close())
        self._runner.close()

    async def reset(self) -> None:
        """Bring the engine to version 1, going."""
        await self.engine.pause("abort")
        await self.engine.load(self.first.target, Pull(self.first.folder), "abort")
        await self.engine.resume()

    async def update(self, version: Version, mode: UpdateMode) -> None:
        """Load a version as a worker does."""
        await self.engine.pause(mode)
        await self.engine.load(version.target, Pull(version.folder), mode)
        await self.engine.resume()

    def request(self, tokens: int, size: int = 2, prompt: list[int] | None = None, **more: Any) -> Request:
        """A new group."""
        self._groups += 1
        begun = more.pop("begun", [Completion.empty() for _ in range(size)])
        return Request(self._groups, prompt or PROMPT, begun, tokens, **more)

    async def generate(self, request: Request) -> list[Completion]:
        """A group's completions at the end."""
        return [found async for found in self.engine.generate(request)][-1]


class Running:
    """A group in generation, with what it yielded so far."""

    def __init__(self, subject: Subject, request: Request) -> None:
        self.seen: list[list[Completion]] = []
        self._begun = asyncio.Event()
        self.task = asyncio.create_task(self._follow(subject, request))

    async def _follow(self, subject: Subject, request: Request) -> list[Completion]:
        async for found in subject.engine.generate(request):
            self.seen.append(found)
            if all(len(one.tokens) for one in found):
                self._begun.set()
        return self.seen[-1]

    async def begun(self) -> None:
        """Until every completion has a token."""
        waiting = asyncio.create_task(self._begun.wait())
        await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert self._begun.is_set(), "the group ended before it was seen to run"


@pytest.fixture(autouse=True)
def version_one(subject: Subject) -> None:
    subject.run(subject.reset())


def spans_cover(completion: Completion) -> bool:
    """Whether the spans follow one another from the first token to the last, and no two neighbours are of one version."""
    ends = [0, *(span.end for span in completion.spans)]
    starts = [*(span.start for span in completion.spans), len(completion.tokens)]
    versions = [span.version for span in completion.spans]
    return starts == ends and all(a != b for a, b in zip(versions, versions[1:], strict=False))


@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_a_group_has_the_log_probabilities_of_its_policy(subject: Subject, temperature: float) -> None:
    completions = subject.run(subject.generate(subject.request(24, 4, temperature=temperature)))
    assert len(completions) == 4
    for one in completions:
        assert one.tokens.dtype == np.int32 and one.logprobs.dtype == np.float32
        assert len(one.tokens) == 24 and one.finish == "length"
        assert [(span.version, span.start, span.end) for span in one.spans] == [(1, 0, 24)]
        assert np.abs(one.logprobs - subject.first.logprobs(PROMPT, one.tokens, temperature)).max() < GAP
    assert len({tuple(one.tokens.tolist()) for one in completions}) > 1


def test_greedy_takes_the_likeliest_token(subject: Subject) -> None:
    one, other = subject.run(subject.generate(subject.request(12, 2, greedy=True)))
    assert one.tokens.tolist() == other.tokens.tolist()
    assert np.abs(one.logprobs - subject.first.logprobs(PROMPT, one.tokens)).max() < GAP
    for position in (0, 5, 11):
        held = one.tokens[:position]
        others = [subject.first.logprobs(PROMPT, np.append(held, token))[-1] for token in range(VOCAB)]
        assert int(np.argmax(others)) == one.tokens[position]


def test_greedy_and_sampled_groups_that_are_asked_together_keep_apart(subject: Subject) -> None:
    async def story() -> list[list[Completion]]:
        sampled = subject.request(24, size=8)
        asked = [sampled, subject.request(24, greedy=True), subject.request(24, size=8, temperature=0.7)]
        return list(await asyncio.gather(*(subject.generate(request) for request in asked)))

    sampled, greedy, cooler = subject.run(story())
    assert len({tuple(one.tokens) for one in greedy}) == 1
    assert len({tuple(one.tokens) for one in sampled}) > 1
    for one, temperature in [*((one, 1.0) for one in sampled), *((one, 0.7) for one in cooler)]:
        assert np.abs(one.logprobs - subject.first.logprobs(PROMPT, one.tokens, temperature)).max() < GAP


def test_a_completion_ends_with_the_end_of_sequence(subject: Subject) -> None:
    completions = subject.run(subject.generate(subject.request(8, 3, prompt=[*PROMPT, LAST])))
    assert [(len(one.tokens), one.finish) for one in completions] == [(1, "stop")] * 3


def test_begun_completions_go_on_and_finished_ones_stay(subject: Subject) -> None:
    async def story() -> tuple[list[Completion], list[Completion]]:
        before = await subject.generate(subject.request(10, 3))
        await subject.update(subject.second, "retract")
        begun = [before[0].until(6), before[1].until(0), before[2]]
        return before, await subject.generate(subject.request(20, begun=begun))

    before, (continued, begun_anew, left) = subject.run(story())
    assert continued.tokens[:6].tolist() == before[0].tokens[:6].tolist()
    assert [tuple(span) for span in continued.spans] == [(1, 0, 6), (2, 6, 20)]
    assert continued.finish == begun_anew.finish == "length"
    assert len(continued.tokens) == len(begun_anew.tokens) == 20
    assert left.tokens.tolist() == before[2].tokens.tolist() and left.spans == before[2].spans
    wanted = subject.second.logprobs(PROMPT, continued.tokens)
    assert np.abs(continued.logprobs - wanted)[6:].max() < GAP
    assert continued.logprobs[:6].tolist() == before[0].logprobs[:6].tolist()


@pytest.mark.parametrize("token", (VOCAB, -1))
def test_a_token_outside_the_vocabulary_is_refused_and_the_engine_goes_on(subject: Subject, token: int) -> None:
    with pytest.raises(BadData, match="outside"):
        subject.run(subject.generate(subject.request(4, prompt=[3, token, 4])))
    assert len(subject.run(subject.generate(subject.request(4)))) == 2


def test_a_sequence_may_fill_the_context_and_not_exceed_it(subject: Subject) -> None:
    prompt = [1 + (n % (VOCAB - 3)) for n in range(508)]
    assert VOCAB - 1 not in prompt
    full = subject.run(subject.generate(subject.request(4, 1, prompt=prompt)))
    assert [(len(one.tokens), one.finish) for one in full] == [(4, "length")]
    with pytest.raises(BadData, match="context"):
        subject.run(subject.generate(subject.request(5, 1, prompt=prompt)))
    assert len(subject.run(subject.generate(subject.request(4)))) == 2


def test_partial_results_grow_into_the_final_one(subject: Subject) -> None:
    async def story() -> list[list[Completion]]:
        return [found async for found in subject.engine.generate(subject.request(LONG))]

    seen = subject.run(story())
    assert len(seen) > 1
    for earlier, later in zip(seen, seen[1:], strict=False):
        for one, more in zip(earlier, later, strict=True):
            count = len(one.tokens)
            assert one.tokens.tolist() == more.tokens[:count].tolist()
            assert one.logprobs.tolist() == more.logprobs[:count].tolist()
    assert all(spans_cover(one) for found in seen for one in found)
    assert all(one.finish == "length" for one in seen[-1])


def test_one_group_is_aborted_and_others_go_on(subject: Subject) -> None:
    async def story() -> tuple[list[Completion], list[Completion]]:
        wanted, other = (Running(subject, request) for request in (subject.request(LONG), subject.request(LONG)))
        await asyncio.gather(wanted.begun(), other.begun())
        await subject.engine.abort(subject._groups - 1)
        return await wanted.task, await other.task

    aborted, whole = subject.run(story())
    assert all(one.finish == "abort" and 0 < len(one.tokens) < LONG and spans_cover(one) for one in aborted)
    assert all(one.finish == "length" for one in whole)


def test_all_groups_are_aborted_also_those_that_wait(subject: Subject) -> None:
    async def story() -> list[list[Completion]]:
        running = [Running(subject, subject.request(LONG)) for _ in range(3)]
        await asyncio.gather(*(one.begun() for one in running))
        await subject.engine.pause("retract")
        waiting = Running(subject, subject.request(LONG))
        await asyncio.sleep(0)
        await subject.engine.abort()
        return [await one.task for one in (*running, waiting)]

    found = subject.run(story())
    assert all(one.finish == "abort" and spans_cover(one) for completions in found for one in completions)
    assert all(len(one.tokens) == 0 for one in found[-1])


def test_nothing_is_sampled_while_paused(subject: Subject) -> None:
    async def story() -> tuple[State, int, int, list[Completion]]:
        running = Running(subject, subject.request(LONG))
        await running.begun()
        await subject.engine.pause("in_place")
        state = (await subject.engine.health()).state
        await asyncio.sleep(0.3)  # what was sampled before the pause may still arrive
        before = len(running.seen[-1][0].tokens)
        await asyncio.sleep(0.7)
        after = len(running.seen[-1][0].tokens)
        await subject.engine.resume()
        return state, before, after, await running.task

    state, before, after, completions = subject.run(story())
    assert state == State.PAUSED
    assert before == after < LONG
    assert all(one.finish == "length" for one in completions)


@pytest.mark.parametrize("mode", MODES)
def test_an_update_under_way_leaves_versions_on_the_tokens(subject: Subject, mode: UpdateMode) -> None:
    async def story() -> list[Completion]:
        running = Running(subject, subject.request(LONG))
        await running.begun()
        await subject.update(subject.second, mode)
        return await running.task

    for one in subject.run(story()):
        assert spans_cover(one)
        old = one.spans[0]
        assert old.version == 1
        wanted = subject.first.logprobs(PROMPT, one.tokens[: old.end])
        assert np.abs(one.logprobs[: old.end] - wanted).max() < GAP
        if mode == "abort":
            assert one.finish == "abort" and len(one.spans) == 1
            continue
        assert one.finish == "length" and [span.version for span in one.spans] == [1, 2]
        gap = np.abs(one.logprobs - subject.second.logprobs(PROMPT, one.tokens))[old.end :].max()
        # With its keys and values computed anew it is the new policy; with the old ones it is neither.
        assert gap < GAP if mode == "retract" else gap > GAP


@pytest.mark.parametrize("mode", MODES)
def test_a_new_prompt_sees_nothing_of_older_weights(subject: Subject, mode: UpdateMode) -> None:
    prompt = [1, *range(3, 25)] * 4

    async def story() -> list[Completion]:
        await subject.generate(subject.request(8, prompt=prompt))
        await subject.update(subject.second, mode)
        return await subject.generate(subject.request(8, prompt=prompt))

    for one in subject.run(story()):
        assert np.abs(one.logprobs - subject.second.logprobs(prompt, one.tokens)).max() < GAP


def test_what_it_holds_is_read_from_its_memory(subject: Subject) -> None:
    async def story() -> list[tuple[str, str, dict[str, str]]]:
        found = [await subject.engine.held()]
        await subject.update(subject.second, "retract")
        found.append(await subject.engine.held())
        await subject.update(subject.first, "retract")
        return [*found, await subject.engine.held()]

    first, second, again = subject.run(story())
    assert first == again
    assert (first[0], second[0]) == (subject.first.target.label, subject.second.target.label)
    assert first[1:] != second[1:] and (first[1] or first[2])


def test_health_follows_pause_and_resume(subject: Subject) -> None:
    async def story() -> list[State]:
        states = [(await subject.engine.health()).state]
        for mode in MODES:
            await subject.engine.pause(mode)
            states.append((await subject.engine.health()).state)
            await subject.engine.resume()
            states.append((await subject.engine.health()).state)
        return states

    assert subject.run(story()) == [State.READY, *[State.PAUSED, State.READY] * 3]


def test_a_version_that_cannot_be_read_is_a_failure(subject: Subject, tmp_path: Path) -> None:
    async def story() -> None:
        await subject.engine.pause("retract")
        await subject.engine.load(subject.second.target, Pull(tmp_path / "missing"), "retract")

    try:
        with pytest.raises(Failure):
            subject.run(story())
    finally:
        if subject.run(subject.engine.health()).state == State.BROKEN:
            subject.run(subject.engine.open(), 600)
