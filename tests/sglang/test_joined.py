"""A server that somebody else started, and what others do to it."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from components.rollout.engine import EngineBroken, Pull, State
from components.rollout.sglang_engine import SGLangEngine
from components.rollout.sglang_joined import KEY
from components.rollout.sglang_server import SGLangServer
from configs.failure import BadConfig
from configs.run import ModelConfig, RunConfig
from tests.rollout.contract import LONG, Subject, version_one  # noqa: F401
from tests.rollout.contract_policy import GEOMETRY, make_version


@pytest.fixture
def server(subject: Subject) -> SGLangServer:
    assert isinstance(subject.engine, SGLangEngine) and isinstance(subject.engine._server, SGLangServer)
    return subject.engine._server


@pytest.fixture
def call(server: SGLangServer) -> Callable[..., Any]:
    """What somebody else does to the server, who knows the key."""

    def post(path: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {server.key}"}
        reply = httpx.post(server.url + path, json=body, headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json() if reply.content else None

    return post


@pytest.fixture
def joined(
    subject: Subject, server: SGLangServer, make_engine: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> Iterator[SGLangEngine]:
    """An engine that joined the server of the others, at version 1."""
    monkeypatch.setenv(KEY, server.key)
    engine = make_engine(urls=(server.url,), request_s=3)

    async def begin() -> None:
        await engine.open()
        await engine.load(subject.first.target, Pull(subject.first.folder), "retract")
        await engine.resume()

    subject.run(begin())
    yield engine
    subject.run(engine.close())


def test_a_joined_server_generates_and_is_left_running(subject: Subject, joined: SGLangEngine) -> None:
    other = Subject.__new__(Subject)
    other.engine, other._groups = joined, 0
    completions = subject.run(other.generate(subject.request(6)))
    assert [len(one.tokens) for one in completions] == [6, 6]
    subject.run(joined.close())
    assert subject.run(subject.engine.health()).state == State.READY


@pytest.mark.parametrize(
    ("sections", "words"),
    (
        ({"weights": {"dtype": "bfloat16"}}, "serves float32, but weights.dtype is bfloat16"),
        ({"stack": "slime-baseline", "hardware": "p5en"}, "has version 0.5.23, but stack slime-baseline names 0.5.9"),
    ),
)
def test_a_server_of_another_kind_is_refused(
    subject: Subject, server: SGLangServer, make_engine: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any], words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(KEY, server.key)
    with pytest.raises(BadConfig, match=words):
        subject.run(make_engine(sections, urls=(server.url,)).open())


def test_another_policy_is_refused(
    subject: Subject, server: SGLangServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, server.key)
    wider = make_version(tmp_path / "wider", 1, ModelConfig(**{**GEOMETRY.model_dump(), "num_experts": 8}))
    config = RunConfig.model_validate({"sglang": {"urls": (server.url,)}})
    with pytest.raises(BadConfig, match="another shape than the run's policy"):
        subject.run(SGLangEngine(config, wider.folder, tmp_path / "log", "rollout-0").open())


def test_a_wrong_key_and_a_missing_server_are_told(
    subject: Subject, server: SGLangServer, make_engine: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "wrong")
    with pytest.raises(BadConfig, match=f"set {KEY} to its admin key"):
        subject.run(make_engine(urls=(server.url,)).open())
    with pytest.raises(BadConfig, match="sglang.urls names 1"):
        subject.run(make_engine(urls=(server.url,), worker="rollout-1").open())


def test_a_pause_by_somebody_else_is_recognised(
    subject: Subject, joined: SGLangEngine, call: Callable[..., Any]
) -> None:
    call("/pause_generation", mode="in_place")
    try:
        health = subject.run(joined.health())
        assert health.state == State.PAUSED and "somebody else" in health.sentence

        async def story() -> None:
            async for _ in joined.generate(subject.request(4)):
                pass

        with pytest.raises(EngineBroken, match="no token for 3 s .somebody else paused"):
            subject.run(story())
        assert subject.run(joined.health()).state == State.BROKEN
    finally:
        call("/continue_generation")


def test_a_resume_by_somebody_else_is_recognised(
    subject: Subject, joined: SGLangEngine, call: Callable[..., Any]
) -> None:
    subject.run(joined.pause("retract"))
    call("/continue_generation")
    health = subject.run(joined.health())
    assert health.state == State.BROKEN and "somebody else resumed" in health.sentence


def test_weights_of_somebody_else_are_recognised(
    subject: Subject, joined: SGLangEngine, call: Callable[..., Any]
) -> None:
    folder = str(subject.second.folder)
    call("/update_weights_from_disk", model_path=folder, weight_version=subject.second.target.label)

    async def story() -> None:
        async for _ in joined.generate(subject.request(4)):
            pass

    with pytest.raises(EngineBroken, match="which this worker did not load"):
        subject.run(story())


def test_weights_that_did_not_arrive_are_seen(subject: Subject, joined: SGLangEngine, call: Callable[..., Any]) -> None:
    """SGLang ignores the fused names of transformers' memory, and answers 200 with the new version's label."""
    before = subject.run(joined.held())
    experts = subject.second.policy._p["model.layers.0.mlp.experts.gate_up_proj"]
    payload = base64.b64encode(pickle.dumps([("model.layers.0.mlp.experts.gate_up_proj", experts)])).decode()
    subject.run(joined.pause("retract"))
    call("/begin_weight_update")
    call("/update_weights_from_tensor", serialized_named_tensors=[payload], flush_cache=True, weight_version="2:new")
    call("/end_weight_update")
    after = subject.run(joined.held())
    assert after.label == "2:new"
    assert after.checksums == before.checksums


def test_requests_that_nobody_reads_end_in_the_server(subject: Subject, joined: SGLangEngine) -> None:
    async def running() -> int:
        assert joined._client is not None
        reply = await joined._client._http.get("/v1/loads")
        return sum(load["num_running_reqs"] for load in (await reply.json())["loads"])

    async def story() -> tuple[int, int]:
        group = joined.generate(subject.request(LONG, 8))
        await anext(group)
        before = await running()
        await group.aclose()
        await asyncio.sleep(0.5)
        return before, await running()

    assert subject.run(story()) == (8, 0)
