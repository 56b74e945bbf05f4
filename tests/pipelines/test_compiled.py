"""The committed IR is what the definition compiles to, the same everywhere, and honest about what it runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.failure import BadConfig
from configs.stack import Images, known_stacks, load_stack
from pipelines.compile import POST_TRAINING, compile_pipeline, read_ir, same_ir

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ir() -> dict[str, Any]:
    return read_ir(POST_TRAINING)[0]


@pytest.fixture(scope="module")
def containers(ir: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: executor["container"] for name, executor in ir["deploymentSpec"]["executors"].items()}


def test_the_committed_ir_is_fresh(tmp_path: Path) -> None:
    compile_pipeline(load_stack("cpu"), tmp_path / "fresh.yaml")
    assert same_ir(tmp_path / "fresh.yaml", POST_TRAINING), (
        f"{POST_TRAINING} is stale; run `python -m pipelines.compile`"
    )


def test_compiling_gives_the_same_bytes_whatever_the_environment(tmp_path: Path) -> None:
    written = []
    for number, extra in enumerate(({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "77"})):
        target = tmp_path / f"{number}.yaml"
        code = (
            "import sys, pathlib; from configs.stack import load_stack; from pipelines.compile import compile_pipeline;"
            "compile_pipeline(load_stack('cpu'), pathlib.Path(sys.argv[1]))"
        )
        env = {**os.environ, **extra, "PYTHONPATH": str(ROOT)}
        if number:
            env["KFP_DISABLE_EXECUTION_CACHING_BY_DEFAULT"] = "1"
        subprocess.run([sys.executable, "-c", code, str(target)], check=True, env=env, cwd=tmp_path, timeout=120)
        written.append(target.read_bytes())
    assert written[0] == written[1]


def test_only_the_sdk_version_names_kfp(ir: dict[str, Any]) -> None:
    assert ir.pop("sdkVersion").startswith("kfp-")
    assert not re.search(r"kfp[=-]+\d", yaml.safe_dump(ir))


def test_every_command_is_a_step_that_exists(containers: dict[str, dict[str, Any]]) -> None:
    for name, container in containers.items():
        step = name.removeprefix("exec-").replace("-", "_")
        assert container["command"] == ["python3", "-m", f"components.{step}.main"]
        assert container["args"] == ["{{$}}"]
        assert importlib.util.find_spec(f"components.{step}.main") is not None, step


def test_every_task_states_that_it_is_not_cached(ir: dict[str, Any]) -> None:
    dags = [ir["root"]["dag"], *(part["dag"] for part in ir["components"].values() if "dag" in part)]
    tasks = {name: task for dag in dags for name, task in dag["tasks"].items()}
    steps = [task for task in tasks.values() if "executorLabel" in ir["components"][task["componentRef"]["name"]]]
    assert len(steps) == 8
    assert all(task["cachingOptions"] == {} for task in steps)


@pytest.mark.parametrize("name", known_stacks())
def test_images_are_those_of_the_stack(name: str, tmp_path: Path) -> None:
    stack = load_stack(name)
    compile_pipeline(stack, tmp_path / "pipeline.yaml")
    executors = read_ir(tmp_path / "pipeline.yaml")[0]["deploymentSpec"]["executors"]
    images = {label.removeprefix("exec-"): executor["container"]["image"] for label, executor in executors.items()}
    control = {"preflight", "stage-data", "adopt-checkpoint", "rl-loop", "release"}
    assert {step for step, image in images.items() if image == stack.images.control} == control
    assert {step for step, image in images.items() if image == stack.images.train} == set(images) - control


def test_built_images_take_the_place_of_the_stacks(tmp_path: Path) -> None:
    built = Images(control="localhost/control:abc", train="repo/train@sha256:def", rollout="localhost/rollout:abc")
    compile_pipeline(load_stack("cpu"), tmp_path / "pipeline.yaml", built)
    executors = read_ir(tmp_path / "pipeline.yaml")[0]["deploymentSpec"]["executors"]
    assert {part["container"]["image"] for part in executors.values()} == {built.control, built.train}


def test_every_step_says_how_its_pod_is_to_be() -> None:
    settings = read_ir(POST_TRAINING)[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert len(settings) == 8
    for name, one in settings.items():
        assert one["securityContext"] == {"runAsUser": "10001", "runAsGroup": "10001", "runAsNonRoot": True}, name
        assert one["emptyDirMounts"] == [{"volumeName": "scratch", "mountPath": "/scratch"}]
        secrets = {secret["secretName"]: secret.get("optional", False) for secret in one["secretAsEnv"]}
        # Only what talks to the loop's Redis is given its password.
        assert ("tandem-redis" in secrets) == (name in ("exec-preflight", "exec-rl-loop"))
        assert all(optional for secret, optional in secrets.items() if secret != "tandem-redis")


def test_release_runs_whatever_happened(ir: dict[str, Any]) -> None:
    assert ir["root"]["dag"]["tasks"]["release"]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_ir_is_compared_without_the_sdk_version(tmp_path: Path) -> None:
    text = POST_TRAINING.read_text()
    (tmp_path / "sdk.yaml").write_text(text.replace("sdkVersion: kfp-", "sdkVersion: kfp-9."))
    (tmp_path / "other.yaml").write_text(text.replace("components.rl_loop.main", "components.evaluate.main"))
    assert same_ir(POST_TRAINING, tmp_path / "sdk.yaml")
    assert not same_ir(POST_TRAINING, tmp_path / "other.yaml")
    with pytest.raises(BadConfig, match="is no compiled pipeline"):
        same_ir(POST_TRAINING, tmp_path / "none.yaml")
