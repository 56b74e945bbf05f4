"""The committed JSON schemas are what the models say, and every YAML file names its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.schema import MODELS, SCHEMAS, write_schemas

CONFIGS = SCHEMAS.parent
FOLDERS = {"runs": "run", "hardware": "hardware", "stacks": "stack"}


def test_the_committed_schemas_are_fresh(tmp_path: Path) -> None:
    for fresh in write_schemas(tmp_path):
        committed = SCHEMAS / fresh.name
        assert committed.read_text() == fresh.read_text(), f"{committed} is stale; run `python -m configs.schema`"
    assert sorted(path.name for path in SCHEMAS.iterdir()) == sorted(f"{name}.schema.json" for name in MODELS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_names_its_schema(folder: str) -> None:
    files = sorted((CONFIGS / folder).glob("*.yaml"))
    assert files
    for file in files:
        first = file.read_text().splitlines()[0]
        assert first == f"# yaml-language-server: $schema=../schemas/{FOLDERS[folder]}.schema.json", file


def test_fields_carry_their_meaning() -> None:
    schema = json.loads((SCHEMAS / "run.schema.json").read_text())
    assert schema["additionalProperties"] is False
    assert "Completions a prompt" in schema["$defs"]["RolloutConfig"]["properties"]["group_size"]["description"]
