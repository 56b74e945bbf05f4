"""Options that several commands of `tandem` have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from configs.failure import BadConfig

OVERRIDE = click.option(
    "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field: train.steps=50."
)


def _writable(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Find out before the work that its figures can be written."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise BadConfig(f"--json {path}: cannot be written ({error.strerror}); name a writable file") from None
    return path


JSON_FILE = click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    callback=_writable,
    help="Write every figure as one JSON object.",
)


def write_json(json_file: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures if a file was named."""
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
