"""A delta gives back every bit, and a damaged one gives back nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from components.weights import delta

WORDS = [np.dtype(f"<u{size}") for size in (1, 2, 4, 8)]


@st.composite
def changes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A tensor's words before and after: any bits, so NaN payloads, infinities and both zeros of every float type."""
    dtype = draw(st.sampled_from(WORDS))
    size = draw(st.integers(0, 400))
    elements = st.integers(0, 2 ** (8 * dtype.itemsize) - 1)
    old = draw(hnp.arrays(dtype, size, elements=elements))
    new = old.copy()
    where = draw(st.sampled_from(["none", "one", "some", "most", "all"]))
    share = {"none": 0.0, "one": 0.0, "some": 0.1, "most": 0.7, "all": 1.0}[where]
    chosen = np.random.default_rng(draw(st.integers(0, 99))).random(size) < share
    if where == "one" and size:
        chosen[draw(st.integers(0, size - 1))] = True
    new[chosen] = draw(hnp.arrays(dtype, int(chosen.sum()), elements=elements))
    return old, new


@settings(max_examples=300, deadline=None)
@given(changes())
def test_applying_gives_back_every_bit(change: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = change
    before = old.copy()
    frames = delta.encode(old, new)
    after = delta.apply(old, frames)
    assert after.dtype == new.dtype and np.array_equal(after, new)
    assert np.array_equal(old, before), "the base was written to"
    assert bool(frames) == (not np.array_equal(old, new))


@pytest.mark.parametrize("share", [0.0001, 0.03, 0.6])
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_tensors_of_many_blocks(dtype: np.dtype, share: float) -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 2**8, 300_001).astype(dtype)
    new = old.copy()
    chosen = random.random(old.size) < share
    new[chosen] += dtype.type(3)
    assert np.array_equal(delta.apply(old, delta.encode(old, new)), new)


def test_floats_with_odd_bits() -> None:
    values = np.array([np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1e-45, 3.4e38], "<f4")
    payload = np.array([0x7FC00001, 0xFFFFFFFF, 0x7F800001], "<u4")
    old = np.concatenate([values.view("<u4"), payload])
    new = np.roll(old, 1)
    assert np.array_equal(delta.apply(old, delta.encode(old, new)), new)


def test_small_steps_of_few_elements_are_small() -> None:
    """Elements that move by a unit or two, 3 in 100 of them, cost far less than their bytes."""
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, 100_000).astype("<u2")
    new = old.copy()
    chosen = random.random(old.size) < 0.03
    new[chosen] += random.choice(np.array([1, 2, 65535, 65534], "<u2"), int(chosen.sum()))
    assert sum(map(len, delta.encode(old, new).values())) < 0.03 * old.nbytes


def damaged(frames: dict[str, bytes]) -> list[dict[str, bytes]]:
    """The same change, damaged in many ways."""
    ways: list[dict[str, bytes]] = []
    for name, frame in frames.items():
        ways.append({other: content for other, content in frames.items() if other != name})
        ways += [{**frames, name: frame[:end]} for end in (0, 1, len(frame) // 2, len(frame) - 1)]
        ways.append({**frames, name: b"\0" * len(frame)})
        ways.append({**frames, "difference.7": frame})
    return ways


@pytest.mark.parametrize("share", [0.05, 0.9])
def test_damage_is_refused_or_at_least_stays_within_the_tensor(share: float) -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 2**32, 5_000, dtype="<u4")
    new = old.copy()
    chosen = random.random(old.size) < share
    new[chosen] += np.uint32(1)
    frames = delta.encode(old, new)
    for way in damaged(frames):
        if not way:
            continue
        with pytest.raises(delta.Damaged):
            delta.apply(old, way)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flipped_bits_raise_nothing_but_damaged(data: st.DataObject) -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, 3_000).astype("<u2")
    new = old.copy()
    new[random.random(old.size) < data.draw(st.sampled_from([0.01, 0.9]))] += np.uint16(1)
    frames = delta.encode(old, new)
    name = data.draw(st.sampled_from(sorted(frames)))
    frame = bytearray(frames[name])
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert delta.apply(old, {**frames, name: bytes(frame)}).shape == old.shape
    except delta.Damaged as error:
        assert str(error)


def test_a_frame_that_claims_to_be_huge_is_not_believed() -> None:
    """2^60 bytes must not be asked of the system."""
    old = np.arange(100, dtype="<u2")
    header = b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + (2**60).to_bytes(8, "little") + b"\x01\0\0"
    with pytest.raises(delta.Damaged, match="another length"):
        delta.apply(old, {"difference.0": header, "difference.1": header})
    with pytest.raises(delta.Damaged, match="more changes than elements"):
        delta.apply(old, {"gap.0": header, "difference.0": header, "difference.1": header})
