"""What an engine must report of its weights, against what real SGLang 0.5.23 servers reported of the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from components.weights.proof import Split, difference, engine_checksums
from configs.failure import BadConfig, BadData
from tests.broadcast.tiny_checkpoint import geometry, tensors

GOLDEN = Path(__file__).parent / "golden"
# Recorded on the CPU. SGLang refuses several ranks there, and pads heads that do not divide; both were patched out, so
# that the layout is a GPU's.
SERVERS = {
    "one_rank": (Split(), {}),
    "two_ranks": (Split(2), {}),
    "four_ranks_two_expert_groups": (Split(4, 2), {}),
}


@pytest.mark.parametrize("server", SERVERS)
def test_expects_what_a_server_reported(server: str) -> None:
    split, changes = SERVERS[server]
    shapes = geometry(**changes)
    reported = json.loads((GOLDEN / f"{server}.json").read_text())
    assert engine_checksums(tensors(shapes), shapes, "cpu", split) == reported


@pytest.mark.parametrize("algorithm", ["cpu", "cuda"])
def test_every_element_of_every_tensor_counts(algorithm: str) -> None:
    shapes = geometry()
    held = tensors(shapes)
    before = engine_checksums(held, shapes, algorithm)
    for name, values in held.items():
        for place in (0, -1):
            kept = values.flat[place]
            values.flat[place] += 1e-6
            found = difference(before, engine_checksums(held, shapes, algorithm))
            assert found.startswith("differs in 'model." if name != "lm_head.weight" else "differs in 'lm_head."), name
            values.flat[place] = kept
    assert difference(before, engine_checksums(held, shapes, algorithm)) == ""


def test_ranks_cover_the_whole_model_on_a_gpu_too() -> None:
    shapes = geometry()
    held = tensors(shapes)
    split = Split(4, 2)
    before = engine_checksums(held, shapes, "cuda", split)
    for values in held.values():
        values.flat[values.size // 2] += 1e-6
        after = engine_checksums(held, shapes, "cuda", split)
        assert after != before
        before = after


def test_says_what_a_difference_means() -> None:
    shapes = geometry()
    held = tensors(shapes)
    old = engine_checksums(held, shapes, "cpu")
    new = engine_checksums({name: values + 1 for name, values in held.items()}, shapes, "cpu")
    experts = {name: new[name] for name in new if ".experts." not in name}
    assert "fused names" in difference(new, old | experts)
    head = {name: new[name] for name in new if name != "lm_head.weight"}
    assert "does not tie" in difference(new, old | head)
    assert "another version" in difference(new, old)
    first = next(iter(new))
    assert (
        difference(new, new | {first: old[first]})
        == f"differs in '{first}' of {len(new)}: some arrived and some did not"
    )
    assert "lacks 'lm_head.weight'" in difference(new, {name: new[name] for name in new if name != "lm_head.weight"})
    assert "also holds 'bias'" in difference(new, new | {"bias": "0"})
    assert difference(new, {}) == "reports no checksums"
    assert difference(new, dict(new)) == ""


def test_refuses_a_split_that_does_not_divide_the_model() -> None:
    shapes = geometry()
    for split in (Split(3), Split(8), Split(4, 3), Split(1, 2)):
        with pytest.raises(BadConfig, match="cannot divide"):
            engine_checksums(tensors(shapes), shapes, "cpu", split)


def test_refuses_tensors_of_another_model() -> None:
    shapes = geometry()
    held: dict[str, np.ndarray] = tensors(shapes)
    with pytest.raises(BadData, match="lm_head.weight' is not among"):
        engine_checksums({n: v for n, v in held.items() if n != "lm_head.weight"}, shapes, "cpu")
    with pytest.raises(BadData, match="lm_head.weight' has"):
        engine_checksums(held | {"lm_head.weight": held["lm_head.weight"][1:]}, shapes, "cpu")
