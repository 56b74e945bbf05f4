"""A group on its way through an SGLang server: what has come of its completions, and where it may go on."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np

from components.experience.deliveries import Target
from components.experience.group import FinishReason, Span
from components.rollout.engine import Completion, EngineBroken, Request, extended
from components.rollout.sglang_client import Chunk
from components.rollout.sglang_flags import STREAM_INTERVAL

STREAM_FROM = 2 * STREAM_INTERVAL
"""Tokens up to which a completion is told whole: its partial results would cost more than a crash that loses them."""
FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Part:
    """One completion of a group: the tokens it began with and those that came since."""

    def __init__(self, begun: Completion, budget: int, version: int, ends: frozenset[int]) -> None:
        self.finish: FinishReason | None = None
        self._begun = begun
        self._ends = ends
        self._tokens = np.empty(budget, np.int32)
        self._logprobs = np.empty(budget, np.float32)
        self._have = 0
        self._spans: list[Span] = []
        self._experts: np.ndarray | None = None
        # Until it ends, SGLang does not say which version a token has. It gets the oldest that it can have: the one
        # that was held when the chunk before came.
        self.version = version

    def add(self, chunk: Chunk, version: int, expert_shape: tuple[int, int], labels: set[str]) -> None:
        """Take what a chunk brings.

        Args:
            version: Version that the engine holds now.
            expert_shape: Layers and top-k of the router.
            labels: Labels of the versions that were put into the engine.

        Raises:
            EngineBroken: tokens of a version that this worker did not load, or a failure in the server.
        """
        meta = chunk.meta_info
        new = meta.completion_tokens - self._have
        # The log-probabilities carry the tokens too. Their last `new` entries are right in every mode of streaming;
        # `output_ids` repeats the last token where a waiting request was aborted.
        entries = meta.output_token_logprobs[-new:] if new > 0 else []
        if len(entries) != max(new, 0) or self._have + len(entries) > len(self._tokens):
            raise EngineBroken(f"the server sent {len(entries)} log-probabilities for {new} tokens")
        start, self._have = self._have, self._have + len(entries)
        for position, entry in enumerate(entries, start):
            self._logprobs[position], self._tokens[position] = entry[0], entry[1]
        if entries:
            self._spans = _joined([*self._spans, Span(self.version, start, self._have)])
        self.version = version
        if meta.finish_reason is None:
            return
        status = meta.finish_reason.status_code
        if status is not None or meta.finish_reason.type not in FINISHES:
            raise EngineBroken(
                f"the server gave a completion up: {meta.finish_reason.message or meta.finish_reason.type}"
            )
        if meta.weight_versions is not None:
            told = [(_version_of(one.version, labels), one) for one in meta.weight_versions]
            self._spans = _joined([Span(version, one.start, one.end) for version, one in told])
        else:
            # A server before 0.5.21 tells the last version only; what was noted chunk by chunk stays.
            _version_of(meta.weight_version, labels)
        if meta.routed_experts:
            self._experts = _experts(meta, self._have, expert_shape)
        self.finish = FINISHES[meta.finish_reason.type]
        if self.finish == "abort" and self._have:
            # SGLang samples once more after an abort, and tells of the abort even where that token ends the completion.
            if int(self._tokens[self._have - 1]) in self._ends:
                self.finish = "stop"
            elif self._have == len(self._tokens):
                self.finish = "length"

    def completion(self) -> Completion:
        """As far as it has got."""
        have = self._have
        return extended(
            self._begun, self._tokens[:have], self._logprobs[:have], self._spans, self.finish, self._experts
        )  # fmt: skip


class Flight:
    """A group that a server generates.

    Attributes:
        rids: The server's ids of its running completions.
        changed: Set when there is something new.
        sent: Whether the server has been asked.
        ended: Whether all completions are finished.
        failure: Why it will not go on.
    """

    def __init__(self, request: Request, serial: int, version: int, ends: frozenset[int]) -> None:
        """
        Args:
            version: Version that the engine holds.
            ends: Tokens that end a completion.
        """
        self.request = request
        self.rows = [row for row, one in enumerate(request.begun) if one.finish is None]
        # The closing dot: SGLang aborts every request whose id starts with the one given.
        self.rids = [f"{request.group}-{serial}-{row}." for row in self.rows]
        self.changed = asyncio.Event()
        self.ended = not self.rows
        self.failure: Exception | None = None
        self.sent = False
        self._completions = [msgspec.structs.replace(one) for one in request.begun]
        self._parts = [
            Part(one, request.max_new_tokens - len(one.tokens), version, ends)
            for one in (request.begun[r] for r in self.rows)
        ]

    def holds(self, version: int) -> None:
        """Tell it the version it begins with."""
        for part in self._parts:
            part.version = version

    def body(self, extra_key: str, sampling: dict[str, Any], routed_experts: bool) -> dict[str, Any]:
        """The request to SGLang.

        Args:
            extra_key: Keys and values are shared only between requests of one extra key.
            sampling: Sampling parameters beside those of the request.
        """
        request = self.request
        begun = [request.begun[row].tokens for row in self.rows]
        left = [request.max_new_tokens - len(tokens) for tokens in begun]
        common = {
            "temperature": 0.0 if request.greedy else request.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "stream_interval": STREAM_INTERVAL,
        } | sampling
        inputs: list[Any] = [request.prompt + tokens.tolist() for tokens in begun]
        sampled: list[Any] = [{"max_new_tokens": budget} | common for budget in left]
        rids: list[Any] = list(self.rids)
        if len(rids) == 1:  # SGLang has a shorter way for a single request
            inputs, sampled, rids = inputs[0], sampled[0], rids[0]
        body = {
            "input_ids": inputs,
            "sampling_params": sampled,
            "rid": rids,
            "return_logprob": True,
            "extra_key": extra_key,
            "stream": max(left) > STREAM_FROM,
        }
        return body | ({"return_routed_experts": True} if routed_experts else {})

    def add(self, chunk: Chunk, version: int, expert_shape: tuple[int, int], labels: set[str]) -> None:
        """Take a chunk; raises EngineBroken as `Part.add` does."""
        self._parts[chunk.index].add(chunk, version, expert_shape, labels)
        self.ended = all(part.finish is not None for part in self._parts)
        self.changed.set()

    def abort(self) -> None:
        """End it, where it was not sent yet."""
        for part in self._parts:
            part.finish = part.finish or "abort"
        self.ended = True
        self.changed.set()

    def fail(self, failure: Exception) -> None:
        """End it without a result."""
        if not self.ended and self.failure is None:
            self.failure = failure
        self.changed.set()

    def completions(self) -> list[Completion]:
        """All completions as far as they have got."""
        for row, part in zip(self.rows, self._parts, strict=True):
            self._completions[row] = part.completion()
        return list(self._completions)


class Room:
    """Places for a number of requests, given in the order they are asked for."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Event]] = deque()

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        """Hold `count` places, or all when more are asked than there are."""
        count = min(count, self._places)
        turn = asyncio.Event()
        self._waiting.append((count, turn))
        self._admit()
        try:
            await turn.wait()
            yield
        finally:
            if turn.is_set():
                self._taken -= count
            else:
                self._waiting.remove((count, turn))
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._taken + self._waiting[0][0] <= self._places:
            count, turn = self._waiting.popleft()
            self._taken += count
            turn.set()


def _version_of(label: str, labels: set[str]) -> int:
    target = Target.of(label)
    if target is None or label not in labels:
        raise EngineBroken(f"the server generated with weights '{label}', which this worker did not load: somebody else"
                           " updates it")  # fmt: skip
    return target.version


def _joined(spans: list[Span]) -> list[Span]:
    """Without empty spans, neighbours of one version as one."""
    found: list[Span] = []
    for span in spans:
        if span.end <= span.start:
            continue
        if found and found[-1].version == span.version:
            found[-1] = Span(span.version, found[-1].start, span.end)
        else:
            found.append(span)
    return found


def _experts(meta: Any, have: int, shape: tuple[int, int]) -> np.ndarray:
    """int16 [T, layers, top-k] of the completion's tokens; -1 for the last one, which no forward pass has read."""
    values = np.frombuffer(base64.b64decode(meta.routed_experts), "<i4").reshape(-1, *shape)
    experts = np.full((have, *shape), -1, np.int16)
    # Entry i of the sequence is the routing of its token i; the reply ends before the sequence's last token.
    known = values[meta.prompt_tokens : meta.prompt_tokens + have]
    experts[: len(known)] = known
    return experts
