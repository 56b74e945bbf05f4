"""The unit of work: a group, one prompt and its G completions."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "abort"]


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
    """int16 [T, layers, top-k]: the experts the router chose, when the engine reports them."""

    @classmethod
    def of(cls, tokens: np.ndarray, logprobs: np.ndarray, version: int, finish: FinishReason) -> Sample:
        """A completion sampled with one version.

        Args:
            tokens: [T] integers.
            logprobs: [T] floats.
        """
        return cls(
            tokens.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes(), [Span(version, 0, len(tokens))], finish
        )

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [T]."""
        return np.frombuffer(self.tokens, "<i4")

    @property
    def behaviour_logprobs(self) -> np.ndarray:
        """float32 [T]."""
        return np.frombuffer(self.logprobs, "<f4")

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
