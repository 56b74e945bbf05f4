"""Runs one KFP task inside its pod, as Kubeflow's launcher does, without Kubeflow.

Mounted into every step's container from a ConfigMap; needs Python 3.9 and, if artifacts move, boto3. It builds KFP's
executor input, downloads every input artifact (also one of which only the URI is used, as Kubeflow does), runs the
command, uploads the output artifacts, and leaves each output as JSON text where Argo reads it.

Arguments: one `NAME=JSON` an input, from Argo. Environment: TANDEM_TASK (command, inputs and outputs of the component),
TANDEM_ARTIFACTS (URI of the folder for this component's artifacts in this run), KFP_POD_NAME.
Exit code: that of the command. Its own are 64 (the task or its inputs do not fit), 65 (an output is no JSON or is
missing), 69 (S3 does not answer), 70 (Argo left a value unresolved).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

OUTPUTS = Path("/tmp/tandem/outputs")
"""Where Argo reads the outputs."""
WRITTEN = "/tmp/kfp/outputs"
"""Where the task writes its output parameters, as on Kubeflow."""
MOUNT = "/s3/"
TERMINATION = Path("/dev/termination-log")
LAST_WORDS_S = 5.0
PLACEHOLDER = re.compile(r"\{\{\$(?:\.(inputs|outputs)\.(parameters|artifacts)\['([^']+)'\](?:\.(\w+))?)?\}\}")
OWN = ("TANDEM_TASK", "TANDEM_ARTIFACTS")


class Stop(Exception):
    """Ends the launcher with an exit code and one sentence."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def main() -> int:
    """Run the task; returns the exit code."""
    task = json.loads(os.environ["TANDEM_TASK"])
    inputs = executor_inputs(task, read_arguments(sys.argv[1:]))
    outputs = executor_outputs(task)
    executor_input = {"inputs": inputs, "outputs": outputs}
    for artifact in listed(inputs["artifacts"]):
        download(artifact["uri"])
    for artifact in listed(outputs["artifacts"]):
        Path(local_path(artifact["uri"])).parent.mkdir(parents=True, exist_ok=True)
    for place in (*outputs["parameters"].values(), outputs):
        Path(place["outputFile"]).parent.mkdir(parents=True, exist_ok=True)
    code = run(command_line(task, executor_input))
    if code == 0:
        deliver(task, outputs)
    return code


def read_arguments(arguments: list[str]) -> dict[str, Any]:
    """The inputs that were given, by name; one that is null was not."""
    values = {}
    for argument in arguments:
        if argument.startswith("@/tmp/argo_arg_"):
            # Argo puts an argument that is too long for exec into a file.
            argument = Path(argument[1:]).read_text(encoding="utf-8")
        name, _, text = argument.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            raise Stop(70, f"input '{name}' was not resolved by Argo: {text[:200]}") from None
        if value is not None:
            values[name] = value
    return values


