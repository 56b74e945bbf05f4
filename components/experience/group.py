"""The unit of work: a group, one prompt and its G completions."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "abort"]
"""A completion ended by itself, reached its limit, or was taken from its engine (only in a partial generation)."""


class Span(NamedTuple):
    """Tokens `start` to `end` (exclusive) of a completion were sampled with this weights version."""

    version: int
    start: int
    end: int


class Sample(msgspec.Struct, array_like=True):
    """One completion. Arrays travel as little-endian bytes."""

    tokens: bytes
    """int32 [T]."""
    logprobs: bytes
    """float32 [T]: log-probability of each token under the policy that sampled it (the behaviour policy)."""
    spans: list[Span]
    """Cover the completion without gaps, oldest first."""
    finish: FinishReason
    reward: float | None = None
    routed_experts: bytes | None = None
    """The experts the router chose, when the engine reports them: layers and top-k as int16, then int16 [T, layers, top-k]."""

    @classmethod
    def of(
        cls,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        spans: list[Span] | int,
        finish: FinishReason,
        routed_experts: np.ndarray | None = None,
    ) -> Sample:
        """A completion.

        Args:
            tokens: [T] integers.
            logprobs: [T] floats.
            spans: Which version sampled which tokens; a single number is that of all.
            routed_experts: [T, layers, top-k] integers.
        """
        if isinstance(spans, int):
            spans = [Span(spans, 0, len(tokens))]
        chosen = None
        if routed_experts is not None:
            chosen = np.array(routed_experts.shape[1:], "<i2").tobytes() + routed_experts.astype("<i2").tobytes()
        return cls(tokens.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes(), spans, finish, None, chosen)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [T]."""
        return np.frombuffer(self.tokens, "<i4")

    @property
    def behaviour_logprobs(self) -> np.ndarray:
        """float32 [T]."""
        return np.frombuffer(self.logprobs, "<f4")

    @property
    def experts(self) -> np.ndarray | None:
        """int16 [T, layers, top-k], or None; -1 stands for tokens whose engine did not report."""
        if self.routed_experts is None:
            return None
        values = np.frombuffer(self.routed_experts, "<i2")
        return values[2:].reshape(-1, int(values[0]), int(values[1]))

    @property
    def versions(self) -> np.ndarray:
        """int32 [T]: the weights version each token was sampled with."""
        return np.repeat(
            np.array([span.version for span in self.spans], np.int32), [span.end - span.start for span in self.spans]
        )


class Group(msgspec.Struct, array_like=True):
    """One prompt, its completions, and the id it is counted under for life."""

    id: int
    row: str
    """Id of the dataset row."""
    prompt: bytes
    """int32 [P] token ids."""
    answer: str
    """The reference the verifier compares with."""
    samples: list[Sample]

    @property
    def prompt_ids(self) -> np.ndarray:
        """int32 [P]."""
        return np.frombuffer(self.prompt, "<i4")

    @property
    def oldest_version(self) -> int:
        """The oldest weights version any token was sampled with."""
        return min(span.version for sample in self.samples for span in sample.spans)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the completions, in order; only of a scored group."""
        return [float(sample.reward) for sample in self.samples if sample.reward is not None]


encode_group = msgspec.msgpack.Encoder().encode
decode_group = msgspec.msgpack.Decoder(Group).decode
decode_partial = msgspec.msgpack.Decoder(list[Sample]).decode
