"""Checks of a Hugging Face checkpoint folder that need no torch: files, tensors, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from components.weights.geometry import Geometry
from configs.failure import BadData

PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
FLOATS = ("F32", "F16", "BF16")


def check_files(names: Iterable[str], uri: str) -> None:
    """Check a folder's listing.

    Args:
        names: Paths of its files, relative to the folder.
        uri: What to call the folder in a message.

    Raises:
        BadData: the folder is empty, holds pickled weights, or lacks a file the loop needs.
    """
    present = sorted(names)
    if not present:
        raise BadData(f"{uri}: holds no files; check the URI")
    for name in present:
        if PurePosixPath(name).suffix in PICKLED:
            raise BadData(f"{uri}/{name}: may hold pickled code, which is never loaded; give safetensors files alone")
    for needed in ("config.json", "tokenizer.json"):
        if needed not in present:
            raise BadData(f"{uri}/{needed}: is missing; give a folder that save_pretrained wrote")
    if not any(name.endswith(".safetensors") for name in present):
        raise BadData(f"{uri}: holds no .safetensors file; give a folder that save_pretrained wrote")


def check_tensors(folder: Path, geometry: Geometry, uri: str) -> int:
    """Compare the headers of the safetensors files with the geometry.

    Returns:
        Parameters in the checkpoint.

    Raises:
        BadData: a file is damaged, or a tensor is missing, surplus, of another shape, or not of floats.
    """
    wanted = dict(geometry.tensors())
    where: dict[str, str] = {}
    parameters = 0
    for file in sorted(folder.glob("*.safetensors")):
        name = f"{uri}/{file.name}"
        try:
            with safe_open(file, framework="numpy") as tensors:
                for tensor in tensors.keys():  # noqa: SIM118 - not a mapping
                    part = tensors.get_slice(tensor)
                    parameters += _check_tensor(tensor, part.get_shape(), part.get_dtype(), wanted, name)
                    if tensor in where:
                        raise BadData(f"{name}: tensor '{tensor}' is also in {where[tensor]}; remove one of the files")
                    where[tensor] = file.name
        except SafetensorError as error:
            raise BadData(f"{name}: is not a whole safetensors file ({error}); fetch it again") from None
    missing = next((tensor for tensor in wanted if tensor not in where), None)
    if missing is not None:
        raise BadData(
            f"{uri}: tensor '{missing}' is in no file, but config.json asks for it; give the whole checkpoint"
        )
    return parameters


def _check_tensor(tensor: str, shape: list[int], dtype: str, wanted: dict[str, list[int]], name: str) -> int:
    if tensor not in wanted:
        raise BadData(
            f"{name}: tensor '{tensor}' is none that config.json asks for; give a checkpoint with its own config"
        )
    if shape != wanted[tensor]:
        raise BadData(
            f"{name}: tensor '{tensor}' has shape {shape}, but config.json makes it {wanted[tensor]};"
            " give a checkpoint with its own config"
        )
    if dtype not in FLOATS:
        raise BadData(f"{name}: tensor '{tensor}' is {dtype}, but the loop trains {', '.join(FLOATS)}; dequantize it")
    size = 1
    for length in shape:
        size *= length
    return size


def check_tokenizer(folder: Path, geometry: Geometry, texts: Sequence[str], limit: int, uri: str) -> int:
    """Check that the tokenizer fits the model and writes the data.

    Args:
        folder: The checkpoint.
        geometry: Bounds the ids.
        texts: Prompts, and each character of the data.
        limit: Tokens a text may have.
        uri: What to call the folder in a message.

    Returns:
        Tokens of the longest text.

    Raises:
        BadData: the file is damaged, ids go past the embeddings, no token ends a completion, or a text has no tokens,
            unknown ones, or too many.
    """
    name = f"{uri}/tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise BadData(f"{name}: cannot be read as a tokenizer ({error}); give the one of the checkpoint") from None
    _check_ids(tokenizer, folder, geometry, name, uri)
    unknown = _unknown_id(tokenizer)
    longest = 0
    for text in texts:
        ids = tokenizer.encode(text).ids
        if unknown in ids or not tokenizer.encode(text, add_special_tokens=False).ids:
            raise BadData(f"{name}: cannot write {_shortened(text)} of the data; use a tokenizer that covers it")
        if len(ids) > limit:
            raise BadData(
                f"{name}: prompt {_shortened(text)} has {len(ids)} tokens, but {limit} fit beside a completion;"
                " raise model.context_length or drop the prompt"
            )
        longest = max(longest, len(ids))
    return longest


def _check_ids(tokenizer: Tokenizer, folder: Path, geometry: Geometry, name: str, uri: str) -> None:
    top = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if top >= geometry.vocab_size:
        raise BadData(
            f"{name}: has token id {top}, but the model embeds {geometry.vocab_size} tokens; give its own tokenizer"
        )
    ends = geometry.eos_ids or _generation_ends(folder)
    if not ends:
        raise BadData(f"{uri}/config.json: names no eos_token_id, so no completion could end; add it")
    if any(tokenizer.id_to_token(end) is None for end in ends):
        raise BadData(f"{uri}/config.json: eos_token_id {ends} is no token of tokenizer.json; give matching files")


def _generation_ends(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.exists() else None
    return [] if ends is None else [ends] if isinstance(ends, int) else ends


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    token = getattr(tokenizer.model, "unk_token", None)
    return tokenizer.token_to_id(token) if token else None


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
