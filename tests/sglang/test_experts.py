"""Routed experts as the server returns them, also on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from components.rollout.engine import Pull
from components.rollout.sglang_engine import SGLangEngine
from tests.rollout.contract import PROMPT, Subject
from tests.rollout.contract_policy import GEOMETRY, Version


def test_routed_experts_belong_to_the_completion_s_tokens(
    make_engine: Callable[..., SGLangEngine], versions: list[Version]
) -> None:
    subject = Subject(make_engine(routed_experts=True), versions)
    subject.run(subject.engine.open(), 600)
    try:

        async def begin() -> None:
            await subject.engine.load(subject.first.target, Pull(subject.first.folder), "retract")
            await subject.engine.resume()

        subject.run(begin())
        (one,) = subject.run(subject.generate(subject.request(10, 1, greedy=True)))
        (longer,) = subject.run(subject.generate(subject.request(12, 1, greedy=True, begun=[one.until(6)])))
        (given,) = subject.run(subject.generate(subject.request(1, 1, prompt=[*PROMPT, *one.tokens[:9].tolist()])))
    finally:
        subject.stop()
    shape = (GEOMETRY.num_hidden_layers, GEOMETRY.num_experts_per_tok)
    for completion, last in ((one, 10), (longer, 12), (given, 1)):
        experts = completion.routed_experts
        assert experts is not None and experts.dtype == np.int16 and experts.shape == (last, *shape)
        assert (experts[-1] == -1).all()
    assert one.routed_experts is not None and longer.routed_experts is not None
    assert one.routed_experts[:9].min() >= 0 and one.routed_experts.max() < GEOMETRY.num_experts
    # The continuation reads the last of the tokens it was given, so that one place stays open, and agrees on the rest.
    assert longer.tokens[:10].tolist() == one.tokens.tolist()
    assert longer.routed_experts[6:9].tolist() == one.routed_experts[6:9].tolist()
