"""Dividing rows, and the staged files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.stage_data.rows import Row, SourceRow
from components.stage_data.split import Splits, read_manifest, read_split, split_rows, write_splits
from components.stage_data.tasks import task_rows
from components.storage.store import open_store
from configs.failure import BadConfig, BadData
from configs.run import StorageConfig

STORAGE = StorageConfig()


def sourced(rows: list[Row]) -> list[SourceRow]:
    return [SourceRow(row, f"line {number}") for number, row in enumerate(rows, 1)]


def split(rows: list[Row], fraction: float = 0.06) -> Splits:
    return split_rows(sourced(rows), fraction, "source")


def test_share_is_close_to_the_fraction() -> None:
    splits = split(task_rows("add2r", 10_000, 0))
    assert 500 < len(splits.eval) < 700
    assert len(splits.train) + len(splits.eval) == 10_000
    assert not {row.prompt for row in splits.train} & {row.prompt for row in splits.eval}


EVERYTHING = task_rows("add2r", 10_000, 0)
EVERYTHING_SPLIT = split(EVERYTHING, 0.3)


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 9999), min_size=50, max_size=100), st.randoms(use_true_random=False))
def test_prompt_stays_on_its_side_and_order_of_the_source_does_not_matter(chosen: set[int], random) -> None:
    part = [EVERYTHING[number] for number in chosen]
    random.shuffle(part)
    small, large = split(part, 0.3), EVERYTHING_SPLIT
    assert set(small.train) <= set(large.train)
    assert set(small.eval) <= set(large.eval)
    assert small == split(sorted(part, key=lambda row: row.id), 0.3)
    assert [row for row in large.train if row in set(small.train)] == small.train


def test_larger_fraction_only_adds_to_the_held_out_rows() -> None:
    rows = task_rows("sort8", 2000, 0)
    assert set(split(rows, 0.1).eval) < set(split(rows, 0.2).eval)


def test_duplicate_prompt_is_kept_once_and_counted() -> None:
    rows = task_rows("add2r", 500, 0)
    again = Row("again", rows[0].prompt, "other")
    splits = split([*rows, again])
    assert splits.duplicates == 1
    assert again not in splits.train + splits.eval
    assert rows[0] in splits.train + splits.eval


@pytest.mark.parametrize(
    ("fraction", "message"), [(1e-9, "the eval split.*raise"), (1 - 1e-9, "the train split.*lower")]
)
def test_empty_split(fraction: float, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        split(task_rows("add2r", 50, 0), fraction)


@pytest.mark.parametrize("backend", ["file", "s3"])
def test_staged_files_are_read_back(request: pytest.FixtureRequest, tmp_path: Path, backend: str) -> None:
    root = request.getfixturevalue("s3_uri") if backend == "s3" else str(tmp_path / "run one")
    store = open_store(root, STORAGE).child("data")
    splits = split(task_rows("add2r", 1000, 0))
    written = write_splits(store, splits, "example:add2r")
    uri = f"{store.uri}/manifest.json"
    assert store.list() == ["eval.parquet", "manifest.json", "train.parquet"]
    assert read_split(uri, "train", STORAGE) == splits.train
    assert read_split(uri, "eval", STORAGE) == splits.eval
    assert read_manifest(uri, STORAGE) == written
    assert written["prompt_characters"] == "+0123456789="
    assert (written["max_prompt_characters"], written["max_answer_characters"]) == (6, 3)


def test_digest_is_of_the_rows(tmp_path: Path) -> None:
    rows = task_rows("add2r", 1000, 0)
    store = open_store(str(tmp_path), STORAGE)
    one = write_splits(store, split(rows), "one")
    assert write_splits(store, split(rows[::-1]), "two")["digest"] == one["digest"]
    changed = [Row(rows[0].id, rows[0].prompt, "999"), *rows[1:]]
    assert write_splits(store, split(changed), "one")["digest"] != one["digest"]


def test_staged_files_that_do_not_belong_together(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), STORAGE)
    write_splits(store, split(task_rows("add2r", 1000, 0)), "one")
    uri = f"{store.uri}/manifest.json"
    store.write("eval.parquet", store.read("train.parquet"))
    with pytest.raises(BadData, match="eval.parquet: has .* rows, but its manifest says"):
        read_split(uri, "eval", STORAGE)
    store.write("manifest.json", b"{}")
    with pytest.raises(BadData, match="is no manifest of staged data"):
        read_manifest(uri, STORAGE)
    store.delete("manifest.json")
    with pytest.raises(BadData, match=r"manifest\.json: no such file"):
        read_manifest(uri, STORAGE)
