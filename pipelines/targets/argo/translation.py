"""A compiled KFP pipeline as an Argo Workflow (Argo 4.0): for clusters that run Argo without Kubeflow Pipelines.

`translate` reads the IR that `tandem compile` or KFP's own compiler wrote and gives Kubernetes objects; every construct
it does not know is refused by name. What Kubeflow's driver does, Argo's expressions do; what its launcher does, the
script `launcher.py` does in each pod, from a ConfigMap, so a step's image needs Python 3.9 or newer, and boto3 if its
task reads or writes artifacts.

Differences from Kubeflow, beside the missing metadata store: nothing is cached (a task whose caching is on runs anew);
a cancelled task has its pod's grace period instead of under a second.

`python -m pipelines.targets.argo.translation IR.yaml` prints the objects.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from configs.failure import BadConfig
from pipelines.targets.argo.expression import encoded, given, tag
from pipelines.targets.argo.graph import ROOT, Graph
from pipelines.targets.argo.ir import InputParameter
from pipelines.targets.argo.pipeline import Pipeline, read_pipeline
from pipelines.targets.argo.pod import LAUNCHER_VOLUME, SCRATCH_VOLUME
from pipelines.targets.argo.settings import PipelineConfig

LAUNCHER = Path(__file__).parent / "launcher.py"
ENTRYPOINT = "pipeline"
PIPELINE_ROOT = "pipeline-root"
"""Workflow parameter with the URI under which artifacts go; a KFP parameter's name has no dash."""
WORKFLOW_NAME = "{{workflow.name}}"
USER = 10001
"""User of Argo's containers in a pod; that of our images, which owns the pod's volumes."""
KINDS: dict[str, tuple[type, ...]] = {
    "STRING": (str,),
    "NUMBER_INTEGER": (int,),
    "NUMBER_DOUBLE": (int, float),
    "BOOLEAN": (bool,),
    "LIST": (list,),
    "STRUCT": (dict,),
}
EXECUTOR = {
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": USER,
    }
}
EXECUTOR_PATCH = {"initContainers": [{"name": "init", **EXECUTOR}], "containers": [{"name": "wait", **EXECUTOR}]}
"""Argo's own containers in every pod, which a namespace with restricted Pod Security would refuse as Argo makes them."""


def translate(
    ir: Path,
    *,
    namespace: str,
    pipeline_root: str,
    name: str | None = None,
    arguments: dict[str, Any] | None = None,
    service_account: str = "tandem-pipeline",
    pull_policy: str = "IfNotPresent",
) -> list[dict[str, Any]]:
    """The Kubernetes objects that run a compiled pipeline once.

    Args:
        ir: Compiled pipeline.
        namespace: Where the objects go.
        pipeline_root: `s3://bucket/prefix` for artifacts; empty leaves it to who submits (and to pipelines that have
            none).
        name: The Workflow's; by default the API server makes one from the pipeline's.
        arguments: The pipeline's parameters. Without any the objects are for reading: required parameters have no value.
        service_account: Of every step's pod.
        pull_policy: For images, where the pipeline asks for none.

    Returns:
        ConfigMap with the launcher, named after its content; Workflow with one argument a parameter of the pipeline.

    Raises:
        BadConfig: a construct is not translated, or an argument does not fit.
    """
    pipeline = read_pipeline(ir)
    title = pipeline.spec.pipeline_info.name.rpartition("/")[2]
    root = pipeline_root.rstrip("/") or pipeline.spec.default_pipeline_root.rstrip("/")
    if root and not re.fullmatch(r"s3://[^/]+(/.*)?", root):
        raise BadConfig(f"pipeline root {root}: artifacts go to S3 only; give s3://bucket/prefix")
    folder = f"{{{{workflow.parameters.{PIPELINE_ROOT}}}}}/{title}/{{{{workflow.uid}}}}"
    graph = Graph(pipeline, folder, pull_policy)
    launcher = _launcher(namespace)
    labels = {"app.kubernetes.io/name": "tandem", "tandem.pipeline": _label(title)}
    spec: dict[str, Any] = {
        "entrypoint": ENTRYPOINT,
        "serviceAccountName": service_account,
        "arguments": {"parameters": [*_arguments(pipeline, arguments), {"name": PIPELINE_ROOT, "value": root}]},
        "podMetadata": {"labels": {**labels, "app.kubernetes.io/component": "pipeline-step"}},
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "podSpecPatch": json.dumps(EXECUTOR_PATCH),
        "volumes": [
            {"name": LAUNCHER_VOLUME, "configMap": {"name": launcher["metadata"]["name"]}},
            {"name": SCRATCH_VOLUME, "emptyDir": {}},
        ],
        "templates": [_entry(pipeline), *graph.templates.values()],
        **_limits(pipeline.config),
    }
    named = {"name": name} if name else {"generateName": f"{_label(title)}-"}
    workflow = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {**named, "namespace": namespace, "labels": labels},
        "spec": spec,
    }
    return [launcher, workflow]


