"""Runs a compiled pipeline on this machine: kfp.local walks the IR, every step is a process.

`python -m pipelines.targets.local IR.yaml ARGUMENTS.json --pipeline-root DIR`

kfp.local's SubprocessRunner refuses container components, and it writes its own interpreter's path into every argument
that holds the text `python3`. One guarded patch replaces both methods of its task handler while a pipeline runs: the
command of a container component is started on this host, with `python3` meaning this interpreter, and its exit code
and last words are kept. kfp is pinned for it; another version is refused instead of guessed at.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import kfp
import yaml
from kfp import components, local
from kfp.local.status import Status
from kfp.local.subprocess_task_handler import SubprocessTaskHandler

from components.role import die_with_parent
from components.step import read_marker
from components.storage.layout import RunLayout
from configs.failure import TOLD_TO_LEAVE, BadConfig, Failure, failure_of
from configs.run import RunConfig
from pipelines.compile import read_ir

KFP_VERSION = "2.17.3"
PATCHED = {"validate_not_container_component": ["self", "full_command"], "run": ["self"]}
ROOT = Path(__file__).resolve().parents[2]


class StepProcesses:
    """The steps of one execution as processes of this host, one at a time.

    Attributes:
        failed: Step, exit code and last words of the first step that failed, or None.
        leaving: Whether a signal asked to end the execution: the running step is told to leave, later ones are not
            started, exit handlers run.
    """

    def __init__(self, exit_commands: list[list[str]], env: dict[str, str] | None = None) -> None:
        self.failed: tuple[str, int, str] | None = None
        self.leaving = False
        self._exit_commands = exit_commands
        self._env = env or {}
        self._current: subprocess.Popen[str] | None = None

    def run(self, command: list[str], env: dict[str, str]) -> int:
        """Run a step to its end, passing its output on.

        Args:
            command: The container's command and arguments.
            env: Variables the component sets.

        Returns:
            Its exit code; negative when a signal ended it.
        """
        closing = any(command[: len(prefix)] == prefix for prefix in self._exit_commands)
        if self.leaving and not closing:
            self._note(command, TOLD_TO_LEAVE, "told to leave before it started")
            return TOLD_TO_LEAVE
        last = ""
        with subprocess.Popen(
            [sys.executable if part == "python3" else part for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **_import_path(), **self._env, **env},
            preexec_fn=die_with_parent,
        ) as process:
            self._current = None if closing else process
            # The signal may have come between the look above and here.
            if self.leaving:
                self._tell()
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
        self._current = None
        if process.returncode:
            self._note(command, process.returncode, last)
        return process.returncode

    def leave(self, number: int, frame: Any) -> None:
        """Signal handler: tell the running step to leave and start no other."""
        self.leaving = True
        self._tell()

    def _tell(self) -> None:
        if self._current is not None:
            self._current.terminate()

    def _note(self, command: list[str], code: int, words: str) -> None:
        if self.failed is None:
            self.failed = (_step_of(command), code, words or "it left no words")


def run_compiled(ir: Path, arguments: dict[str, Any], pipeline_root: Path) -> None:
    """Run a compiled pipeline to its end, exit handlers included.

    SIGTERM and SIGINT tell the running step to leave.

    Args:
        ir: YAML file that `pipelines.compile` wrote.
        arguments: The pipeline's parameters; `config` tells where the steps leave their markers.
        pipeline_root: Folder for kfp's files: outputs and artifacts of each execution.

    Raises:
        Failure: of the kind and with the sentence of the first step that failed.
        BadConfig: the file is no compiled pipeline, a parameter is missing or unknown, or kfp is another version.
    """
    spec = read_ir(ir)[0]
    _check_arguments(spec, arguments, ir)
    pipeline = components.load_component_from_text(yaml.safe_dump(_without_retries(spec)))
    # The build manifest names the IR, which a step cannot see.
    digest = hashlib.sha256(ir.read_bytes()).hexdigest()
    processes = StepProcesses(_exit_commands(spec), {"TANDEM_IR_SHA256": digest})
    started = time.time()
    with container_components(processes), _signals(processes), warnings.catch_warnings():
        # kfp warns that the image is not used, which is the point here.
        warnings.filterwarnings("ignore", "You may be attemping to run a task that uses custom", RuntimeWarning)
        local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(pipeline_root))
        try:
            pipeline(**arguments)
        except RuntimeError as error:
            # kfp names the tasks that failed; a RuntimeError without a failed step is a defect of its own.
            if processes.failed is None:
                raise
            raise _failure(processes, arguments, started) from error


@contextlib.contextmanager
def container_components(processes: StepProcesses) -> Iterator[None]:
    """Let kfp.local's SubprocessRunner start container components, until the end of the block.

    Raises:
        BadConfig: the installed kfp is not the one this patch was written for.
    """
    if kfp.__version__ != KFP_VERSION:
        raise BadConfig(f"kfp is {kfp.__version__}, but local runs patch kfp {KFP_VERSION}; install kfp=={KFP_VERSION}")
    originals = {}
    for name, parameters in PATCHED.items():
        original = vars(SubprocessTaskHandler).get(name)
        if original is None or list(inspect.signature(original).parameters) != parameters:
            raise BadConfig(
                f"kfp's SubprocessTaskHandler.{name} is not the method that local runs patch;"
                f" install the released kfp=={KFP_VERSION}"
            )
        originals[name] = original

    def run(self: SubprocessTaskHandler) -> Status:
        return Status.FAILURE if processes.run(self.full_command, self.env_vars) else Status.SUCCESS

    try:
        SubprocessTaskHandler.validate_not_container_component = lambda self, full_command: None
        SubprocessTaskHandler.run = run
        yield
    finally:
        for name, original in originals.items():
            setattr(SubprocessTaskHandler, name, original)


@contextlib.contextmanager
def _signals(processes: StepProcesses) -> Iterator[None]:
    """Hand SIGTERM and SIGINT to the running step; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, processes.leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _without_retries(spec: dict[str, Any]) -> dict[str, Any]:
    """The IR with every failure final: here nothing kills a step but the user, who resumes."""
    dags = [spec["root"], *spec.get("components", {}).values()]
    for task in (task for part in dags for task in part.get("dag", {}).get("tasks", {}).values()):
        task.pop("retryPolicy", None)
    return spec


