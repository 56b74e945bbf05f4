"""Delta: the elements of a tensor that changed, without loss, for any type of element.

A float read as an integer of its size moves by a few units when training moves it a little, whatever its exponent. So a
delta holds the differences of those integers (modulo the type's range), zigzag-coded to make small ones of either
sign small, their bytes in planes (all lowest bytes, then all next ones, …), every plane as one zstd frame. Where fewer
than half of the elements changed, it holds the differences of those alone and the gaps between them. Nothing here
looks at a value as a float: NaN payloads and the sign of zero pass as they are.

Measured on the policy after real steps of the quickstart (share of the whole tensors' bytes; zstd 1; see
`tandem bench weights`): bfloat16 at a learning rate of 1e-6 changes 2-5 % of the elements: this encoding 0.014-0.024,
xor instead of difference 0.016-0.026, new value instead of difference 0.028-0.049, a bit mask instead of gaps
0.020-0.029, xor of everything 0.027-0.046. float32 changes every element: 0.39-0.41, with xor 0.41-0.45. Level 3
is slower and never smaller by more than 1 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import zstandard

LEVEL = 1
SPARSE = 0.5
"""Share of changed elements from which on the gaps cost more than they save."""
_BLOCK = 1 << 17
"""Elements at a time, so that what is computed in between stays in the cache."""
DIFFERENCE, GAP = "difference", "gap"


class Damaged(ValueError):
    """A delta that cannot be applied; says why."""


def encode(old: np.ndarray, new: np.ndarray) -> dict[str, bytes]:
    """The change of one tensor.

    Args:
        old: Unsigned integers [n].
        new: The same type and length.

    Returns:
        zstd frames by the name of their plane: `difference.0` holds the lowest bytes; `gap.…` is there when only the
        changed elements are. Empty when nothing changed.
    """
    changed = [np.flatnonzero(old[at : at + _BLOCK] != new[at : at + _BLOCK]) for at in range(0, old.size, _BLOCK)]
    count = sum(map(len, changed))
    if count == 0:
        return {}
    if count >= SPARSE * old.size:
        return _frames(DIFFERENCE, _difference_planes(old, new))
    differences = np.empty(count, old.dtype)
    positions = np.empty(count, np.int64)
    done = 0
    for number, indices in enumerate(changed):
        at, end = number * _BLOCK, done + len(indices)
        block = slice(at, at + _BLOCK)
        differences[done:end] = _difference(old[block][indices], new[block][indices])
        positions[done:end] = indices
        positions[done:end] += at
        done = end
    gaps = np.diff(positions, prepend=-1) - 1
    narrow = gaps.astype(np.min_scalar_type(int(gaps.max())))
    return _frames(GAP, _planes(narrow)) | _frames(DIFFERENCE, _planes(differences))


def apply(old: np.ndarray, frames: Mapping[str, np.ndarray | bytes]) -> np.ndarray:
    """The tensor after a change.

    Args:
        old: Unsigned integers [n]; not written to.
        frames: What `encode` made; without any, nothing changed.

    Raises:
        Damaged: they are not what `encode` made for a tensor of this type and length.
    """
    if not frames:
        return old
    gap_frames = _ordered(frames, GAP)
    if not gap_frames:
        return _add_planes(old, _read(_ordered(frames, DIFFERENCE), old.dtype.itemsize, old.size))
    count = _length(gap_frames[0])
    if not 0 < count <= old.size or len(gap_frames) not in (1, 2, 4, 8):
        raise Damaged("counts more changes than elements")
    gaps = _joined(_read(gap_frames, len(gap_frames), count))
    differences = _joined(_read(_ordered(frames, DIFFERENCE), old.dtype.itemsize, count))
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    # Gaps of eight bytes may wrap around, so the last position alone tells nothing.
    if positions.max() >= old.size or positions.min() < 0:
        raise Damaged("changes an element beyond the tensor's end")
    new = old.copy()
    new[positions] += _unzigzag(differences)
    return new


def _difference(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Zigzag of new - old, modulo the type's range."""
    signed = (new - old).view(f"<i{old.dtype.itemsize}")
    sign = signed >> (8 * old.dtype.itemsize - 1)
    signed <<= 1
    signed ^= sign
    return signed.view(old.dtype)


def _unzigzag(coded: np.ndarray) -> np.ndarray:
    one = coded.dtype.type(1)
    return (coded >> one) ^ (np.zeros((), coded.dtype) - (coded & one))


def _difference_planes(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    planes = np.empty((old.dtype.itemsize, old.size), np.uint8)
    for at in range(0, old.size, _BLOCK):
        block = slice(at, at + _BLOCK)
        planes[:, block] = _difference(old[block], new[block]).view(np.uint8).reshape(-1, old.dtype.itemsize).T
    return planes


def _add_planes(old: np.ndarray, planes: list[np.ndarray]) -> np.ndarray:
    new = np.empty_like(old)
    for at in range(0, old.size, _BLOCK):
        block = slice(at, at + _BLOCK)
        np.add(old[block], _unzigzag(_joined([plane[block] for plane in planes])), out=new[block])
    return new


def _planes(words: np.ndarray) -> np.ndarray:
    """Bytes [size of a word, n], the lowest first."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.dtype.itemsize).T)


def _joined(planes: list[np.ndarray]) -> np.ndarray:
    """Words [n] of planes of bytes."""
    joined = np.empty((len(planes[0]), len(planes)), np.uint8)
    for number, plane in enumerate(planes):
        joined[:, number] = plane
    return joined.reshape(-1).view(f"<u{len(planes)}")


def _frames(kind: str, planes: Iterable[np.ndarray]) -> dict[str, bytes]:
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    return {f"{kind}.{number}": compressor.compress(plane.data) for number, plane in enumerate(planes)}


def _ordered(frames: Mapping[str, np.ndarray | bytes], kind: str) -> list[bytes | memoryview]:
    """The frames of a kind, lowest plane first."""
    found = sorted(name for name in frames if name.partition(".")[0] == kind)
    if found != [f"{kind}.{number}" for number in range(len(found))]:
        raise Damaged(f"lacks a plane of its {kind}s")
    return [frame if isinstance(frame := frames[name], bytes) else frame.data for name in found]


def _read(frames: list[bytes | memoryview], width: int, count: int) -> list[np.ndarray]:
    """Decompressed planes, each [count]."""
    if len(frames) != width:
        raise Damaged(f"has {len(frames)} planes where {width} belong")
    planes, decompressor = [], zstandard.ZstdDecompressor()
    for frame in frames:
        # The length in a damaged frame must not be believed before it is compared.
        if _length(frame) != count:
            raise Damaged("has a frame of another length")
        try:
            planes.append(np.frombuffer(decompressor.decompress(frame), np.uint8))
        except zstandard.ZstdError as error:
            raise Damaged(f"cannot be decompressed ({error})") from None
        if len(planes[-1]) != count:
            raise Damaged("has a frame of another length")
    return planes


def _length(frame: bytes | memoryview) -> int:
    try:
        return zstandard.frame_content_size(frame)
    except zstandard.ZstdError:
        raise Damaged("has a frame that is none of zstd's") from None
