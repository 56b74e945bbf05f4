"""Small container components for the shapes: Python's standard library only, so any image with Python runs them."""

from typing import Any

from kfp import dsl, kubernetes

IMAGE = "control"
"""Kind of image; the cluster's test puts its reference there."""

READ = """
import json, os, pathlib, sys
given = json.loads(sys.argv[1])
values = given["inputs"].get("parameterValues", {})
outputs = given["outputs"]
def put(**made):
    path = pathlib.Path(outputs["outputFile"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"parameterValues": made}))
"""
SAY = READ + "put(said=values['text'])"
ECHO = READ + "put(**{name + '_out': value for name, value in values.items()})"
DOUBLE = READ + "put(doubled=2 * values['number'])"
TOTAL = READ + "put(total=sum(sum(x) if isinstance(x, list) else x for x in values['numbers']))"
COUNT = READ + "put(numbers=list(range(values['up_to'])))"
FAIL = "import sys; print('the data is bad; mend it', file=sys.stderr); sys.exit(int(sys.argv[1]))"
FLAKY = "import os, sys; sys.exit(0 if os.environ.get('KFP_RETRY_INDEX') == '1' else 70)"
STATUS = READ + "put(seen=values['status']['state'] + ' ' + values['status']['pipelineTaskName'])"
ENVIRONMENT = READ + ("put(found=json.dumps({name: os.environ.get(name) for name in values['names']}, sort_keys=True))")
WORDS = "import json, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[2:]))"
WRITE = """
import json, pathlib, sys
given = json.loads(sys.argv[1])
artifact = given["outputs"]["artifacts"]["made"]["artifacts"][0]
path = pathlib.Path(sys.argv[2])
path.mkdir(parents=True)
(path / "a.txt").write_text(sys.argv[3])
artifact["metadata"] = {"words": len(sys.argv[3].split())}
place = pathlib.Path(given["outputs"]["outputFile"])
place.write_text(json.dumps({"artifacts": {"made": {"artifacts": [artifact]}}}))
"""
READ_ARTIFACTS = (
    READ
    + """
artifacts = given["inputs"]["artifacts"]["made"]["artifacts"]
place = lambda uri: pathlib.Path("/s3/" + uri[len("s3://"):])
texts = [(place(artifact["uri"]) / "a.txt").read_text() for artifact in artifacts]
put(text=" ".join(texts), words=sum(int(artifact["metadata"]["words"]) for artifact in artifacts))
"""
)
EVERYTHING = dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER


def python(source: str, *args) -> dsl.ContainerSpec:
    return dsl.ContainerSpec(image=IMAGE, command=["python3", "-c", source], args=list(args) or [EVERYTHING])


def stored(task: Any) -> Any:
    """Give a task that moves artifacts the credentials and the address of S3."""
    kubernetes.use_secret_as_env(
        task, "tandem-s3", {key: key for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}, optional=True
    )
    kubernetes.use_config_map_as_env(task, "tandem", {"AWS_ENDPOINT_URL": "AWS_ENDPOINT_URL"}, optional=True)
    return task


@dsl.container_component
def say(text: str, said: dsl.OutputPath(str)):
    return python(SAY)


@dsl.container_component
def echo(
    text: str,
    whole: int,
    real: float,
    yes: bool,
    several: list,
    mapping: dict,
    text_out: dsl.OutputPath(str),
    whole_out: dsl.OutputPath(int),
    real_out: dsl.OutputPath(float),
    yes_out: dsl.OutputPath(bool),
    several_out: dsl.OutputPath(list),
    mapping_out: dsl.OutputPath(dict),
    left_out: str = "default",
    left_out_out: dsl.OutputPath(str) = None,
):
    return python(ECHO)


@dsl.container_component
def double(number: int, doubled: dsl.OutputPath(int)):
    return python(DOUBLE)


@dsl.container_component
def total(numbers: list, total: dsl.OutputPath(int)):
    return python(TOTAL)


@dsl.container_component
def count(up_to: int, numbers: dsl.OutputPath(list)):
    return python(COUNT)


@dsl.container_component
def fail(code: int):
    return python(FAIL, code)


@dsl.container_component
def flaky():
    return python(FLAKY, "")


@dsl.container_component
def status_of(status: dsl.PipelineTaskFinalStatus, seen: dsl.OutputPath(str)):
    return python(STATUS)


@dsl.container_component
def environment(names: list, found: dsl.OutputPath(str)):
    return python(ENVIRONMENT)


@dsl.container_component
def words(first: str, said: dsl.OutputPath(str), second: str = None):
    return python(
        WORDS,
        said,
        dsl.ConcatPlaceholder(["<", first, ">"]),
        dsl.IfPresentPlaceholder(input_name="second", then=["with", second], else_=["alone"]),
    )


@dsl.container_component
def write(text: str, made: dsl.Output[dsl.Dataset]):
    return python(WRITE, EVERYTHING, made.path, text)


@dsl.container_component
def read(made: dsl.Input[dsl.Dataset], text: dsl.OutputPath(str), words: dsl.OutputPath(int)):
    return python(READ_ARTIFACTS)


@dsl.container_component
def read_all(made: dsl.Input[list[dsl.Dataset]], text: dsl.OutputPath(str), words: dsl.OutputPath(int)):
    return python(READ_ARTIFACTS)
