"""Datasets that can be read, and every way in which one cannot."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.stage_data.rows import Row, read_rows, row_digest
from components.storage.store import open_store
from configs.failure import BadConfig, BadData
from configs.run import DataConfig, StorageConfig

STORAGE = StorageConfig()
GOOD = '{"id": "a", "prompt": "1+1=", "answer": "2"}\n'


def read(path: Path | str, **fields: Any) -> list[Row]:
    return [each.row for each in read_rows(DataConfig(uri=str(path), **fields), STORAGE)]


def jsonl(folder: Path, content: str | bytes) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parquet(folder: Path, columns: dict[str, list[object]] | pa.Table) -> Path:
    path = folder / "data.parquet"
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path)
    return path


def test_jsonl_is_read_in_order_with_other_fields_and_blank_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path, "\ufeff" + GOOD + "\n" + '{"id": 7, "answer": "é", "prompt": "ü\\n", "more": [1]}')
    assert read(path) == [Row("a", "1+1=", "2"), Row("7", "ü\n", "é")]


def test_parquet_is_read_with_other_string_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": pa.array([1, 2], pa.int32()),
            "prompt": pa.array(["x", "y"], pa.large_string()),
            "answer": pa.array(["s", "s"]).dictionary_encode(),
            "score": [0.5, 1.5],
        }
    )
    assert read(parquet(tmp_path, table)) == [Row("1", "x", "s"), Row("2", "y", "s")]


def test_fields_have_the_names_that_the_configuration_says(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"n": "a", "question": "q", "solution": "s"}\n')
    assert read(path, id_field="n", prompt_field="question", answer_field="solution") == [Row("a", "q", "s")]


def test_a_source_without_ids_gets_the_digest_of_each_row(tmp_path: Path) -> None:
    first, second = read(jsonl(tmp_path, '{"prompt": "p", "answer": "a"}\n{"prompt": "p", "answer": "b"}\n'))
    assert first.id == row_digest(first)
    assert first.id != second.id
    assert read(parquet(tmp_path, {"prompt": ["p"], "answer": ["a"]})) == [first]


BAD_LINES = [
    (
        '{"id": "b", "answer": "2"}\n',
        "line 2: has no field 'prompt' .it has id, answer.; add it or set data.prompt_field",
    ),
    ('{"id": "b", "prompt": "2"}\n', "line 2: has no field 'answer'"),
    ('{"id": "b", "prompt": 5, "answer": "2"}\n', "line 2: field 'prompt' is int, but must be a string"),
    (
        '{"id": "b", "prompt": "p", "answer": 2}\n',
        "line 2: field 'answer' is int, but must be a string; write it in quotes",
    ),
    ('{"id": "b", "prompt": "p", "answer": null}\n', "line 2: field 'answer' is null"),
    ('{"id": "b", "prompt": " \\t", "answer": "2"}\n', "line 2: field 'prompt' is empty"),
    ('{"id": true, "prompt": "p", "answer": "2"}\n', "line 2: field 'id' must be a string or an integer"),
    ('{"id": "", "prompt": "p", "answer": "2"}\n', "line 2: field 'id' must be a string or an integer, and not empty"),
    ('{"id": null, "prompt": "p", "answer": "2"}\n', "line 2: field 'id' must be"),
    ('{"prompt": "p", "answer": "2"}\n', "line 2: has no 'id', but line 1 has one"),
    ('{"id": "a", "prompt": "p", "answer": "2"}\n', "line 2: has the id 'a' that line 1 has"),
    ('{"id": "b", "prompt": "p", "answer": "2"\n', "line 2: is not JSON"),
    ('{"id": "b", "prompt": "p", "ans', "line 2: the file is cut off within this line"),
    ('["p", "2"]\n', "line 2: is no JSON object"),
    ('{"id": "b", "prompt": "\\ud800", "answer": "2"}\n', "line 2: is not JSON"),
    (b'{"id": "b", "prompt": "\xff", "answer": "2"}\n', "line 2: is not UTF-8 .byte 24 of the line."),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_line_is_named_with_the_mend(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = jsonl(tmp_path, GOOD.encode() + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(BadData, match=message) as caught:
        read(path)
    assert str(path.as_uri()) in caught.value.sentence
    assert ";" in caught.value.sentence


def test_duplicate_ids_are_found_far_apart_in_parquet(tmp_path: Path) -> None:
    ids = [str(number) for number in range(10_000)]
    ids[9_999] = "17"
    path = parquet(tmp_path, {"id": ids, "prompt": ids, "answer": ids})
    with pytest.raises(BadData, match="row 10000: has the id '17' that row 18 has"):
        read(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"id": ["a"], "text": ["p"], "answer": ["2"]},
            "no column 'prompt' .it has id, text, answer.; set data.prompt_field",
        ),
        ({"id": ["a"], "prompt": ["p"], "answer": [2]}, "column 'answer' is int64, but must be string"),
        ({"id": ["a"], "prompt": [["p"]], "answer": ["2"]}, "column 'prompt' is list<.*>, but must be string"),
        ({"id": ["a", "b"], "prompt": ["p", None], "answer": ["2", "3"]}, "row 2: field 'prompt' is null"),
        ({"id": ["a", None], "prompt": ["p", "q"], "answer": ["2", "3"]}, "row 2: field 'id' must be"),
        ({"id": [1.5], "prompt": ["p"], "answer": ["2"]}, "row 1: field 'id' must be"),
    ],
)
def test_parquet_with_another_schema(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    with pytest.raises(BadData, match=message):
        read(parquet(tmp_path, columns))


def test_parquet_without_rows(tmp_path: Path) -> None:
    empty = pa.table({name: pa.array([], pa.string()) for name in ("id", "prompt", "answer")})
    with pytest.raises(BadData, match="holds no rows"):
        read(parquet(tmp_path, empty))


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_parquet(tmp_path: Path, keep: int) -> None:
    path = parquet(tmp_path, {"prompt": [str(number) for number in range(1000)], "answer": ["a"] * 1000})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadData, match="is not a whole Parquet file"):
        read(path)


def test_damaged_parquet_page(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"prompt": [str(number) for number in range(5000)], "answer": ["a"] * 5000})
    content = bytearray(path.read_bytes())
    content[10:200] = bytes(190)
    path.write_bytes(content)
    with pytest.raises(BadData, match="cannot be read after row"):
        read(path)


def test_text_named_parquet(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_text(GOOD)
    with pytest.raises(BadData, match="is not a whole Parquet file"):
        read(path)


@pytest.mark.parametrize(("content", "message"), [("", "is empty"), ("\n \n", "holds no rows")])
def test_empty_file(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(BadData, match=message):
        read(jsonl(tmp_path, content))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"absent\.jsonl: no such file; set data\.uri"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(BadData, match="is a folder"):
        read(tmp_path)
    with pytest.raises(BadConfig, match="scheme 'gs'"):
        read("gs://bucket/data.jsonl")


def test_rows_from_s3(s3_uri: str) -> None:
    store = open_store(s3_uri, STORAGE)
    store.write("data.jsonl", GOOD.encode())
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": ["a"], "prompt": ["1+1="], "answer": ["2"]}), buffer)
    store.write("data.parquet", buffer.getvalue())
    assert read(f"{s3_uri}/data.jsonl") == read(f"{s3_uri}/data.parquet") == [Row("a", "1+1=", "2")]
    with pytest.raises(BadData, match=r"absent\.jsonl: no such object"):
        read(f"{s3_uri}/absent.jsonl")


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=20), st.booleans())
def test_any_text_survives_both_formats(
    tmp_path_factory: pytest.TempPathFactory, pairs: list, ascii_only: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "round-trip"
    os.makedirs(folder, exist_ok=True)
    rows = [Row(str(number), prompt, answer) for number, (prompt, answer) in enumerate(pairs)]
    lines = (json.dumps({"id": r.id, "prompt": r.prompt, "answer": r.answer}, ensure_ascii=ascii_only) for r in rows)
    assert read(jsonl(folder, "\n".join(lines) + "\n")) == rows
    columns = {name: [getattr(row, name) for row in rows] for name in ("id", "prompt", "answer")}
    assert read(parquet(folder, columns)) == rows