def _failure(processes: StepProcesses, arguments: dict[str, Any], started: float) -> Failure:
    """The first failure as the step's own marker tells it, else as the process's end does."""
    assert processes.failed is not None
    step, code, words = processes.failed
    if "config" in arguments:
        marker = read_marker(RunLayout(RunConfig.from_json(arguments["config"])), step)
        if marker is not None and marker.status == "failed" and marker.started >= started:
            return failure_of(marker.exit_code, f"{step}: {marker.sentence}")
    if processes.leaving:
        return failure_of(TOLD_TO_LEAVE, f"{step}: told to leave")
    if code < 0:
        return failure_of(code, f"{step}: ended by {signal.Signals(-code).name}; its last words: {words}")
    return failure_of(code, f"{step}: {words.removeprefix(f'{step}: ')}")


def _check_arguments(spec: dict[str, Any], arguments: dict[str, Any], ir: Path) -> None:
    parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    unknown = sorted(set(arguments) - set(parameters))
    missing = sorted(key for key, has in parameters.items() if key not in arguments and not has.get("isOptional"))
    if unknown:
        raise BadConfig(f"{ir}: has no parameter '{unknown[0]}'; known: {', '.join(sorted(parameters))}")
    if missing:
        raise BadConfig(f"{ir}: parameter '{missing[0]}' is missing; add it to the arguments")


def _exit_commands(spec: dict[str, Any]) -> list[list[str]]:
    """Commands of the exit handlers, which run however the rest went."""
    commands = []
    for task in spec["root"]["dag"]["tasks"].values():
        label = spec["components"][task["componentRef"]["name"]].get("executorLabel")
        if label and task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED":
            commands.append(spec["deploymentSpec"]["executors"][label]["container"]["command"])
    return commands


def _step_of(command: list[str]) -> str:
    found = re.search(r"\bcomponents\.(\w+)\.main\b", " ".join(command[:3]))
    return found[1] if found else command[0]


def _import_path() -> dict[str, str]:
    """Steps import this repository, from whatever folder the pipeline was started in."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a compiled pipeline and exit with the project's exit codes."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.targets.local", description=run_compiled.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("ir", type=Path, help="compiled pipeline (YAML)")
    parser.add_argument("arguments", type=Path, help="the pipeline's parameters (JSON object)")
    parser.add_argument("--pipeline-root", type=Path, required=True, help="folder for kfp's files")
    given = parser.parse_args(argv)
    try:
        run_compiled(given.ir, _read_arguments(given.arguments), given.pipeline_root)
    except Failure as failure:
        print(failure.sentence, file=sys.stderr, flush=True)
        sys.exit(failure.exit_code)
    sys.exit(0)


def _read_arguments(path: Path) -> dict[str, Any]:
    try:
        arguments = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        arguments = None
    if not isinstance(arguments, dict):
        raise BadConfig(f'{path}: is no file with a JSON object; write one such as {{"config": "..."}}')
    return arguments


if __name__ == "__main__":
    main()
