"""A real SGLang server for the tests; they run only when they are asked for by path, since a server takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.rollout.sglang_engine import SGLangEngine
from configs.run import RunConfig
from tests.rollout.contract import Subject
from tests.rollout.contract_policy import Version, make_version

FOLDER = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these tests out unless an argument names them."""
    named = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path == FOLDER or FOLDER in path.parents for path in named) else True


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Version]:
    """Three versions of one policy."""
    folder = tmp_path_factory.mktemp("versions")
    return [make_version(folder / str(number), number) for number in (1, 2, 3)]


@pytest.fixture(scope="session")
def make_engine(versions: list[Version], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SGLangEngine]:
    """An engine that is not open yet; the arguments go to section `sglang`, or name other sections."""

    def make(sections: dict[str, object] | None = None, worker: str = "rollout-0", **sglang: object) -> SGLangEngine:
        config = RunConfig.model_validate({"name": "test", "sglang": sglang, **(sections or {})})
        return SGLangEngine(config, versions[0].folder, tmp_path_factory.mktemp("logs") / "sglang.log", worker)

    return make


@pytest.fixture(scope="session")
def subject(make_engine: Callable[..., SGLangEngine], versions: list[Version]) -> Iterator[Subject]:
    """One server for all tests that leave it as they found it."""
    subject = Subject(make_engine(), versions)
    subject.run(subject.engine.open(), 600)
    yield subject
    subject.stop()
