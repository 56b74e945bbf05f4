"""The staged dataset: train and held-out rows with their manifest, as `data/` of a run's store has them."""

from __future__ import annotations

import io
from typing import Literal, TypedDict

import msgspec
import pyarrow.parquet as pq
import xxhash

from components.stage_data.rows import Row, SourceRow
from components.stage_data.tasks import encode_parquet
from components.storage.store import Store, open_store, split_uri
from configs.failure import BadConfig, BadData
from configs.run import StorageConfig

MANIFEST = "manifest.json"
_HASHES = 2**64


class Manifest(TypedDict):
    """Content of `manifest.json`."""

    digest: str
    """Hexadecimal xxh3_128 of both splits' rows in order; equal for equal rows, whatever file format they came from."""
    source: str
    train_rows: int
    eval_rows: int
    duplicates: int
    """Rows left out because an earlier one has the same prompt."""
    prompt_characters: str
    """All characters of prompts and answers, each once, sorted."""
    max_prompt_characters: int
    max_answer_characters: int


class Splits(msgspec.Struct, frozen=True):
    """A dataset without duplicate prompts, divided."""

    train: list[Row]
    eval: list[Row]
    duplicates: int


def split_rows(rows: list[SourceRow], eval_fraction: float, source: str) -> Splits:
    """Divide rows by a hash of their prompt, so that a prompt stays on its side when others come or go.

    Args:
        rows: Of rows with the same prompt the first is kept.
        eval_fraction: Share of the space of hashes that is held out; the share of the rows is close to it.
        source: URI for the message.

    Returns:
        Both splits, in the order of another hash of the prompt.

    Raises:
        BadConfig: one of the splits would be empty.
    """
    kept: dict[str, Row] = {}
    for each in rows:
        kept.setdefault(each.row.prompt, each.row)
    ordered = sorted(kept.values(), key=lambda row: xxhash.xxh3_128_digest(row.prompt.encode()))
    limit = eval_fraction * _HASHES
    held_out = {row.prompt for row in ordered if xxhash.xxh3_64_intdigest(row.prompt.encode()) < limit}
    splits = Splits(
        [row for row in ordered if row.prompt not in held_out],
        [row for row in ordered if row.prompt in held_out],
        len(rows) - len(kept),
    )
    for name, part, change in (("train", splits.train, "lower"), ("eval", splits.eval, "raise")):
        if not part:
            raise BadConfig(
                f"{source}: none of its {len(kept)} different prompts falls into the {name} split at"
                f" data.eval_fraction {eval_fraction}; {change} data.eval_fraction or give more rows"
            )
    return splits


def write_splits(store: Store, splits: Splits, source: str) -> Manifest:
    """Write `train.parquet`, `eval.parquet` and last `manifest.json`.

    Args:
        store: The run's `data/` folder.
        splits: What to write.
        source: URI they came from.
    """
    both = [*splits.train, *splits.eval]
    manifest = Manifest(
        digest=splits_digest(splits),
        source=source,
        train_rows=len(splits.train),
        eval_rows=len(splits.eval),
        duplicates=splits.duplicates,
        prompt_characters="".join(sorted({character for row in both for character in row.prompt + row.answer})),
        max_prompt_characters=max(len(row.prompt) for row in both),
        max_answer_characters=max(len(row.answer) for row in both),
    )
    store.write("train.parquet", encode_parquet(splits.train))
    store.write("eval.parquet", encode_parquet(splits.eval))
    store.write(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return manifest


def splits_digest(splits: Splits) -> str:
    """Digest of the rows themselves."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode((splits.train, splits.eval)))


def read_manifest(manifest_uri: str, settings: StorageConfig) -> Manifest:
    """Read the manifest that stage_data passes on.

    Raises:
        BadData: it is missing or is something else.
    """
    parent, key = split_uri(manifest_uri)
    try:
        return msgspec.json.decode(open_store(parent, settings).read(key), type=Manifest)
    except msgspec.DecodeError as error:
        raise BadData(f"{manifest_uri}: is no manifest of staged data ({error}); stage the data again") from None


def read_split(manifest_uri: str, split: Literal["train", "eval"], settings: StorageConfig) -> list[Row]:
    """Rows of one split, in their fixed order.

    Args:
        manifest_uri: Output `data` of stage_data.
        split: Which.
        settings: How to reach it.

    Raises:
        BadData: a file is missing, or has another number of rows than the manifest says.
    """
    manifest = read_manifest(manifest_uri, settings)
    parent, _ = split_uri(manifest_uri)
    table = pq.ParquetFile(io.BytesIO(open_store(parent, settings).read(f"{split}.parquet"))).read()
    expected = manifest["train_rows"] if split == "train" else manifest["eval_rows"]
    if table.num_rows != expected:
        raise BadData(
            f"{parent}/{split}.parquet: has {table.num_rows} rows, but its manifest says {expected}; stage the data again"
        )
    return [Row(*values) for values in zip(*(table[name].to_pylist() for name in Row.__struct_fields__), strict=True)]
