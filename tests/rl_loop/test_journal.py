"""The journal of a loop whose machine may be lost: events are forgotten in Redis only once they lie in the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.experience.experience import Experience
from components.experience.redis_server import RedisServer
from components.rl_loop.journal import Journal
from components.storage.layout import RunLayout
from components.tracking.run import Tracker, open_run
from components.tracking.server import Server
from configs.run import RunConfig

pytestmark = pytest.mark.usefixtures("s3_uri")


@pytest.fixture
def machine(
    s3_uri: str, tmp_path: Path, mlflow_server: Server, redis_server: RedisServer, make_config: Callable[..., RunConfig]
) -> Callable[[str], tuple[Journal, Experience, RunLayout]]:
    """The loop's journal on a machine of the given name; all machines share the store and Redis."""
    base = make_config(storage={"root": s3_uri}, loop={"roles": "kubernetes"}, tracking={"uri": mlflow_server.uri})
    run_id = open_run(base)

    def make(name: str) -> tuple[Journal, Experience, RunLayout]:
        values = base.model_dump()
        values["storage"]["scratch"] = str(tmp_path / name)
        config = RunConfig.model_validate(values)
        layout = RunLayout(config)
        layout.scratch.mkdir(parents=True)
        experience = Experience(redis_server.url, config)
        return Journal(layout, experience, Tracker(mlflow_server.uri, run_id)), experience, layout

    return make


def step(number: int) -> bytes:
    event: dict[str, Any] = {"time": float(number), "role": "train", "event": "step", "version": number, "step": number}
    return json.dumps(event | {"metrics": {"train/loss": 1.0}, "staleness": {"0": 4}}).encode()


def steps_in(layout: RunLayout) -> list[int]:
    events = [json.loads(line) for line in layout.store.read("events.jsonl").splitlines()]
    return [event["step"] for event in events if event["event"] == "step"]


def test_a_loop_on_another_machine_goes_on_where_the_copy_ends(
    machine: Callable[[str], tuple[Journal, Experience, RunLayout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.rl_loop.journal.SAVE_S", 0.0)
    journal, experience, _ = machine("first")
    experience.emit([step(1), step(2)])
    journal.collect()
    monkeypatch.setattr("components.rl_loop.journal.SAVE_S", 1e9)
    experience.emit([step(3)])
    journal.collect()
    # Its pod is gone, with step 3 in its own file only.
    second, experience, layout = machine("second")
    assert second.version == 2
    experience.emit([step(4)])
    second.close()
    assert second.version == 4
    assert steps_in(layout) == [1, 2, 3, 4]
    assert experience.events("") == ([], "")


def test_events_of_an_earlier_step_are_in_the_copy(
    machine: Callable[[str], tuple[Journal, Experience, RunLayout]],
) -> None:
    journal, experience, layout = machine("first")
    experience.emit([step(1)])
    journal.close()
    later, _, other = machine("evaluate")
    later.close()
    other.fetch_events()
    assert steps_in(layout) == [1] and len(other.events.read_text().splitlines()) == 2
