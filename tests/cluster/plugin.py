"""The pytest side of the test cluster: fixtures `cluster`, `namespace` and `figures`, `--json`, logs of failures.

Tests under tests/cluster run only when they are asked for by path, since they start a cluster.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
FIGURES = (
    "cluster_up_s",
    "submit_to_first_update_s",
    "total_s",
    "cancel_to_gone_s",
    "objects_accepted",
    "ir_shapes_run",
    "ir_shapes_refused",
)
"""Figures that are shown even when no test measured them."""
MOST_REPORTS = 5

_figures = pytest.StashKey[dict[str, Any]]()
_reports = pytest.StashKey[list[Path]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--json FILE` writes the figures."""
    parser.addoption("--json", type=Path, metavar="FILE", help="Write the figures of tests/cluster as one JSON object.")


def pytest_configure(config: pytest.Config) -> None:
    """Figures live as long as the session."""
    config.stash[_figures] = {}
    config.stash[_reports] = []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/cluster out unless an argument names it or something in it."""
    if collection_path != FOLDER:
        return None
    named = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path == FOLDER or FOLDER in path.parents for path in named) else True


@pytest.fixture(scope="session")
def cluster(figures: dict[str, Any]) -> Any:
    """The running cluster (tests.cluster.cluster.Cluster), started if it is not up, and left up."""
    from tests.cluster.cluster import up

    running = up()
    figures["cluster_up_s"] = running.up_s
    return running


@pytest.fixture
def namespace(cluster: Any) -> Iterator[str]:
    """An empty namespace, deleted after the test."""
    name = cluster.namespace("test")
    yield name
    cluster.delete_namespace(name)


@pytest.fixture
def make_namespace(cluster: Any) -> Iterator[Callable[..., str]]:
    """Make namespaces (arguments as Cluster.namespace), all deleted after the test."""
    made: list[str] = []

    def make(prefix: str, labels: dict[str, str] | None = None) -> str:
        made.append(cluster.namespace(prefix, labels))
        return made[-1]

    yield make
    for name in made:
        cluster.delete_namespace(name)


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the tests measure, printed and written (`--json`) at the end of the session."""
    return request.config.stash[_figures]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the logs of a failed test before its namespaces go."""
    report = yield
    reports = item.config.stash[_reports]
    uses = "cluster" in getattr(item, "fixturenames", ())
    if report.failed and uses and call.when != "teardown" and len(reports) < MOST_REPORTS:
        from tests.cluster import diagnosis, layout

        top = Path(os.environ.get("TANDEM_CLUSTER_LOGS", layout.CACHE / "failures"))
        if layout.KUBECONFIG.exists():
            reports.append(diagnosis.collect(top / f"{time.strftime('%Y%m%dT%H%M%S')}-{item.name}"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Figures and where the logs of failures are."""
    measured = config.stash[_figures]
    if measured:
        complete = {**dict.fromkeys(FIGURES), **measured}
        terminalreporter.section("figures of the cluster")
        for name, value in complete.items():
            terminalreporter.write_line(f"{name:28} {'-' if value is None else value}")
        target = config.getoption("--json")
        if target:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(complete, indent=2) + "\n")
    for folder in config.stash[_reports]:
        terminalreporter.write_line(f"logs and objects at the time of the failure: {folder}")
