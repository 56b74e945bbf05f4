"""What an engine is to the worker that drives it: groups in, completions with log-probabilities and weight versions out.

One event loop drives an engine; none of its methods may be called from another thread. An engine is paused, loaded,
proven and resumed by its worker; what it generates between `load` and the verdict on `held` is the worker's to refuse.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from components.broadcast.session import Session
from components.experience.deliveries import Target
from components.experience.group import FinishReason, Span
from configs.failure import Failure

UpdateMode = Literal["in_place", "retract", "abort"]
"""What a pause does to running generations (see `rollout.update`)."""


class EngineBroken(Failure):
    """The engine died, hangs, or is between two versions: it must be opened, loaded and proven again before it serves."""


class State(enum.StrEnum):
    """What an engine is doing."""

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    BROKEN = "broken"


class Health(NamedTuple):
    """An engine's state, and why."""

    state: State
    sentence: str = ""


class Completion(msgspec.Struct):
    """One completion as far as it has got."""

    tokens: np.ndarray
    """int32 [T]."""
    logprobs: np.ndarray
    """float32 [T]: log-probability of each token under the policy that sampled it."""
    spans: list[Span]
    """Cover the tokens without gaps, oldest version first."""
    finish: FinishReason | None = None
    """Why it ended; None while it runs."""
    routed_experts: np.ndarray | None = None
    """int16 [T, layers, top-k]: the router's choices, where the engine reports them; -1 where it did not."""

    @classmethod
    def empty(cls) -> Completion:
        """A completion without tokens yet."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), [])

    def until(self, end: int) -> Completion:
        """The first `end` tokens, as a running completion."""
        experts = None if self.routed_experts is None else self.routed_experts[:end]
        spans = [Span(one.version, one.start, min(one.end, end)) for one in self.spans if one.start < end]
        return Completion(self.tokens[:end], self.logprobs[:end], spans, None, experts)


def extended(
    begun: Completion,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    spans: list[Span],
    finish: FinishReason | None,
    routed_experts: np.ndarray | None = None,
) -> Completion:
    """A completion with the tokens that were sampled after those it had.

    Args:
        tokens: [T] integers.
        logprobs: [T] floats.
        spans: Cover the T new tokens, counted from 0.
        routed_experts: int16 [T, layers, top-k] of the new tokens.
    """
    have = len(begun.tokens)
    joined = [Span(span.version, span.start + have, span.end + have) for span in spans]
    if begun.spans and joined and begun.spans[-1].version == joined[0].version:
        joined[0] = Span(joined[0].version, begun.spans[-1].start, joined[0].end)
    kept = begun.spans[:-1] if len(joined) and begun.spans and joined[0].start < have else begun.spans
    experts = routed_experts
    if routed_experts is not None and have:
        earlier = begun.routed_experts
        blank = np.full((have, *routed_experts.shape[1:]), -1, np.int16)
        experts = np.concatenate([blank if earlier is None else earlier, routed_experts])
    return Completion(
        np.concatenate([begun.tokens, tokens]).astype(np.int32),
        np.concatenate([begun.logprobs, logprobs]).astype(np.float32),
        [*kept, *joined],
        finish,
        experts,
    )


class Request(msgspec.Struct, frozen=True):
    """A group to generate."""

    group: int
    """Id of the group."""
    prompt: list[int]
    """Token ids [P]."""
    begun: list[Completion]
    """One entry a completion (G): empty to begin it, with tokens to continue it, finished to leave it as it is."""
    max_new_tokens: int
    """Tokens a completion may have, those of `begun` included."""
    temperature: float = 1.0
    greedy: bool = False
    seed: int = 0
    """Seed of the sampling, for engines that can repeat it."""


class Pull(NamedTuple):
    """Read a version from a Hugging Face folder of this machine."""

    folder: Path


class Collective(NamedTuple):
    """Receive a version from the process group of `session`."""

    session: Session
    tensors: list[tuple[str, str, list[int]]]
    """Name, torch dtype (such as `float32`) and shape of every tensor, in the order they are sent."""


class Held(NamedTuple):
    """What an engine says of the weights in its memory."""

    label: str
    """The engine's own label of the version, as `load` gave it (`Target.label`)."""
    digest: str = ""
    """The manifest's digest computed over its memory, where that has the checkpoint's layout."""
    checksums: dict[str, str] = {}
    """Otherwise its checksum of every parameter (components/weights/proof.py computes what they should be)."""


class Engine(Protocol):
    """Generates with one copy of the policy.

    Any method may raise `EngineBroken`; `open` then makes it serviceable again (paused, holding nothing proven).
    """

    async def open(self) -> None:
        """Start or join what generates, and wait until it can be loaded.

        Raises:
            Failure: it does not start, within its limit and its restarts; the sentence holds its last words.
        """

    async def close(self) -> None:
        """End what `open` started; nothing outlives it."""

    def generate(self, request: Request) -> AsyncIterator[list[Completion]]:
        """Generate a group; yields all its completions as they are so far, the last time with every one finished.

        Aborted ones end with finish `abort` and the tokens they have. The iterator ends after that.

        Raises:
            BadData: the request holds a token outside the vocabulary, or is too long for the context.
        """
        ...

    async def abort(self, group: int | None = None) -> None:
        """End the running completions of one group, or of all, as aborted."""

    async def pause(self, mode: UpdateMode) -> None:
        """Stop sampling. With `abort` running completions end; otherwise they go on after `resume`."""

    async def resume(self) -> None:
        """Go on sampling."""

    async def load(self, target: Target, source: Pull | Collective, mode: UpdateMode) -> None:
        """Put a version into memory; only while paused with that mode.

        Raises:
            EngineBroken: the update did not complete; the memory may hold parts of two versions.
        """

    async def held(self) -> Held:
        """Ask the engine itself what it holds."""
        ...

    async def health(self) -> Health:
        """The engine's state, within a few seconds."""
        ...
