"""Local runs: compiled container components start as processes; failures and signals keep their meaning."""

# No postponed annotations here: kfp reads them as objects.

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kfp
import pytest
from kfp import compiler, dsl
from kfp.local.subprocess_task_handler import SubprocessTaskHandler

from configs.failure import BadConfig, BadData
from configs.run import RunConfig
from pipelines.targets import local

ECHO = """
import json, os, sys, pathlib
given = json.loads(sys.argv[1])
outputs = given["outputs"]
values = {name: given["inputs"]["parameterValues"]["text"] for name in outputs.get("parameters", {})}
path = pathlib.Path(outputs["outputFile"])
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps({"parameterValues": values}))
"""
WRITE = """
import json, sys, pathlib
given = json.loads(sys.argv[1])["inputs"]["parameterValues"]
pathlib.Path(given["path"]).write_text(given["text"])
"""
FAIL = "import sys; print('first'); print('the data is bad; mend it', file=sys.stderr); sys.exit(65)"
WAIT = """
import signal, sys, time, pathlib, json
given = json.loads(sys.argv[1])["inputs"]["parameterValues"]
def leave(number, frame):
    print("handed back"); sys.exit(75)
signal.signal(signal.SIGTERM, leave)
pathlib.Path(given["path"]).write_text("ready")
time.sleep(60)
"""


@dsl.container_component
def echo(text: str, copy: dsl.OutputPath(str)):
    return dsl.ContainerSpec(
        image="tandem/any", command=["python3", "-c", ECHO], args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER]
    )


@dsl.container_component
def write(path: str, text: str):
    return dsl.ContainerSpec(
        image="tandem/any", command=["python3", "-c", WRITE], args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER]
    )


@dsl.container_component
def last(path: str, text: str):
    return dsl.ContainerSpec(
        image="tandem/any", command=["python3", "-c", WRITE + "#"], args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER]
    )


@dsl.container_component
def fail():
    return dsl.ContainerSpec(image="tandem/any", command=["python3", "-c", FAIL])


@dsl.container_component
def wait(path: str):
    return dsl.ContainerSpec(
        image="tandem/any", command=["python3", "-c", WAIT], args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER]
    )


@dsl.container_component
def adopt_checkpoint(config: str, given: str):
    return dsl.ContainerSpec(
        image="tandem/any",
        command=["python3", "-m", "components.adopt_checkpoint.main"],
        args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER],
    )


@dsl.pipeline
def branching(text: str, path: str, checkpoint: str = ""):
    with dsl.If(checkpoint == ""):
        new = echo(text=text)
    with dsl.Else():
        given = echo(text=checkpoint)
    write(path=path, text=dsl.OneOf(new.outputs["copy"], given.outputs["copy"]))


@dsl.pipeline
def failing(path: str, after: str):
    closing = last(path=path, text=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
    with dsl.ExitHandler(closing):
        write(path=after, text="ran").after(fail())


@dsl.pipeline
def waiting(ready: str, path: str, after: str):
    closing = last(path=path, text="closed")
    with dsl.ExitHandler(closing):
        write(path=after, text="ran").after(wait(path=ready))


@dsl.pipeline
def bare_step(config: str, given: str):
    adopt_checkpoint(config=config, given=given)


def compiled(pipeline: Callable, folder: Path) -> Path:
    path = folder / "pipeline.yaml"
    compiler.Compiler().compile(pipeline, str(path))
    return path


@pytest.mark.parametrize(
    ("checkpoint", "expected"), [("", "a python3 text"), ("s3://bucket/model", "s3://bucket/model")]
)
def test_branches_join_and_arguments_arrive_unchanged(checkpoint: str, expected: str, tmp_path: Path) -> None:
    ir = compiled(branching, tmp_path)
    arguments = {"text": "a python3 text", "path": str(tmp_path / "out"), "checkpoint": checkpoint}
    local.run_compiled(ir, arguments, tmp_path / "root")
    assert (tmp_path / "out").read_text() == expected


def test_the_file_is_what_runs(tmp_path: Path) -> None:
    ir = compiled(branching, tmp_path)
    ir.write_text(ir.read_text().replace('.write_text(given["text"])', '.write_text("edited")'))
    local.run_compiled(ir, {"text": "a", "path": str(tmp_path / "out")}, tmp_path / "root")
    assert (tmp_path / "out").read_text() == "edited"


def test_a_failure_keeps_its_code_and_the_exit_handler_runs(tmp_path: Path) -> None:
    ir = compiled(failing, tmp_path)
    with pytest.raises(BadData, match="the data is bad; mend it"):
        local.run_compiled(ir, {"path": str(tmp_path / "closed"), "after": str(tmp_path / "after")}, tmp_path / "root")
    assert (tmp_path / "closed").read_text().isdigit()
    assert not (tmp_path / "after").exists()


def test_a_steps_marker_tells_the_failure(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"name": "marked", "storage": {"root": str(tmp_path), "scratch": str(tmp_path)}})
    arguments = {"config": config.to_json(), "given": str(tmp_path / "none")}
    with pytest.raises(BadData, match="adopt_checkpoint: .*none: holds no files") as caught:
        local.run_compiled(compiled(bare_step, tmp_path), arguments, tmp_path / "root")
    marker = json.loads((tmp_path / "marked/steps/adopt_checkpoint.json").read_text())
    assert caught.value.sentence == f"adopt_checkpoint: {marker['sentence']}"


