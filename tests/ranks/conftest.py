"""Training by several processes; these tests run only when they are asked for by path, since many processes start torch."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out unless an argument names it or something in it."""
    named = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path == FOLDER or FOLDER in path.parents for path in named) else True