def cron(workflow: dict[str, Any], name: str, schedule: str, timezone: str = "UTC") -> dict[str, Any]:
    """A CronWorkflow that starts a translated Workflow on a schedule, never two at once.

    Args:
        workflow: As `translate` gives it.
        name: Of the CronWorkflow; the Workflows it starts are named after it.
        schedule: Minute, hour, day, month, weekday.
        timezone: Name of the IANA time zone database.
    """
    metadata = workflow["metadata"]
    return {
        "apiVersion": workflow["apiVersion"],
        "kind": "CronWorkflow",
        "metadata": {"name": name, "namespace": metadata["namespace"], "labels": metadata["labels"]},
        "spec": {
            "schedules": [schedule],
            "timezone": timezone,
            "concurrencyPolicy": "Forbid",
            "startingDeadlineSeconds": 60,
            "successfulJobsHistoryLimit": 3,
            "failedJobsHistoryLimit": 3,
            "workflowMetadata": {"labels": metadata["labels"]},
            "workflowSpec": workflow["spec"],
        },
    }


def write_argo(ir: Path, target: Path) -> None:
    """Write the Workflow for reading and review: no arguments, no place for artifacts, without the launcher's source.

    Raises:
        BadConfig: a construct is not translated, or the file cannot be written.
    """
    text = dump(translate(ir, namespace="tandem", pipeline_root="")[1:])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"{target}: cannot be written ({error.strerror}); name another file") from None


def dump(objects: list[dict[str, Any]]) -> str:
    """Kubernetes objects as YAML that a reviewer can read: keys in the order they were written, texts as blocks."""
    return yaml.dump_all(objects, Dumper=_Blocks, sort_keys=False, width=120, allow_unicode=True)


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and never an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # To Kubernetes' reader of YAML a bare y or n is a truth value.
    style = "|" if "\n" in text else "'" if text in ("y", "Y", "n", "N") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Blocks.add_representer(str, _block)


def _limits(config: PipelineConfig) -> dict[str, Any]:
    """How long a run may take, and how long its Workflow is kept."""
    limits: dict[str, Any] = {}
    ttl = {
        "secondsAfterCompletion": config.resource_ttl_on_completion,
        "secondsAfterSuccess": config.resource_ttl_on_success,
        "secondsAfterFailure": config.resource_ttl_on_failure,
    }
    if any(ttl.values()):
        limits["ttlStrategy"] = {key: seconds for key, seconds in ttl.items() if seconds > 0}
    if config.active_deadline_seconds > 0:
        limits["activeDeadlineSeconds"] = config.active_deadline_seconds
    return limits


def _launcher(namespace: str) -> dict[str, Any]:
    source = LAUNCHER.read_text(encoding="utf-8")
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"tandem-launcher-{digest}",
            "namespace": namespace,
            "labels": {"app.kubernetes.io/name": "tandem"},
        },
        "immutable": True,
        "data": {"launcher.py": source},
    }


