"""Two compiled pipelines compared in words: every change is told, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.failure import BadConfig
from pipelines.compile import POST_TRAINING, read_ir
from pipelines.difference import differences

LOOP = ("exit-handler-1", "rl-loop")


def tasks(ir: list[Any], component: str) -> dict[str, Any]:
    return ir[0]["components"][f"comp-{component}"]["dag"]["tasks"]


def written(changes: list[Callable[[list[Any]], None]], path: Path) -> list[Any]:
    """Write the main pipeline with some changes."""
    ir = copy.deepcopy(read_ir(POST_TRAINING))
    for change in changes:
        change(ir)
    path.write_text(yaml.dump_all(ir, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
    return ir


def compared(change: Callable[[list[Any]], None], folder: Path) -> list[str]:
    path = folder / "new.yaml"
    written([change], path)
    return differences(POST_TRAINING, path)


def executor(ir: list[Any], name: str) -> dict[str, Any]:
    return ir[0]["deploymentSpec"]["executors"][f"exec-{name}"]["container"]


def settings_of(ir: list[Any], name: str) -> dict[str, Any]:
    return ir[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"][f"exec-{name}"]


def remove_step(ir: list[Any]) -> None:
    del tasks(ir, "exit-handler-1")["evaluate"]


def add_step(ir: list[Any]) -> None:
    again = copy.deepcopy(tasks(ir, "exit-handler-1")["evaluate"])
    tasks(ir, "exit-handler-1")["again"] = again


def rewire(ir: list[Any]) -> None:
    source = tasks(ir, "exit-handler-1")["publish-checkpoint"]["inputs"]["parameters"]["checkpoint"]
    source["taskOutputParameter"]["producerTask"] = "stage-data"
    tasks(ir, "exit-handler-1")["publish-checkpoint"]["dependentTasks"] = ["preflight", "stage-data"]


def digest(ir: list[Any]) -> None:
    executor(ir, "evaluate")["image"] = "tandem/train@sha256:" + "a" * 8


def default(ir: list[Any]) -> None:
    ir[0]["root"]["inputDefinitions"]["parameters"]["checkpoint"]["defaultValue"] = "s3://bucket/model"


def kind(ir: list[Any]) -> None:
    ir[0]["components"]["comp-evaluate"]["inputDefinitions"]["parameters"]["version"]["parameterType"] = (
        "NUMBER_INTEGER"
    )


def memory(ir: list[Any]) -> None:
    executor(ir, "evaluate")["resources"]["resourceMemoryRequest"] = "2Gi"


def secret(ir: list[Any]) -> None:
    env = settings_of(ir, "rl-loop")["secretAsEnv"]
    next(one for one in env if one["secretName"] == "tandem-redis")["optional"] = True


def retry(ir: list[Any]) -> None:
    tasks(ir, "exit-handler-1")["stage-data"]["retryPolicy"] = {"maxRetryCount": 2}


def condition(ir: list[Any]) -> None:
    tasks(ir, "condition-branches-2")["condition-3"]["triggerPolicy"]["condition"] = "true == true"


def identity(ir: list[Any]) -> None:
    settings_of(ir, "evaluate")["securityContext"]["runAsUser"] = "0"


def scratch(ir: list[Any]) -> None:
    settings_of(ir, "evaluate")["emptyDirMounts"][0]["sizeLimit"] = "1Gi"


def deadline(ir: list[Any]) -> None:
    ir[1]["platforms"]["kubernetes"]["pipelineConfig"] = {"activeDeadlineSeconds": 60}


def caching(ir: list[Any]) -> None:
    tasks(ir, "exit-handler-1")["evaluate"]["cachingOptions"] = {"enableCache": True}


def root(ir: list[Any]) -> None:
    ir[0]["defaultPipelineRoot"] = "s3://bucket/root"


def put_out(ir: list[Any]) -> None:
    selector = {"producerSubtask": "exit-handler-1", "outputParameterKey": "policy"}
    ir[0]["root"]["outputDefinitions"] = {"parameters": {"model": {"parameterType": "STRING"}}}
    ir[0]["root"]["dag"]["outputs"] = {"parameters": {"model": {"valueFromParameter": selector}}}


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (remove_step, ["step exit-handler-1/evaluate: removed"]),
        (add_step, ["step exit-handler-1/again: added, in image tandem/train:0.1.0-cpu"]),
        (
            rewire,
            [
                "step exit-handler-1/publish-checkpoint: no longer waits for rl-loop and now waits for stage-data",
                "step exit-handler-1/publish-checkpoint: input checkpoint changed from rl-loop.policy to stage-data.policy",
            ],
        ),
        (digest, ["step exit-handler-1/evaluate: image tandem/train changed from 0.1.0-cpu to sha256:aaaaaaaa"]),
        (
            default,
            [
                'pipeline parameter checkpoint changed from string with default "" to string with default "s3://bucket/model"'
            ],
        ),
        (kind, ["step exit-handler-1/evaluate: input parameter version changed from string to number_integer"]),
        (
            memory,
            ["step exit-handler-1/evaluate: requests and limits memoryRequest changed from 1Gi to 2Gi"],
        ),
        (
            secret,
            [
                "step exit-handler-1/rl-loop: Kubernetes env REDIS_PASSWORD changed from secret tandem-redis key password"
                " to secret tandem-redis key password, optional"
            ],
        ),
        (retry, ["step exit-handler-1/stage-data: retry maxRetryCount added: 2"]),
        (
            condition,
            [
                "step exit-handler-1/condition-branches-2/condition-3: condition changed from"
                " inputs.parameter_values['pipelinechannel--checkpoint'] == '' to true == true"
            ],
        ),
        (identity, ["step exit-handler-1/evaluate: Kubernetes securityContext.runAsUser changed from 10001 to 0"]),
        (
            scratch,
            [
                'step exit-handler-1/evaluate: Kubernetes mount /scratch changed from emptyDirMounts {"volumeName":'
                ' "scratch"} to emptyDirMounts {"sizeLimit": "1Gi", "volumeName": "scratch"}'
            ],
        ),
        (deadline, ["pipeline: pipelineConfig.activeDeadlineSeconds added: 60"]),
        (root, ["pipeline: defaultPipelineRoot added: s3://bucket/root"]),
        (
            put_out,
            [
                "pipeline output model added: string",
                "pipeline result parameters.model.valueFromParameter.outputParameterKey added: policy",
                "pipeline result parameters.model.valueFromParameter.producerSubtask added: exit-handler-1",
            ],
        ),
        (caching, ["step exit-handler-1/evaluate: caching turned on"]),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_change_is_told_in_one_sentence(
    change: Callable[[list[Any]], None], sentences: list[str], tmp_path: Path
) -> None:
    assert compared(change, tmp_path) == sentences


def test_what_does_not_matter_is_not_told(tmp_path: Path) -> None:
    def change(ir: list[Any]) -> None:
        ir[0]["sdkVersion"] = "kfp-9"
        ir[0]["pipelineInfo"]["description"] = "other words"
        ir[0]["components"]["comp-evaluate"]["inputDefinitions"]["parameters"]["config"]["description"] = "other words"

    assert compared(change, tmp_path) == []
    assert differences(POST_TRAINING, POST_TRAINING) == []


def _leaves(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else []
    found = [path] if isinstance(part, (str, int, float, bool)) else []
    return found + [leaf for key, inner in pairs for leaf in _leaves(inner, (*path, key))]


# What says nothing about what runs, what is a name of a part (a change of it breaks the file), and what stands twice.
UNTOLD = ("sdkVersion", "schemaVersion", "description", "taskInfo", "componentRef", "executorLabel")
TWICE = ("secretNameParameter", "configMapNameParameter", "cpuRequest", "memoryRequest", "isOptional")


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_change_of_a_value_is_told(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("edited")
    whole = written([root, put_out], folder / "old.yaml")
    leaves = [leaf for leaf in _leaves(whole) if not {*UNTOLD, *TWICE} & set(leaf)]
    place = data.draw(st.sampled_from(leaves))

    def change(ir: list[Any]) -> None:
        target = ir
        for step in place[:-1]:
            target = target[step]
        old = target[place[-1]]
        target[place[-1]] = (not old) if isinstance(old, bool) else f"{old}x"

    written([root, put_out, change], folder / "new.yaml")
    assert differences(folder / "old.yaml", folder / "new.yaml"), place


def _parts(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the IR itself has mappings and lists: a user's own values may be of any kind."""
    pairs = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else []
    found = [path] if isinstance(part, (dict, list)) and path else []
    return found + [inner for key, one in pairs for inner in _parts(one, (*path, key))]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_part_of_another_kind_is_told(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = data.draw(st.just((0, "pipelineInfo")) | st.sampled_from(_parts(read_ir(POST_TRAINING))))
    other = data.draw(st.sampled_from(["text", 7, None, ["a"], [None]]))

    def change(ir: list[Any]) -> None:
        target: Any = ir
        for step in place[:-1]:
            target = target[step]
        target[place[-1]] = other

    try:
        told = compared(change, tmp_path_factory.mktemp("edited"))
    except BadConfig as error:
        assert "is no compiled pipeline" in error.sentence
    else:
        assert told or {*UNTOLD, *TWICE} & set(place), place


def test_settings_of_a_platform_that_are_text_are_told(tmp_path: Path) -> None:
    def change(ir: list[Any]) -> None:
        executors = ir[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        executors[next(iter(executors))] = "text"

    with pytest.raises(BadConfig, match="is no compiled pipeline"):
        compared(change, tmp_path)


def test_a_file_that_is_no_pipeline_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="is no compiled pipeline"):
        differences(POST_TRAINING, tmp_path / "none.yaml")
