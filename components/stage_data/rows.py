"""Rows of a dataset: read from JSONL or Parquet, every row checked, every mistake told with its place."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from components.storage.progress import transfer_progress
from components.storage.store import as_uri, open_store, split_uri
from configs.failure import BadData
from configs.run import DataConfig, StorageConfig

_PARQUET_MAGIC = b"PAR1"
_BATCH_ROWS = 8192


class Row(msgspec.Struct, frozen=True):
    """A prompt with the reference its completions are verified against."""

    id: str
    prompt: str
    answer: str


class SourceRow(msgspec.Struct, frozen=True):
    """A row and where its source has it."""

    row: Row
    place: str
    """`line 7` of a JSONL file, `row 7` of a Parquet file; both count from 1."""


def read_rows(data: DataConfig, settings: StorageConfig) -> list[SourceRow]:
    """Read a dataset and check each row: fields present, of type string, prompt not empty, ids unique.

    Args:
        data: URI or path of a JSONL or Parquet file, and the names of its fields.
        settings: How to reach it.

    Returns:
        Rows in the order of the file.

    Raises:
        BadData: the file is missing, or something in it cannot be used; the message names the line or row.
        BadConfig: its place cannot be reached.
    """
    uri = as_uri(data.uri)
    parent, key = split_uri(uri)
    store = open_store(parent, settings)
    local = store.local(key)
    if local is not None:
        try:
            if not local.exists():
                raise BadData(f"{uri}: no such file; set data.uri to a JSONL or Parquet file")
            return _checked(local, uri, data)
        except OSError as error:
            raise BadData(f"{uri}: cannot be read ({error.strerror}); check the file and its permissions") from None
    with tempfile.TemporaryDirectory(prefix="tandem-data-") as folder, transfer_progress(f"fetch {key}") as on_bytes:
        copy = Path(folder) / key
        store.download(key, copy, on_bytes)
        return _checked(copy, uri, data)


def _checked(path: Path, uri: str, data: DataConfig) -> list[SourceRow]:
    if path.is_dir():
        raise BadData(f"{uri}: is a folder; set data.uri to one JSONL or Parquet file")
    with path.open("rb") as file:
        magic = file.read(len(_PARQUET_MAGIC))
    if not magic:
        raise BadData(f"{uri}: is empty; give a file with at least one row")
    parquet = magic == _PARQUET_MAGIC or path.suffix == ".parquet"
    records = _parquet_records(path, uri, data) if parquet else _jsonl_records(path, uri)
    rows = [_source_row(record, place, uri, data) for place, record in records]
    if not rows:
        raise BadData(f"{uri}: holds no rows; give a file with at least one")
    return _identified(rows, uri, data)


def _jsonl_records(path: Path, uri: str) -> Iterator[tuple[str, dict[str, object]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise BadData(
                    f"{uri} {place}: is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8"
                ) from None
            if not text.strip():
                continue
            try:
                record = msgspec.json.decode(text)
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    raise BadData(
                        f"{uri} {place}: the file is cut off within this line; fetch it again whole"
                    ) from None
                raise BadData(f"{uri} {place}: is not JSON ({error}); write one JSON object a line") from None
            if not isinstance(record, dict):
                raise BadData(f'{uri} {place}: is no JSON object; write one a line, such as {{"prompt": …}}')
            yield place, record


def _parquet_records(path: Path, uri: str, data: DataConfig) -> Iterator[tuple[str, dict[str, object]]]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise BadData(f"{uri}: is not a whole Parquet file ({_first_line(error)}); write or fetch it again") from None
    with file:
        columns = _checked_columns(file.schema_arrow, uri, data)
        number = 0
        try:
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                for record in batch.to_pylist():
                    number += 1
                    yield f"row {number}", record
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise BadData(
                f"{uri}: cannot be read after row {number} ({_first_line(error)}); write or fetch the file again"
            ) from None


def _checked_columns(schema: pa.Schema, uri: str, data: DataConfig) -> list[str]:
    """The columns to read; other ones may be there."""
    has = ", ".join(schema.names)
    columns = [data.prompt_field, data.answer_field]
    for setting, name in (("data.prompt_field", data.prompt_field), ("data.answer_field", data.answer_field)):
        if schema.names.count(name) > 1:
            raise BadData(f"{uri}: has more than one column '{name}'; keep one")
        if name not in schema.names:
            raise BadData(f"{uri}: has no column '{name}' (it has {has}); set {setting}")
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise BadData(f"{uri}: column '{name}' is {kind}, but must be string; cast it or set {setting}")
    return [*columns, data.id_field] if data.id_field in schema.names else columns


def _source_row(record: dict[str, object], place: str, uri: str, data: DataConfig) -> SourceRow:
    """Check one record; a row without an id gets an empty one for now."""
    texts = {}
    for setting, name in (("data.prompt_field", data.prompt_field), ("data.answer_field", data.answer_field)):
        if name not in record:
            has = ", ".join(record) or "no fields"
            raise BadData(f"{uri} {place}: has no field '{name}' (it has {has}); add it or set {setting}")
        value = record[name]
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            raise BadData(f"{uri} {place}: field '{name}' is {kind}, but must be a string; write it in quotes")
        texts[name] = value
    if not texts[data.prompt_field].strip():
        raise BadData(f"{uri} {place}: field '{data.prompt_field}' is empty; give the row a prompt or drop it")
    return SourceRow(
        Row(_identifier(record, place, uri, data), texts[data.prompt_field], texts[data.answer_field]), place
    )


def _identifier(record: dict[str, object], place: str, uri: str, data: DataConfig) -> str:
    """The id of a record, empty if it has none; an integer has one spelling, so it is taken too."""
    if data.id_field not in record:
        return ""
    value = record[data.id_field]
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise BadData(
            f"{uri} {place}: field '{data.id_field}' must be a string or an integer, and not empty; mend it or set"
            " data.id_field to a name the file does not have"
        )
    return str(value)


def _identified(rows: list[SourceRow], uri: str, data: DataConfig) -> list[SourceRow]:
    """Check that ids are unique, or give each row the digest of its content as id if there are none."""
    without = next((source for source in rows if not source.row.id), None)
    if without is not None:
        with_id = next((source for source in rows if source.row.id), None)
        if with_id is not None:
            raise BadData(
                f"{uri} {without.place}: has no '{data.id_field}', but {with_id.place} has one; give every row one or none"
            )
        return [SourceRow(msgspec.structs.replace(each.row, id=row_digest(each.row)), each.place) for each in rows]
    places: dict[str, str] = {}
    for source in rows:
        earlier = places.setdefault(source.row.id, source.place)
        if earlier != source.place:
            raise BadData(
                f"{uri} {source.place}: has the id '{source.row.id}' that {earlier} has; make the ids unique or set"
                " data.id_field to a name the file does not have"
            )
    return rows


def row_digest(row: Row) -> str:
    """Id of a row that came without one: hexadecimal xxh3_128 of prompt and answer."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode((row.prompt, row.answer)))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
