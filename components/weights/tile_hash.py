"""The hash that SGLang takes of a tensor in a GPU's memory, computed from its bytes with numpy.

The kernel is `gpu_tensor_hash` of SGLang 0.5.23 (sglang/kernels/ops/memory/gpu_tensor_hash.py): every word is mixed with
its position, the mixed words of a tile are summed, and so are the tiles.
"""

from __future__ import annotations

import numpy as np

TILE = 8192
"""Words (of 32 bits) of a tile."""
TILES = 8
"""Tiles that are hashed at a time: more no longer stay in a core's cache."""
SEED = 0x243F6A88
POSITION_MULTIPLIERS = (0x27D4EB2D, 0x165667B1)
POSITION_ROTATIONS = (15, 13)
MIX_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
SEEDS = (SEED, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
WORD = 0xFFFFFFFF
LONG = 0xFFFFFFFFFFFFFFFF


class TileHash:
    """Hashes one tensor that arrives in parts; like the hashes of `hashlib`."""

    def __init__(self, size: int) -> None:
        """
        Args:
            size: Bytes that will come in all; the hash depends on it.
        """
        self._size_bytes = np.uint32(-(-size // 4) * 4 & WORD)
        self._empty = size == 0
        self._held = np.zeros(TILES * TILE * 4, np.uint8)
        self._filled = 0
        self._words = 0
        self._sum = 0
        words = TILES * TILE
        self._scratch = tuple(np.empty(words, np.uint32) for _ in range(3))

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take the next bytes."""
        rest = np.frombuffer(data, np.uint8)
        while rest.size:
            part = rest[: self._held.size - self._filled]
            self._held[self._filled : self._filled + part.size] = part
            self._filled += part.size
            rest = rest[part.size :]
            if self._filled == self._held.size:
                self._flush()

    def hexdigest(self) -> str:
        """The hash as 16 hexadecimal digits, once all bytes came."""
        if self._empty:
            return f"{0:016x}"
        self._held[self._filled :] = 0
        self._flush()
        mixed = self._sum
        for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            mixed = (mixed ^ mixed >> shift) * multiplier & LONG
        return f"{mixed:016x}"

    def _flush(self) -> None:
        """Hash what is held: whole tiles, or the tensor's end."""
        words = self._held[: -(-self._filled // 4) * 4].view("<u4")
        if not words.size:
            return
        starts = np.arange(0, words.size, TILE)
        halves = [
            _mix(np.add.reduceat(self._mixed(words, half), starts, dtype=np.uint32) ^ self._size_bytes)
            for half in (0, 1)
        ]
        tiles = halves[0].astype(np.uint64) << np.uint64(32) | halves[1]
        self._sum = (self._sum + int(np.add.reduce(tiles, dtype=np.uint64))) & LONG
        self._words += words.size
        self._filled = 0

    def _mixed(self, words: np.ndarray, half: int) -> np.ndarray:
        """Every word mixed with its position, for one half of the hash."""
        position, value, spare = (buffer[: words.size] for buffer in self._scratch)
        rotation = POSITION_ROTATIONS[half]
        position[:] = np.arange(self._words, self._words + words.size, dtype=np.int64)
        np.multiply(position, np.uint32(POSITION_MULTIPLIERS[half]), out=value)
        np.add(value, np.uint32(SEEDS[half]), out=value)
        np.left_shift(position, np.uint32(rotation), out=spare)
        np.bitwise_xor(value, spare, out=value)
        # The rotation's two parts share no bit: exclusive or adds them one after the other.
        np.right_shift(position, np.uint32(32 - rotation), out=spare)
        np.bitwise_xor(value, spare, out=value)
        np.bitwise_xor(value, words, out=value)
        return _mix(value, spare)


def _mix(value: np.ndarray, spare: np.ndarray | None = None) -> np.ndarray:
    """MurmurHash3's finalizer, in place."""
    spare = np.empty_like(value) if spare is None else spare
    for shift, multiplier in ((16, MIX_MULTIPLIERS[0]), (13, MIX_MULTIPLIERS[1]), (16, 0)):
        np.right_shift(value, np.uint32(shift), out=spare)
        np.bitwise_xor(value, spare, out=value)
        if multiplier:
            np.multiply(value, np.uint32(multiplier), out=value)
    return value
