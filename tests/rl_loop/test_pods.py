"""What a pod's status says, as the API server would give it."""

from __future__ import annotations

from typing import Any

import pytest

from components.rl_loop.pods import Waits, crash, how_it_ended, worker_of
from configs.failure import BadConfig, ServiceGone
from configs.run import RunConfig


def pod(uid: str = "u1", phase: str = "Running", role: str = "rollout", **status: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": role, "leaderworkerset.sigs.k8s.io/group-index": "0"}
    return {
        "metadata": {"name": f"run-{role}-0", "uid": uid, "labels": labels},
        "spec": {"containers": [{"name": role, "image": "r/x:1"}]},
        "status": {"phase": phase, **status},
    }


def waiting(reason: str, message: str = "words") -> list[dict[str, Any]]:
    return [{"state": {"waiting": {"reason": reason, "message": message}}}]


def ended(code: int, **more: Any) -> list[dict[str, Any]]:
    return [{"state": {"terminated": {"exitCode": code, "containerID": "c1", "message": "one\nlast\n", **more}}}]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("components.rl_loop.pods.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def waits(clock: list[float]) -> Waits:
    return Waits(RunConfig())


def test_a_registry_may_stumble_and_a_later_pod_waits_anew(waits: Waits, clock: list[float]) -> None:
    pulling = pod(phase="Pending", containerStatuses=waiting("ErrImagePull"))
    waits.look(pulling, list)
    clock[0] = 25.0
    # It got its image in between, and stumbles once more much later.
    waits.look(pod(), list)
    waits.look(pulling, list)
    clock[0] = 5000.0
    replacement = pod(uid="u2", phase="Pending")
    waits.look(replacement, list)
    clock[0] += 100
    waits.look(pod(uid="u2", phase="Pending", containerStatuses=waiting("ErrImagePull")), list)
    clock[0] += 21
    with pytest.raises(BadConfig, match=r"cannot get its image r/x:1 \(ErrImagePull: words\)"):
        waits.look(pod(uid="u2", phase="Pending", containerStatuses=waiting("ErrImagePull")), list)


def test_a_pod_without_a_node_ends_the_run_after_the_limit(waits: Waits, clock: list[float]) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    pending = pod(phase="Pending", conditions=[condition])
    waits.look(pending, list)
    clock[0] = 901.0
    with pytest.raises(ServiceGone, match="Unschedulable: 0/1 nodes"):
        waits.look(pending, list)


@pytest.mark.parametrize("reason", ["InvalidImageName", "ErrImageNeverPull"])
def test_what_waiting_cannot_mend_is_told_at_once(waits: Waits, reason: str) -> None:
    with pytest.raises(BadConfig, match=reason):
        waits.look(pod(phase="Pending", containerStatuses=waiting(reason)), list)


def test_a_crash_is_told_once_and_a_lost_node_is_none() -> None:
    found = crash(pod(phase="Failed", containerStatuses=ended(70)))
    assert found is not None and found[0] == "u1/c1"
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    assert crash(pod(phase="Failed", containerStatuses=ended(137), conditions=disrupted)) is None
    leaving = pod(containerStatuses=ended(143))
    leaving["metadata"]["deletionTimestamp"] = "now"
    assert crash(leaving) is None
    assert crash(pod(phase="Succeeded", containerStatuses=ended(0))) is None


def test_memory_and_last_words_reach_the_user() -> None:
    killed = pod(role="train", containerStatuses=ended(137, reason="OOMKilled"))
    found = crash(killed)
    assert found is not None
    assert how_it_ended(killed, found[1], RunConfig()) == (
        "train was killed for its memory (limit 2048 MiB); raise kubernetes.train.memory_mib"
    )
    failed = pod(containerStatuses=ended(69))
    assert how_it_ended(failed, ended(69)[0]["state"]["terminated"], RunConfig()).endswith("its last words: last")
    assert worker_of(failed) == "rollout-0"


def test_every_pod_of_a_gang_has_a_name_of_its_own() -> None:
    first, second = pod(role="train"), pod(role="train")
    for index, each in enumerate((first, second)):
        each["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = str(index)
    assert [worker_of(first), worker_of(second)] == ["train", "train-1"]
