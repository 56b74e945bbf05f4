"""The example tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.stage_data.rows import read_rows
from components.stage_data.tasks import TASKS, task_rows, write_task
from configs.failure import BadConfig
from configs.run import DataConfig, StorageConfig

STORAGE = StorageConfig()


def test_add2r_has_every_prompt() -> None:
    rows = task_rows("add2r", 10_000, 0)
    assert {row.prompt for row in rows} == {f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)}
    for row in rows:
        a, b = row.prompt.rstrip("=").split("+")
        assert int(row.answer[::-1]) == int(a) + int(b)
        assert len(row.answer) == 3


@pytest.mark.parametrize(("name", "solve"), [("sort8", sorted), ("rev8", reversed)])
def test_eight_digits(name: str, solve) -> None:
    rows = task_rows(name, 5000, 3)
    assert len({row.prompt for row in rows}) == len({row.id for row in rows}) == 5000
    for row in rows:
        assert row.prompt[0] + row.prompt[-1] == ">="
        assert len(row.prompt) == 10
        assert row.answer == "".join(solve(row.prompt[1:-1]))


@pytest.mark.parametrize("name", TASKS)
def test_seed_decides_the_rows(name: str) -> None:
    assert task_rows(name, 100, 1) == task_rows(name, 100, 1)
    assert task_rows(name, 100, 1) != task_rows(name, 100, 2)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_written_task_is_read_back_and_repeats_byte_for_byte(tmp_path: Path, suffix: str) -> None:
    one, two = (write_task("rev8", 500, 7, str(tmp_path / f"{name}.{suffix}"), STORAGE) for name in ("one", "two"))
    assert [each.row for each in read_rows(DataConfig(uri=one), STORAGE)] == task_rows("rev8", 500, 7)
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()
    assert two == (tmp_path / f"two.{suffix}").as_uri()


def test_task_is_written_to_s3(s3_uri: str) -> None:
    uri = write_task("add2r", 10, 0, f"{s3_uri}/add2r.parquet", STORAGE)
    assert [each.row for each in read_rows(DataConfig(uri=uri), STORAGE)] == task_rows("add2r", 10, 0)


@pytest.mark.parametrize(
    ("name", "rows", "destination", "message"),
    [
        ("add3", 10, "x.jsonl", "no such example task; take one of add2r, sort8, rev8"),
        ("add2r", 10_001, "x.jsonl", "has 10000 different prompts, but 10001 rows"),
        ("add2r", 0, "x.jsonl", "0 rows are asked for"),
        ("add2r", 10, "x.csv", r"neither \.jsonl nor \.parquet"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, name: str, rows: int, destination: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        write_task(name, rows, 0, str(tmp_path / destination), STORAGE)
    assert list(tmp_path.iterdir()) == []
