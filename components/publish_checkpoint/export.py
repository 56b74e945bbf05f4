"""The export: a Hugging Face folder made of a durable checkpoint, proven to compute the same logits."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from components.storage.digest import DIGESTS, digest_file
from components.storage.store import open_store, split_uri
from configs.failure import BadData, Failure
from configs.run import StorageConfig

if TYPE_CHECKING:
    import torch

PROBES = 4
PROBE_TOKENS = 16
CARD = "README.md"


class Export(msgspec.Struct, frozen=True):
    """An export on this machine."""

    folder: Path
    step: int
    """Policy update that made the weights."""
    parameters: int
    weights_bytes: int
    weights_digest: str
    """xxh3_128 of the safetensors file; of a sharded checkpoint, of its files' names and digests."""


def step_of(checkpoint: str) -> int:
    """The policy update in a checkpoint's URI (`…/step-000050`).

    Raises:
        BadData: the URI does not end so.
    """
    found = re.search(r"/step-(\d+)/?$", checkpoint)
    if found is None:
        raise BadData(f"{checkpoint}: names no training step; give a durable checkpoint of a run, …/step-000050")
    return int(found[1])


def export_checkpoint(checkpoint: str, settings: StorageConfig, work: Path) -> Export:
    """Fetch a checkpoint and make the folder that is published: model and tokenizer, no trainer state.

    Args:
        checkpoint: URI of the checkpoint's folder.
        settings: Of the store.
        work: Empty local folder; `checkpoint/` and `export/` appear in it.

    Raises:
        BadData: the checkpoint is absent, damaged or of another architecture.
        Failure: the export does not compute what the checkpoint does.
    """
    step = step_of(checkpoint)
    parent, key = split_uri(checkpoint)
    source, folder = work / "checkpoint", work / "export"
    open_store(parent, settings).download(key, source)
    folder.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in (DIGESTS, CARD):
            shutil.copy2(file, folder / file.name)
    parameters = prove(source, folder)
    weights = sorted(folder.glob("*.safetensors"))
    digests = {file.name: digest_file(file) for file in weights}
    return Export(
        folder=folder,
        step=step,
        parameters=parameters,
        weights_bytes=sum(digest.size for digest in digests.values()),
        weights_digest=_digest({name: digest.xxh3_128 for name, digest in digests.items()}),
    )


def prove(checkpoint: Path, export: Path) -> int:
    """Load the export as its users will and compare it with the checkpoint on probe prompts.

    Returns:
        Parameters of the model.

    Raises:
        Failure: logits or token ids differ.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from components.weights.policy import load_policy, policy_tokenizer

    logging.disable_progress_bar()
    ours = load_policy(checkpoint)
    theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    probes = torch.randint(0, ours.config.vocab_size, (PROBES, PROBE_TOKENS), generator=generator)
    with torch.inference_mode():
        difference = _difference(ours(input_ids=probes).logits, theirs(input_ids=probes).logits)
    if difference != 0.0:
        raise Failure(
            f"the export computes other logits than its checkpoint (largest difference {difference:g}"
            f" on {PROBES} probe prompts), so it was not published; compare the two folders' config.json"
        )
    tokenizer = policy_tokenizer(checkpoint)
    text = tokenizer.decode(probes[0].tolist())
    if AutoTokenizer.from_pretrained(export)(text)["input_ids"] != tokenizer.encode(text).ids:
        raise Failure(
            "the export's tokenizer gives other ids than its checkpoint's, so it was not published;"
            " compare tokenizer.json with tokenizer_config.json"
        )
    return sum(parameter.numel() for parameter in theirs.parameters())


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference of two tensors; infinite when shapes differ or a value is not a number."""
    if one.shape != other.shape:
        return float("inf")
    difference = (one - other).abs().max().item()
    return float("inf") if math.isnan(difference) else difference


def _digest(digests: dict[str, str]) -> str:
    if len(digests) == 1:
        return next(iter(digests.values()))
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(digests, order="sorted"))
