"""A pipeline step as a container runs it: reads KFP's executor input, leaves a marker, writes the executor output.

KFP starts a step with one argument, the executor input as JSON (the `{{$}}` placeholder). The step needs no kfp: it
reads its parameters there and writes `executor_output.json` itself. Beside that it leaves `steps/<step>.json` in the
run's store: a step that is started again with the same inputs (a KFP retry, `tandem run --resume`) finds its own
finished marker and repeats its outputs instead of its work. One that a workflow retries although the user's
configuration or data was at fault repeats that failure at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import xxhash

from components.storage.layout import RunLayout
from configs.failure import BAD_CONFIG, BAD_DATA, DEFECT, BadConfig, Failure, ToldToLeave, failure_of
from configs.run import RunConfig

WORKFLOW = "TANDEM_WORKFLOW"
"""Variable with the name of the workflow that a pod belongs to."""
SOON_S = 90.0
"""Seconds after which a try is the user's, who may have mended the cause, and not the workflow's own."""


class Marker(msgspec.Struct, kw_only=True):
    """What a step left in `steps/<step>.json`."""

    step: str
    status: Literal["running", "done", "failed"]
    pid: int
    host: str
    started: float
    """Seconds since the epoch."""
    ended: float = 0.0
    inputs: str = ""
    """Digest of the configuration and the parameters."""
    job: str = ""
    """Workflow on the cluster that ran it; empty elsewhere."""
    exit_code: int = 0
    sentence: str = ""
    """The failure in one sentence; empty for a step that is running or done."""
    parameters: dict[str, str] = {}
    metrics: dict[str, float] = {}
    artifacts: list[str] = []


class Step:
    """One execution of a pipeline step.

    Attributes:
        config: The run's configuration.
        parameters: The step's other parameters by name (URIs and ids, always strings).
        layout: Where the run's things lie.
    """

    def __init__(self, name: str, executor_input: dict[str, Any]) -> None:
        self.name = name
        given = dict(executor_input.get("inputs", {}).get("parameterValues", {}))
        self.config = RunConfig.from_json(str(given.pop("config", "")), f"step {name}")
        self.parameters = {key: str(value) for key, value in given.items()}
        self.layout = RunLayout(self.config)
        self.store = self.layout.store
        self._outputs = executor_input.get("outputs", {})
        # Which MLflow run records the work does not change the work.
        decisive = {key: value for key, value in self.parameters.items() if key != "tracking_run"}
        self.marker = Marker(
            step=name,
            status="running",
            pid=os.getpid(),
            host=os.uname().nodename,
            started=time.time(),
            job=os.environ.get(WORKFLOW, ""),
            inputs=xxhash.xxh3_128_hexdigest(json.dumps([self.config.to_json(), decisive], sort_keys=True).encode()),
        )

    def write_artifact(self, name: str, data: bytes) -> None:
        """Write output artifact `name`: for KFP at the path it gave, for a later resume in the run's store."""
        self.store.write(f"steps/{self.name}.{name}", data)
        self.marker.artifacts = sorted({*self.marker.artifacts, name})
        self._place(name, data)

    def finish(self, parameters: dict[str, str] | None = None, metrics: dict[str, float] | None = None) -> None:
        """Record the outputs: string parameters, and scalars for the artifact `metrics`."""
        self.marker.parameters = parameters or {}
        self.marker.metrics = metrics or {}

    def repeat(self) -> bool:
        """Repeat the outputs of an earlier execution with the same inputs, if there is one."""
        earlier = read_marker(self.layout, self.name)
        if earlier is None or earlier.status != "done" or earlier.inputs != self.marker.inputs:
            return False
        for name in earlier.artifacts:
            self._place(name, self.store.read(f"steps/{self.name}.{name}"))
        self.marker = earlier
        return True

    def refuse_again(self) -> None:
        """Kubeflow retries every failure alike; what only the user can mend is not tried twice in one workflow.

        Raises:
            Failure: of the earlier try.
        """
        earlier, now = read_marker(self.layout, self.name), self.marker
        if earlier is None or not now.job or (earlier.job, earlier.inputs) != (now.job, now.inputs):
            return
        soon = now.started - earlier.ended < SOON_S
        if soon and earlier.status == "failed" and earlier.exit_code in (BAD_CONFIG, BAD_DATA):
            raise failure_of(earlier.exit_code, earlier.sentence)

    def write_marker(self) -> None:
        """Leave the marker in the run's store."""
        self.store.write(f"steps/{self.name}.json", msgspec.json.encode(self.marker))

    def write_executor_output(self) -> None:
        """Write `executor_output.json` where KFP asked for it."""
        artifacts = {}
        for name, listed in self._outputs.get("artifacts", {}).items():
            artifact = dict(listed["artifacts"][0])
            if name == "metrics":
                artifact["metadata"] = self.marker.metrics
            artifacts[name] = {"artifacts": [artifact]}
        target = Path(self._outputs["outputFile"])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"parameterValues": self.marker.parameters, "artifacts": artifacts}))
        for name, place in self._outputs.get("parameters", {}).items():
            path = Path(place["outputFile"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.marker.parameters.get(name, ""))

    def _place(self, name: str, data: bytes) -> None:
        listed = self._outputs.get("artifacts", {}).get(name)
        if listed is None:
            raise Failure(f"step {self.name} declares no output artifact '{name}'")
        path = Path(local_path(listed["artifacts"][0]["uri"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def local_path(uri: str) -> str:
    """Where KFP's launcher mounts an artifact's URI in the container; a local run already uses paths."""
    for scheme, mount in (("gs://", "/gcs/"), ("s3://", "/s3/"), ("minio://", "/minio/")):
        if uri.startswith(scheme):
            return mount + uri.removeprefix(scheme)
    return uri


def read_marker(layout: RunLayout, step: str) -> Marker | None:
    """The marker that `step` left in the run's store, or None."""
    store = layout.store
    key = f"steps/{step}.json"
    return msgspec.json.decode(store.read(key), type=Marker) if store.exists(key) else None


def run_step(name: str, body: Callable[[Step], None]) -> NoReturn:
    """Entry point of a step's container: run `body` and exit with the project's exit codes.

    Args:
        name: The step's name, as in the pipeline.
        body: Does the work and calls `Step.finish`.
    """
    try:
        step = Step(name, _executor_input(name))
        step.refuse_again()
        if step.repeat():
            print(f"{name}: already done with these inputs; outputs repeated", flush=True)
        else:
            _execute(step, body)
        step.write_executor_output()
    except Failure as failure:
        print(f"{name}: {failure.sentence}", file=sys.stderr, flush=True)
        sys.exit(failure.exit_code)
    sys.exit(0)


def _executor_input(name: str) -> dict[str, Any]:
    if len(sys.argv) != 2:
        raise BadConfig(f"step {name}: pass the executor input as the one argument (KFP does with '{{{{$}}}}')")
    try:
        return json.loads(sys.argv[1])
    except json.JSONDecodeError as error:
        raise BadConfig(f"step {name}: the executor input is not JSON ({error.msg}); pass KFP's '{{{{$}}}}'") from None


def _leave(number: int, frame: Any) -> None:
    raise ToldToLeave("told to leave; start it again to go on")


def _execute(step: Step, body: Callable[[Step], None]) -> None:
    # A step with work of its own to hand back puts its own handler in place of this one.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    step.write_marker()
    try:
        body(step)
    except BaseException as error:
        step.marker.status = "failed"
        step.marker.ended = time.time()
        step.marker.exit_code = error.exit_code if isinstance(error, Failure) else DEFECT
        step.marker.sentence = error.sentence if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
        if not isinstance(error, Failure):
            traceback.print_exc()
        step.write_marker()
        if isinstance(error, Failure):
            raise
        raise Failure(step.marker.sentence) from error
    step.marker.status = "done"
    step.marker.ended = time.time()
    step.write_marker()