def test_a_step_that_cannot_leave_a_marker_keeps_its_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = {"root": str(tmp_path / "file"), "scratch": str(tmp_path)}
    config = RunConfig.model_validate({"name": "marked", "storage": storage})
    with pytest.raises(BadConfig) as caught:
        local.run_compiled(compiled(bare_step, tmp_path), {"config": config.to_json(), "given": "x"}, tmp_path / "root")
    assert caught.value.sentence.startswith("adopt_checkpoint: ") and str(tmp_path / "file") in caught.value.sentence


def test_sigterm_tells_the_step_and_still_closes(tmp_path: Path) -> None:
    ready, closed, after = tmp_path / "ready", tmp_path / "closed", tmp_path / "after"
    arguments = tmp_path / "arguments.json"
    arguments.write_text(json.dumps({"ready": str(ready), "path": str(closed), "after": str(after)}))
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.targets.local", str(compiled(waiting, tmp_path)), str(arguments)]
        + ["--pipeline-root", str(tmp_path / "root")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(local.ROOT)},
    )
    try:
        end = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < end, "the step never started"
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, err
    assert "handed back" in out
    assert len(err.strip().splitlines()) == 1
    assert closed.read_text() == "closed"
    assert not after.exists()


def test_no_step_starts_after_a_signal(tmp_path: Path) -> None:
    processes = local.StepProcesses([["python3", "-c", "pass"]])
    processes.leave(signal.SIGTERM, None)
    assert processes.run(["python3", "-m", "components.rl_loop.main", "{}"], {}) == 75
    assert processes.failed is not None and processes.failed[0] == "rl_loop"
    assert processes.run(["python3", "-c", "pass"], {}) == 0


def test_another_kfp_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ir = compiled(branching, tmp_path)
    monkeypatch.setattr(kfp, "__version__", "2.18.0")
    with pytest.raises(BadConfig, match="kfp is 2.18.0") as caught:
        local.run_compiled(ir, {"text": "a", "path": str(tmp_path / "out")}, tmp_path / "root")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_changed_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SubprocessTaskHandler, "run", lambda self, extra: None)
    with (
        pytest.raises(BadConfig, match=r"SubprocessTaskHandler\.run"),
        local.container_components(local.StepProcesses([])),
    ):
        pass


def test_the_patch_is_undone(tmp_path: Path) -> None:
    before = {name: vars(SubprocessTaskHandler)[name] for name in local.PATCHED}
    with pytest.raises(ZeroDivisionError), local.container_components(local.StepProcesses([])):
        assert vars(SubprocessTaskHandler)["run"] is not before["run"]
        raise ZeroDivisionError
    assert {name: vars(SubprocessTaskHandler)[name] for name in local.PATCHED} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"text": "a"}, "'path' is missing"), ({"text": "a", "path": "b", "x": "c"}, "no parameter 'x'")],
)
def test_arguments_are_checked(arguments: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=words):
        local.run_compiled(compiled(branching, tmp_path), arguments, tmp_path / "root")


def test_bad_files_are_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "no.yaml").write_text("a: 1\n")
    (tmp_path / "no.json").write_text("[")
    with pytest.raises(BadConfig, match="is no compiled pipeline"):
        local.run_compiled(tmp_path / "no.yaml", {}, tmp_path / "root")
    with pytest.raises(SystemExit) as caught:
        local.main([str(tmp_path / "no.yaml"), str(tmp_path / "no.json"), "--pipeline-root", str(tmp_path)])
    assert caught.value.code == 64
