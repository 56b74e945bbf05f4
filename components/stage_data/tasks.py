"""Example tasks: small problems with one right answer, written from a seed."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.lib import StringBuilder

from components.stage_data.rows import Row
from components.storage.store import as_uri, open_store, split_uri
from configs.failure import BadConfig
from configs.run import StorageConfig

EXAMPLE = "example:"
"""Prefix of a `data.uri` that names a task instead of a file."""


class Task(msgspec.Struct, frozen=True):
    """A family of prompts numbered from 0, all of the same length."""

    size: int
    """Number of different prompts."""
    row: Callable[[int], tuple[str, str]]
    """Prompt and answer number i."""


def _added(index: int) -> tuple[str, str]:
    a, b = divmod(index, 100)
    return f"{a:02d}+{b:02d}=", f"{a + b:03d}"[::-1]


def _sorted(index: int) -> tuple[str, str]:
    return f">{index:08d}=", "".join(sorted(f"{index:08d}"))


def _reversed(index: int) -> tuple[str, str]:
    return f">{index:08d}=", f"{index:08d}"[::-1]


TASKS = {"add2r": Task(10**4, _added), "sort8": Task(10**8, _sorted), "rev8": Task(10**8, _reversed)}
"""`add2r`: the sum of two two-digit numbers, three digits, last digit first. `sort8`: eight digits in order.
`rev8`: eight digits, last one first."""


def task_rows(name: str, rows: int, seed: int) -> list[Row]:
    """Rows of an example task, all with different prompts, the same for the same arguments.

    Raises:
        BadConfig: no such task, or more rows than it has prompts.
    """
    task = TASKS.get(name)
    if task is None:
        raise BadConfig(f"{EXAMPLE}{name}: no such example task; take one of {', '.join(TASKS)}")
    if not 1 <= rows <= task.size:
        raise BadConfig(
            f"{EXAMPLE}{name}: has {task.size} different prompts, but {rows} rows are asked for; set 1 to"
            f" {task.size} rows"
        )
    numbers = random.Random(seed).sample(range(task.size), rows)
    return [Row(f"{name}-{number:0{len(str(task.size - 1))}d}", *task.row(number)) for number in numbers]


def write_task(name: str, rows: int, seed: int, destination_uri: str, settings: StorageConfig) -> str:
    """Write an example task as a dataset with the columns id, prompt and answer.

    Args:
        name: One of `TASKS`.
        rows: How many.
        seed: Which of the prompts, and in which order.
        destination_uri: Path or URI that ends in `.jsonl` or `.parquet`.
        settings: How to reach it.

    Returns:
        URI of the file.

    Raises:
        BadConfig: the arguments do not fit, or the destination cannot be written.
    """
    written = task_rows(name, rows, seed)
    uri = as_uri(destination_uri)
    parent, key = split_uri(uri)
    if key.endswith(".jsonl"):
        content = b"".join(msgspec.json.encode(row) + b"\n" for row in written)
    elif key.endswith(".parquet"):
        content = encode_parquet(written)
    else:
        raise BadConfig(f"{destination_uri}: ends in neither .jsonl nor .parquet; name the file after its format")
    open_store(parent, settings).write(key, content)
    return uri


def encode_parquet(rows: list[Row]) -> bytes:
    """Parquet with the string columns id, prompt and answer."""
    columns = {}
    for name in Row.__struct_fields__:
        # pa.array would import pandas, which takes longer than staging a small dataset.
        builder = StringBuilder()
        builder.append_values([getattr(row, name) for row in rows])
        columns[name] = builder.finish()
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()
