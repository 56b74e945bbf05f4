"""A group that a worker has in generation, between its ticket and what is handed in."""

from __future__ import annotations

import asyncio

import numpy as np

from components.experience.experience import Ticket
from components.experience.group import Group, Sample
from components.rollout.engine import Completion, Request
from components.stage_data.rows import Row


class Work:
    """One leased group.

    Attributes:
        completions: As far as they have got.
        task: Generates them; None while nothing does.
    """

    def __init__(self, ticket: Ticket, row: Row, prompt: list[int], completions: list[Completion]) -> None:
        self.ticket = ticket
        self.row = row
        self.prompt = prompt
        self.completions = completions
        self.task: asyncio.Task[None] | None = None
        self._handed_over = self.tokens
        # An earlier worker handed over proven tokens only.
        self._proven = {span.version for completion in completions for span in completion.spans}

    @property
    def tokens(self) -> int:
        """Tokens of all completions."""
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def made(self) -> int:
        """Tokens that this worker's engine made."""
        return self.tokens - self._handed_over

    @property
    def finished(self) -> bool:
        """Whether every completion has ended by itself or reached its limit."""
        return all(completion.finish in ("stop", "length") for completion in self.completions)

    def request(self, max_new_tokens: int, temperature: float, seed: int) -> Request:
        """What an engine is to do for it now: what was aborted goes on."""
        begun = [
            Completion(
                one.tokens, one.logprobs, one.spans, None if one.finish == "abort" else one.finish, one.routed_experts
            )
            for one in self.completions
        ]
        return Request(self.ticket.group, self.prompt, begun, max_new_tokens, temperature, seed=seed)

    def keep_proven(self, proven: set[int]) -> None:
        """Cut away every token from the first that was sampled with a version proven neither here nor where it was begun."""
        for index, completion in enumerate(self.completions):
            unproven = [span.start for span in completion.spans if span.version not in proven | self._proven]
            if unproven:
                self.completions[index] = completion.until(unproven[0])

    def group(self) -> Group:
        """As it is handed in; only when finished."""
        return Group(self.ticket.group, self.row.id, _int32(self.prompt), self.row.answer, self.samples())

    def samples(self) -> list[Sample]:
        """The completions as they travel."""
        return [
            Sample.of(one.tokens, one.logprobs, one.spans, one.finish or "abort", one.routed_experts)
            for one in self.completions
        ]


def begun(ticket: Ticket, group_size: int, max_new_tokens: int, oldest: int) -> list[Completion]:
    """The completions a worker starts with: what an earlier one left, unless that is too old to be trained on.

    Args:
        oldest: Oldest version whose tokens are still of use.
    """
    partial = ticket.partial or []
    if len(partial) != group_size or any(span.version < oldest for sample in partial for span in sample.spans):
        return [Completion.empty() for _ in range(group_size)]
    return [_taken_up(sample, max_new_tokens) for sample in partial]


def _taken_up(sample: Sample, max_new_tokens: int) -> Completion:
    finish = None if sample.finish == "abort" else sample.finish
    taken = Completion(sample.token_ids, sample.behaviour_logprobs, list(sample.spans), finish, sample.experts)
    if len(taken.tokens) < max_new_tokens or (finish is not None and len(taken.tokens) == max_new_tokens):
        return taken
    # The limit was a higher one when it was begun, or it was reached at the very end.
    cut = taken.until(max_new_tokens)
    cut.finish = "length"
    return cut


def _int32(ids: list[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()