def executor_inputs(task: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The inputs part of the executor input, with defaults filled in and types checked."""
    parameters = {}
    for name, definition in task.get("parameters", {}).items():
        if name in values:
            parameters[name] = typed(name, values[name], definition)
        elif "defaultValue" in definition:
            parameters[name] = definition["defaultValue"]
        elif not definition.get("isOptional"):
            raise Stop(64, f"input '{name}' has no value; the task before it gave none")
    # A text may name other inputs of the task: f"run-{other}" in a pipeline is compiled to that.
    for name, value in parameters.items():
        if isinstance(value, str) and "{{$.inputs.parameters" in value:
            parameters[name] = PLACEHOLDER.sub(lambda match: parameter_text(parameters, match), value)
    artifacts = {name: {"artifacts": values[name]} for name in task.get("artifacts", []) if name in values}
    return {"parameterValues": parameters, "artifacts": artifacts}


def parameter_text(parameters: dict[str, Any], match: re.Match[str]) -> str:
    value = parameters.get(match[3]) if match[2] == "parameters" else match[0]
    return value if isinstance(value, str) else json.dumps(value)


def typed(name: str, value: Any, definition: dict[str, Any]) -> Any:
    """A value as its parameter's type asks; a string takes anything, as KFP's does."""
    kind, written = definition["parameterType"], json_text(value, 64, f"input '{name}'")
    if kind == "STRING" and not isinstance(value, str):
        value = written
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        "STRING": isinstance(value, str),
        "BOOLEAN": isinstance(value, bool),
        "NUMBER_INTEGER": number and value == int(value),
        "NUMBER_DOUBLE": number,
        "LIST": isinstance(value, list),
    }
    if not fits.get(kind, isinstance(value, dict)):
        raise Stop(64, f"input '{name}' is {written[:80]}, but the task takes {kind.lower()}")
    if kind == "NUMBER_INTEGER":
        value = int(value)
    if definition.get("literals") and value not in definition["literals"]:
        raise Stop(64, f"input '{name}' is {value!r}; the task takes one of {definition['literals']}")
    return value


def executor_outputs(task: dict[str, Any]) -> dict[str, Any]:
    """The outputs part of the executor input: where the task leaves what."""
    declared = task.get("outputArtifacts", {})
    folder = f"{os.environ.get('TANDEM_ARTIFACTS', '')}/{os.environ['KFP_POD_NAME']}"
    has_root = folder.startswith("s3://")
    if declared and not has_root:
        raise Stop(64, "the task writes artifacts, but the workflow's pipeline-root is not s3://bucket/prefix")
    artifacts = {}
    for name, artifact in declared.items():
        runtime = {"name": name, "uri": f"{folder}/{name}", "type": artifact["type"]}
        artifacts[name] = {"artifacts": [{**runtime, "metadata": artifact.get("metadata", {})}]}
    return {
        "parameters": {name: {"outputFile": f"{WRITTEN}/{name}"} for name in task.get("outputParameters", {})},
        "artifacts": artifacts,
        "outputFile": (local_path(folder) if has_root else "/tmp/kfp_outputs") + "/output_metadata.json",
    }


def listed(artifacts: dict[str, Any]) -> list[dict[str, Any]]:
    return [artifact for some in artifacts.values() for artifact in some["artifacts"]]


def local_path(uri: str) -> str:
    """Where an artifact lies in the container; one that is not on S3 lies nowhere."""
    return MOUNT + uri[len("s3://") :] if uri.startswith("s3://") else uri


def command_line(task: dict[str, Any], executor_input: dict[str, Any]) -> list[str]:
    """The command with every placeholder replaced."""
    line: list[str] = []
    for written in (*task.get("command", []), *task.get("args", [])):
        if written.startswith(('{"Concat": ', '{"IfPresent": ')):
            line += chosen(json.loads(written), executor_input)
        else:
            line.append(resolved(written, executor_input))
    if not line:
        raise Stop(64, "the component has no command; name one in its ContainerSpec")
    return line


def chosen(part: Any, executor_input: dict[str, Any]) -> list[str]:
    """KFP's Concat and IfPresent placeholders as arguments: none, one or several."""
    if part is None:
        return []
    if isinstance(part, str):
        return [resolved(part, executor_input)]
    if isinstance(part, list):
        return [word for inner in part for word in chosen(inner, executor_input)]
    if "Concat" in part:
        return ["".join(chosen(part["Concat"], executor_input))]
    if "IfPresent" not in part:
        raise Stop(64, f"placeholder {json.dumps(part)[:80]} is neither Concat nor IfPresent")
    test, given = part["IfPresent"], executor_input["inputs"]
    present = test["InputName"] in given["parameterValues"] or test["InputName"] in given["artifacts"]
    return chosen(test["Then"] if present else test.get("Else"), executor_input)


def resolved(written: str, executor_input: dict[str, Any]) -> str:
    """One argument with its placeholders replaced."""

    def value(match: re.Match[str]) -> str:
        direction, kind, name, part = match.groups()
        if direction is None:
            return json.dumps(executor_input)
        side = executor_input[direction]
        if (direction, kind) == ("inputs", "parameters"):
            found = side["parameterValues"].get(name)
            return found if isinstance(found, str) else json.dumps(found)
        if (direction, kind, part) == ("outputs", "parameters", "output_file") and name in side["parameters"]:
            return str(side["parameters"][name]["outputFile"])
        artifacts = side[kind].get(name, {}).get("artifacts")
        if kind != "artifacts" or not artifacts or part not in ("uri", "path", None):
            raise Stop(64, f"placeholder {match[0]} names nothing the task has")
        if part is None:
            return json.dumps(artifacts[0])
        uri = str(artifacts[0]["uri"])
        return uri if part == "uri" else local_path(uri)

    replaced = PLACEHOLDER.sub(value, written)
    # What a value brought with it is the user's own text; a placeholder that the author wrote is a mistake.
    unknown = re.search(r"\{\{\$[^}]*\}\}", PLACEHOLDER.sub("", written))
    if unknown:
        raise Stop(64, f"placeholder {unknown[0]} is not known to this launcher")
    return replaced


def run(line: list[str]) -> int:
    """Run the user's command in a process group of its own; a signal goes to the whole group at once."""
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    received: list[int] = []

    def forward(number: int, frame: Any) -> None:
        received.append(number)
        if child is not None:
            send(child, number)

    child = None
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(kind, forward)
    try:
        child = subprocess.Popen(line, env=environment, start_new_session=True, stderr=subprocess.PIPE)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Stop(64, f"{line[0]}: cannot be run ({reason}); check the image and the command") from None
    for number in received:
        send(child, number)
    words = LastWords(child.stderr)
    code = child.wait()
    # What the command left behind may hold its stderr open for ever.
    words.join(LAST_WORDS_S)
    if code != 0:
        tell(words.line)
    return code if code >= 0 else 128 - code


class LastWords(threading.Thread):
    """Passes a command's stderr on, and remembers the last line that says something."""

    def __init__(self, stream: Any) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self.line = ""
        self.start()

    def run(self) -> None:
        for line in self.stream:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self.line = line.decode(errors="replace").strip() or self.line


def tell(sentence: str) -> None:
    """Leave a sentence as the container's termination message, which Argo shows as the message of the failed node."""
    try:
        TERMINATION.write_text(sentence[:2000], encoding="utf-8")
    except OSError:
        # Then Kubernetes takes the last lines of the log.
        pass


def send(child: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        pass


def deliver(task: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Upload the artifacts and leave every output for Argo."""
    report = read_report(Path(outputs["outputFile"]))
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    values = report.get("parameterValues", {})
    for name, kind in task.get("outputParameters", {}).items():
        place = Path(outputs["parameters"][name]["outputFile"])
        write(name, values[name] if name in values else read_output(name, kind, place))
    for name, some in outputs["artifacts"].items():
        artifact = some["artifacts"][0]
        reported = (report.get("artifacts", {}).get(name, {}).get("artifacts") or [{}])[0]
        artifact["uri"] = reported.get("uri") or artifact["uri"]
        artifact["metadata"] = {**artifact["metadata"], **reported.get("metadata", {})}
        upload(artifact["uri"])
        write(name, [artifact])


def read_report(path: Path) -> dict[str, Any]:
    """What the task says of its outputs; a task may say nothing."""
    if not path.exists():
        return {}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        report = None
    if not isinstance(report, dict):
        raise Stop(65, f"{path}: the task wrote an executor output that is no JSON object")
    return report


def read_output(name: str, kind: str, path: Path) -> Any:
    """An output parameter that the task wrote into its file."""
    try:
        text = path.read_text(encoding="utf-8")
        return text if kind == "STRING" else json.loads(text)
    except FileNotFoundError:
        raise Stop(65, f"output '{name}' is missing: the task wrote no {path}") from None
    except ValueError:
        start = path.read_bytes()[:80].decode(errors="replace")
        raise Stop(65, f"output '{name}' is {start!r}, but it is declared as {kind.lower()}") from None


def json_text(value: Any, code: int, what: str) -> str:
    """A value as JSON text; JSON has no NaN and no infinity, and Argo's expressions end at them."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise Stop(code, f"{what} is {json.dumps(value)[:80]}, but JSON has no such number; use null") from None


def write(name: str, value: Any) -> None:
    """Leave an output as JSON text in which neither Argo nor Kubernetes finds anything to replace."""
    text = json_text(value, 65, f"output '{name}'").replace("{{", "{\\u007b").replace("$", "\\u0024")
    (OUTPUTS / name).write_text(text, encoding="utf-8")


def download(uri: str) -> None:
    """Bring an object, or every object under a folder, to its local path."""
    if not uri.startswith("s3://"):
        print(f"launcher: {uri} is not on S3 and is not downloaded", flush=True)
        return
    bucket, _, key = uri[len("s3://") :].partition("/")
    found = 0
    with answered(uri):
        client = s3()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key):
            for item in page.get("Contents", []):
                if item["Key"] != key and not item["Key"].startswith(key.rstrip("/") + "/"):
                    continue
                target = Path(local_path(f"s3://{bucket}/{item['Key']}"))
                target.parent.mkdir(parents=True, exist_ok=True)
                client.download_file(bucket, item["Key"], str(target))
                found += 1
    print(f"launcher: {found} object(s) of {uri}", flush=True)


def upload(uri: str) -> None:
    """Send what lies at an artifact's local path to S3; a task may leave nothing there."""
    path = Path(local_path(uri))
    if not uri.startswith("s3://"):
        return
    if not path.exists():
        print(f"launcher: the task left nothing at {path}", flush=True)
        return
    bucket, _, key = uri[len("s3://") :].partition("/")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    with answered(uri):
        client = s3()
        for file in files:
            tail = "" if file == path else f"/{file.relative_to(path)}"
            client.upload_file(str(file), bucket, key + tail)


def s3() -> Any:
    """A client with the pod's own credentials (environment, or the ServiceAccount's role)."""
    try:
        import boto3
    except ImportError:
        raise Stop(64, "the task moves artifacts, but its image has no boto3; install it there") from None
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return boto3.client("s3", region_name=region)


class answered:
    """Turns a failure of S3 into one sentence."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __enter__(self) -> answered:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # boto3 raises errors of several families, all of which mean the same here.
        families = ("botocore", "boto3", "s3transfer", "awscrt")
        if error is not None and type(error).__module__.partition(".")[0] in families:
            raise Stop(69, f"S3 did not take part with {self.uri}: {error}") from None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stop as stop:
        print(f"launcher: {stop}", file=sys.stderr, flush=True)
        tell(f"launcher: {stop}")
        sys.exit(stop.code)
