"""What SGLang must report of its memory: the checksums of every parameter, computed from a version's tensors alone.

SGLang 0.5.23 answers `/weights_checker {"action": "checksum"}` with one hash per parameter in memory. There a layer's
query, key and value matrices are one parameter, its experts two, the vocabulary is padded, and every rank of a
tensor-parallel server holds its share. Needs no torch. The layout is that of unquantized weights under the MoE runners
`triton` and `deep_gemm`, and of the CPU without AMX; other runners of SGLang keep the experts in another order.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from components.weights.geometry import Geometry
from components.weights.tile_hash import TileHash
from configs.failure import BadConfig, BadData

Buffer = bytes | bytearray | memoryview | np.ndarray
"""Bytes without a copy."""
Algorithm = Literal["cpu", "cuda"]
"""Where the engine's weights lie: SGLang hashes them with sha256 on a CPU, and with a kernel of its own on a GPU."""

PADDING = 64
"""SGLang pads the vocabulary to a multiple of this."""
BLOCK = 1 << 20
"""Bytes that are copied at a time where a share is no contiguous part of its tensor."""


class Split(NamedTuple):
    """How a server divides the model over its ranks."""

    tensor: int = 1
    """Ranks of the server (`--tp-size`)."""
    expert: int = 1
    """Groups that the experts are divided over (`--ep-size`); within a group every expert is split by its width."""


WHOLE = Split()


class Piece(NamedTuple):
    """A rectangle of a checkpoint tensor, and zero rows after it."""

    tensor: str
    rows: range
    columns: range | None = None
    """None: whole rows."""
    zeros: int = 0


