"""The launcher as a step's container runs it, against a real S3 where artifacts move."""
# No postponed annotations here: kfp reads them as objects.

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from kfp import dsl

from pipelines.targets.argo.translation import LAUNCHER, translate
from tests.pipelines.shapes import components as c
from tests.pipelines.shapes.running import AWKWARD
from tests.pipelines.test_translation import compiled

HERE = """
import pathlib, runpy, signal, sys
launcher = runpy.run_path({path!r}, run_name="launcher")
globals_ = launcher["main"].__globals__
globals_["OUTPUTS"] = pathlib.Path({outputs!r})
globals_["MOUNT"], globals_["WRITTEN"] = {mount!r}, {outputs!r} + "/written"
globals_["TERMINATION"] = pathlib.Path({outputs!r}) / "termination-log"
Stop = launcher["Stop"]
try:
    sys.exit(launcher["main"]())
except Stop as stop:
    print(f"launcher: {{stop}}", file=sys.stderr)
    launcher["tell"](f"launcher: {{stop}}")
    sys.exit(stop.code)
"""


class Pod:
    """One run of the launcher on this machine: its mounts are folders of the test."""

    def __init__(self, component: Any, folder: Path) -> None:
        self.folder = folder
        pipeline = dsl.pipeline(name="one")(self._pipeline(component))
        template = next(
            part
            for part in translate(compiled(pipeline, folder), namespace="x", pipeline_root="")[1]["spec"]["templates"]
            if "container" in part
        )
        self.environment = {
            variable["name"]: variable["value"] for variable in template["container"]["env"] if "value" in variable
        }
        self.names = [argument.partition("=")[0] for argument in template["container"].get("args", [])]

    def _pipeline(self, component: Any) -> Any:
        inputs = component.component_spec.inputs or {}
        kinds = {"String": str, "Integer": int, "Boolean": bool, "Float": float, "List": list, "Dict": dict}
        wanted = {name: kinds[spec.type] for name, spec in inputs.items() if spec.type in kinds}
        source = f"def one({', '.join(f'{name}: {kind.__name__}' for name, kind in wanted.items())}):\n"
        source += f"    component({', '.join(f'{name}={name}' for name in wanted)})\n"
        space: dict[str, Any] = {"component": component}
        exec(source, space)
        return space["one"]

    def start(self, **given: Any) -> subprocess.Popen[str]:
        (self.folder / "out").mkdir(exist_ok=True)
        code = HERE.format(path=str(LAUNCHER), outputs=str(self.folder / "out"), mount=f"{self.folder}/s3/")
        arguments = [f"{name}={json.dumps(given.get(name))}" for name in self.names]
        environment = {**os.environ, **self.environment, "KFP_POD_NAME": "pod-1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, **given: Any) -> tuple[int, str]:
        process = self.start(**given)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors

    def outputs(self) -> dict[str, Any]:
        places = (self.folder / "out").iterdir()
        return {
            path.name: json.loads(path.read_text())
            for path in places
            if path.name not in ("written", "termination-log")
        }

    def words(self) -> str:
        """What the node's message would be."""
        return (self.folder / "out" / "termination-log").read_text()


def test_values_arrive_unchanged_whatever_they_hold(tmp_path: Path) -> None:
    pod = Pod(c.echo, tmp_path)
    given = {
        "text": AWKWARD, "whole": 3.0, "real": 0.5, "yes": True, "several": [AWKWARD], "mapping": {"a": None},
    }  # fmt: skip
    code, errors = pod.run(**given)
    assert (code, errors) == (0, "")
    out = pod.outputs()
    assert out["text_out"] == AWKWARD and out["several_out"] == [AWKWARD] and out["left_out_out"] == "default"
    assert out["whole_out"] == 3 and isinstance(out["whole_out"], int)
    written = [path.read_text() for path in (tmp_path / "out").iterdir() if path.is_file()]
    assert len(written) == 7 and not any("{{" in text or "$" in text for text in written)


@pytest.mark.parametrize("number", [64, 65, 69, 70, 75])
def test_the_commands_exit_code_is_kept(number: int, tmp_path: Path) -> None:
    pod = Pod(c.fail, tmp_path)
    code, errors = pod.run(code=number)
    assert code == number
    assert errors == "the data is bad; mend it\n"
    assert pod.words() == "the data is bad; mend it"


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"number": None}, 64, "input 'number' has no value"),
        ({"number": "7"}, 64, "the task takes number_integer"),
        ({"number": 7.5}, 64, "the task takes number_integer"),
    ],
)
def test_inputs_that_do_not_fit_are_told(given: dict[str, Any], code: int, words: str, tmp_path: Path) -> None:
    found, errors = Pod(c.double, tmp_path).run(**given)
    assert found == code and words in errors and errors.count("\n") == 1