def _entry(pipeline: Pipeline) -> dict[str, Any]:
    """Template that turns the Workflow's arguments, as a person gives them, into the JSON text the tasks carry."""
    parameters = pipeline.spec.root.input_definitions.parameters
    arguments = [
        {"name": name, "value": tag(_from_argument(name, definition))} for name, definition in parameters.items()
    ]
    root: dict[str, Any] = {"name": ROOT, "template": ROOT}
    entry: dict[str, Any] = {"name": ENTRYPOINT, "dag": {"tasks": [root]}}
    if arguments:
        root["arguments"] = {"parameters": arguments}
        entry["inputs"] = {"parameters": [{"name": name} for name in parameters]}
    return entry


def _from_argument(name: str, definition: InputParameter) -> str:
    raw = given(name).expression
    if definition.parameter_type != "STRING":
        return encoded(f"fromJSON({raw})")
    if definition.is_optional and definition.default_value is None:
        return f"{raw} == 'null' ? 'null' : {encoded(raw)}"
    return encoded(raw)


def _arguments(pipeline: Pipeline, arguments: dict[str, Any] | None) -> list[dict[str, str]]:
    """The pipeline's parameters as arguments of the Workflow: text as it is, anything else as JSON."""
    definitions = pipeline.spec.root.input_definitions
    source = pipeline.source
    if definitions.artifacts:
        name = next(iter(definitions.artifacts))
        raise BadConfig(f"{source}: the pipeline takes artifact '{name}', which Argo cannot be given; pass its URI")
    unknown = sorted(set(arguments or {}) - set(definitions.parameters))
    if unknown:
        known = ", ".join(definitions.parameters) or "none"
        raise BadConfig(f"{source}: the pipeline has no parameter '{unknown[0]}'; it has: {known}")
    written = []
    for name, definition in definitions.parameters.items():
        value = definition.default_value
        if arguments is not None and name in arguments:
            value = arguments[name]
            _check_argument(name, value, definition, source)
        elif value is None and not definition.is_optional:
            if arguments is not None:
                raise BadConfig(f"{source}: argument '{name}' is missing; give it a value")
            written.append({"name": name})
            continue
        written.append({"name": name, "value": _argument(name, value, source)})
    return written


def _argument(name: str, value: Any, source: str) -> str:
    """An argument as text in which Argo finds no tag but the one for the Workflow's own name, which a schedule needs."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if "{{" not in text.replace(WORKFLOW_NAME, ""):
        return text
    try:
        json.loads(text)
    except json.JSONDecodeError:
        raise BadConfig(
            f"{source}: argument '{name}' holds '{{{{', which Argo takes for a tag of its own; write '{{ {{' or pass JSON"
        ) from None
    # In JSON two braces can only stand next to each other inside a string, where an escape means the same.
    return text.replace("{{", "{\\u007b").replace(WORKFLOW_NAME.replace("{{", "{\\u007b"), WORKFLOW_NAME)


def _check_argument(name: str, value: Any, definition: InputParameter, source: str) -> None:
    kind = definition.parameter_type
    if value is None and definition.is_optional:
        return
    wrong = not isinstance(value, KINDS.get(kind, ())) or (isinstance(value, bool) and kind != "BOOLEAN")
    if wrong:
        raise BadConfig(f"{source}: argument '{name}' is {value!r}, but the pipeline takes {kind.lower()}")
    if definition.literals and value not in definition.literals:
        choices = ", ".join(map(str, definition.literals))
        raise BadConfig(f"{source}: argument '{name}' is {value!r}; choose one of {choices}")


def _label(title: str) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", title.lower()).strip("-")[:50]


if __name__ == "__main__":
    try:
        print(dump(translate(Path(sys.argv[1]), namespace="tandem", pipeline_root="")), end="")
    except BadConfig as error:
        print(error.sentence, file=sys.stderr)
        sys.exit(error.exit_code)
