"""One real MLflow server for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from components.tracking.server import Server, start_server


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ready MLflow server with an empty database."""
    server = start_server(tmp_path_factory.mktemp("mlflow"))
    try:
        server.wait_ready(120)
        yield server
    finally:
        server.stop()