@dsl.container_component
def forgets(said: dsl.OutputPath(str)):
    return c.python("pass", "")


@dsl.container_component
def misses():
    return dsl.ContainerSpec(image="control", command=["no-such-program"])


@dsl.container_component
def waits(ready: str):
    source = (
        "import pathlib, signal, subprocess, sys, time\n"
        "def leave(number, frame):\n    print('told', flush=True); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    return c.python(source, ready)


def test_a_missing_output_and_a_missing_program_are_told(tmp_path: Path) -> None:
    pod = Pod(forgets, tmp_path)
    code, errors = pod.run()
    assert code == 65 and "output 'said' is missing" in errors and "output 'said' is missing" in pod.words()
    code, errors = Pod(misses, tmp_path).run()
    assert code == 64 and "no-such-program: cannot be run" in errors


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("place", ["whole", "real", "several", "mapping", "text"])
def test_an_input_that_is_no_json_number_is_told(place: str, number: float, tmp_path: Path) -> None:
    given: dict[str, Any] = {"text": "a", "whole": 3, "real": 0.5, "yes": True, "several": [], "mapping": {}}
    given[place] = {"several": [1, number], "mapping": {"a": [number]}}.get(place, number)
    code, errors = Pod(c.echo, tmp_path).run(**given)
    assert code == 64 and f"input '{place}' is " in errors and errors.count("\n") == 1


@dsl.container_component
def writes(text: str, whole: dsl.OutputPath(int)):
    return c.python("import pathlib, sys; pathlib.Path(sys.argv[1]).write_bytes(eval(sys.argv[2]))", whole, text)


@dsl.container_component
def reports(text: str, several: dsl.OutputPath(list)):
    return c.python(c.READ + "put(several=json.loads(values['text']))")


@pytest.mark.parametrize("written", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[1, {", "\\xff"], ids=repr)
def test_an_output_that_is_no_json_is_told(written: str, tmp_path: Path) -> None:
    pod = Pod(writes, tmp_path)
    code, errors = pod.run(text=f"b'{written}'")
    assert code == 65 and "output 'whole' is " in errors and errors.count("\n") == 1 and pod.words() in errors


def test_a_reported_output_that_is_no_json_is_told(tmp_path: Path) -> None:
    code, errors = Pod(reports, tmp_path).run(text='[1, {"a": NaN}]')
    assert code == 65 and "output 'several' is " in errors and errors.count("\n") == 1


@pytest.mark.parametrize("text", ["a\0b", "\ud800"], ids=ascii)
def test_a_command_that_no_process_can_have_is_told(text: str, tmp_path: Path) -> None:
    code, errors = Pod(writes, tmp_path).run(text=text)
    assert code == 64 and "cannot be run" in errors and errors.count("\n") == 1


def test_sigterm_reaches_the_command_and_its_children_at_once(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = Pod(waits, tmp_path).start(ready=str(ready))
    end = time.monotonic() + 30
    while not (ready.exists() and ready.read_text()):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    child = int(ready.read_text())
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 75 and "told" in out
    assert time.monotonic() - started < 2.0
    # An orphan is a zombie until its new parent collects it, and no init needs to be quick about it.
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - started < 30
        time.sleep(0.02)


def test_placeholders_are_resolved(tmp_path: Path) -> None:
    pod = Pod(c.words, tmp_path)
    assert pod.run(first="Ada $x {{$}}", second=None)[0] == 0
    assert pod.outputs()["said"] == "<Ada $x {{$}}> alone"
    assert pod.run(first="Ada", second="Alan")[0] == 0
    assert pod.outputs()["said"] == "<Ada> with Alan"


@dsl.component(base_image="control", install_kfp_package=False)
def lightweight(text: str, number: int = 2) -> str:
    return text * number


def test_a_lightweight_component_runs_where_kfp_is_installed(tmp_path: Path) -> None:
    pod = Pod(lightweight, tmp_path)
    code, errors = pod.run(text="ab", number=3)
    assert code == 0, errors
    assert pod.outputs() == {"Output": "ababab"}


def test_artifacts_need_a_place(tmp_path: Path) -> None:
    code, errors = Pod(c.write, tmp_path).run(text="a")
    assert code == 64 and "pipeline-root" in errors