class Hash(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def engine_checksums(
    tensors: Mapping[str, Buffer], geometry: Geometry, algorithm: Algorithm, split: Split = WHOLE
) -> dict[str, str]:
    """The checksums of an engine that holds exactly these weights.

    Args:
        tensors: Raw little-endian bytes of every checkpoint tensor, in the type that the engine serves.
        geometry: Shapes of the model.
        algorithm: How the engine hashes.
        split: Its ranks.

    Returns:
        16 hexadecimal digits for every parameter; its name is preceded by `<rank>/` where there are several ranks.

    Raises:
        BadConfig: the model cannot be divided so.
        BadData: a tensor is missing or has another size than the geometry says.
    """
    arrays = {name: _elements(tensors, name, shape) for name, shape in geometry.tensors()}
    jobs = [
        (f"{rank}/{name}" if split.tensor > 1 else name, pieces)
        for rank in range(split.tensor)
        for name, pieces in parameters(geometry, split, rank)
    ]
    # Both hashes let other threads run.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        hashes = threads.map(lambda job: _checksum(job[1], arrays, algorithm), jobs)
        return dict(zip((name for name, _ in jobs), hashes, strict=True))


def difference(expected: Mapping[str, str], held: Mapping[str, str]) -> str:
    """What an engine's checksums say of its weights; empty if they are those expected.

    Args:
        expected: From `engine_checksums`.
        held: What the engine reported.
    """
    if not held:
        return "reports no checksums"
    for verb, names in (
        ("lacks", [name for name in expected if name not in held]),
        ("also holds", [name for name in held if name not in expected]),
    ):
        if names:
            return f"{verb} {_named(names)}: it serves another model, or is split over its ranks otherwise"
    wrong = [name for name in expected if held[name] != expected[name]]
    if not wrong:
        return ""
    experts = [name for name in expected if ".mlp.experts." in name]
    if wrong == experts:
        why = (
            "all experts and nothing else: they kept their old weights, which happens when they are sent under fused"
            " names (SGLang ignores those and answers success), or its MoE runner keeps experts in another layout"
        )
    elif wrong == [name for name in expected if name.endswith("lm_head.weight")]:
        why = (
            "the head and nothing else: SGLang does not tie the Qwen3-MoE head to the embeddings; give it lm_head.weight"
            " as a tensor of its own"
        )
    elif len(wrong) == len(expected):
        why = "all of them: it holds another version, another type, or hashes otherwise"
    else:
        why = "some arrived and some did not"
    return f"differs in {_named(wrong)} of {len(expected)}: {why}"


def _named(names: list[str]) -> str:
    return f"{len(names)} parameters ('{names[0]}' first)" if len(names) > 1 else f"'{names[0]}'"


def parameters(geometry: Geometry, split: Split, rank: int) -> Iterator[tuple[str, list[Piece]]]:
    """Every parameter in the memory of one rank, as the pieces that follow each other in it.

    Raises:
        BadConfig: the model cannot be divided so.
    """
    _check(geometry, split)
    yield "model.embed_tokens.weight", [_vocabulary("model.embed_tokens.weight", geometry, split, rank)]
    for layer in range(geometry.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield from _attention(f"{prefix}self_attn.", geometry, split, rank)
        yield f"{prefix}mlp.gate.weight", [Piece(f"{prefix}mlp.gate.weight", range(geometry.num_experts))]
        yield from _experts(f"{prefix}mlp.experts.", geometry, split, rank)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", [Piece(f"{prefix}{norm}.weight", range(geometry.hidden_size))]
    yield "model.norm.weight", [Piece("model.norm.weight", range(geometry.hidden_size))]
    # SGLang 0.5.23 does not tie the head: it has to hold the embeddings too, to compute the same.
    head = "model.embed_tokens.weight" if geometry.tie_word_embeddings else "lm_head.weight"
    yield "lm_head.weight", [_vocabulary(head, geometry, split, rank)]


def _attention(prefix: str, geometry: Geometry, split: Split, rank: int) -> Iterator[tuple[str, list[Piece]]]:
    ranks, heads, shared = split.tensor, geometry.num_attention_heads, geometry.num_key_value_heads
    queries = _share(heads * geometry.head_dim, ranks, rank)
    # With more ranks than key-value heads, neighbouring ranks hold the same head.
    keys = _share(shared * geometry.head_dim, min(ranks, shared), rank // max(1, ranks // shared))
    rows = {"q": queries, "k": keys, "v": keys}
    yield f"{prefix}qkv_proj.weight", [Piece(f"{prefix}{part}_proj.weight", share) for part, share in rows.items()]
    yield f"{prefix}o_proj.weight", [Piece(f"{prefix}o_proj.weight", range(geometry.hidden_size), queries)]
    for norm in ("q_norm", "k_norm"):
        yield f"{prefix}{norm}.weight", [Piece(f"{prefix}{norm}.weight", range(geometry.head_dim))]


def _experts(prefix: str, geometry: Geometry, split: Split, rank: int) -> Iterator[tuple[str, list[Piece]]]:
    slices = split.tensor // split.expert
    width = _share(geometry.moe_intermediate_size, slices, rank % slices)
    experts = _share(geometry.num_experts, split.expert, rank // slices)
    yield (
        f"{prefix}w13_weight",
        [Piece(f"{prefix}{expert}.{part}_proj.weight", width) for expert in experts for part in ("gate", "up")],
    )
    yield (
        f"{prefix}w2_weight",
        [Piece(f"{prefix}{expert}.down_proj.weight", range(geometry.hidden_size), width) for expert in experts],
    )


def _vocabulary(tensor: str, geometry: Geometry, split: Split, rank: int) -> Piece:
    multiple = PADDING if -(-geometry.vocab_size // PADDING) * PADDING % split.tensor == 0 else PADDING * split.tensor
    share = _share(-(-geometry.vocab_size // multiple) * multiple, split.tensor, rank)
    rows = range(min(share.start, geometry.vocab_size), min(share.stop, geometry.vocab_size))
    return Piece(tensor, rows, zeros=len(share) - len(rows))


def _share(size: int, parts: int, index: int) -> range:
    return range(size // parts * index, size // parts * (index + 1))


def _check(geometry: Geometry, split: Split) -> None:
    ranks, shared = split.tensor, geometry.num_key_value_heads
    for odd, what in (
        (ranks % split.expert, f"ranks into {split.expert} groups of experts"),
        (geometry.num_attention_heads % ranks, f"{geometry.num_attention_heads} attention heads over the ranks"),
        (shared % ranks and ranks % shared, f"{shared} key-value heads over the ranks"),
        (geometry.num_experts % split.expert, f"{geometry.num_experts} experts over {split.expert} groups"),
        (
            geometry.moe_intermediate_size % max(1, ranks // split.expert),
            f"experts of width {geometry.moe_intermediate_size} over {ranks // split.expert} ranks each",
        ),
    ):
        if odd:
            raise BadConfig(
                f"sglang.tensor_parallel {ranks}: SGLang cannot divide {what}; choose divisors of the model's sizes"
            )


def _elements(tensors: Mapping[str, Buffer], name: str, shape: list[int]) -> np.ndarray:
    """A tensor as whole numbers of its width, [rows, columns] or [elements]."""
    if name not in tensors:
        raise BadData(f"tensor '{name}' is not among the version's; publish every tensor of the checkpoint")
    data = np.frombuffer(tensors[name], np.uint8)
    widths: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
    width = widths.get(data.size // math.prod(shape))
    if width is None or data.size != math.prod(shape) * width.itemsize:
        raise BadData(f"tensor '{name}' has {data.size} bytes, which is no {shape} of 16 or 32 bits an element")
    return data.view(width).reshape(shape)


def _checksum(pieces: list[Piece], arrays: Mapping[str, np.ndarray], algorithm: Algorithm) -> str:
    if algorithm == "cpu":
        running: Hash = hashlib.sha256()
    else:
        running = TileHash(sum(_size(piece, arrays[piece.tensor]) for piece in pieces))
    for piece in pieces:
        for chunk in _chunks(piece, arrays[piece.tensor]):
            running.update(chunk)
    return running.hexdigest()[:16]


def _size(piece: Piece, array: np.ndarray) -> int:
    wide = len(piece.columns) if piece.columns else math.prod(array.shape[1:])
    return (len(piece.rows) + piece.zeros) * wide * array.itemsize


def _chunks(piece: Piece, array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of a piece, at most `BLOCK` of them copied at a time."""
    part = array[piece.rows.start : piece.rows.stop]
    if piece.columns is None:
        yield part.reshape(-1).view(np.uint8).data
    else:
        rows = max(1, BLOCK // (len(piece.columns) * array.itemsize))
        for start in range(0, len(part), rows):
            block = part[start : start + rows, piece.columns.start : piece.columns.stop]
            yield np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
    if piece.zeros:
        yield memoryview(bytes(piece.zeros * math.prod(array.shape[1:]) * array.itemsize))
