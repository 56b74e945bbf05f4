"""A compiled pipeline, read: one or two YAML documents, the pipeline's IR and the settings of kfp-kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from configs.failure import BadConfig
from pipelines.compile import read_ir
from pipelines.targets.argo.ir import Component, Node, PipelineSpec
from pipelines.targets.argo.settings import KubernetesSettings, PipelineConfig, PlatformDocument

MENDS = {
    "importer": "importers need KFP's metadata store; pass the URI as a string parameter",
    "resolver": "resolvers run on no open-source backend; pass the URI as a string parameter",
    "customJob": "custom jobs run on Google Cloud only; use a container component",
    "artifactIterator": "loop over a list parameter of URIs",
    "taskConfigPassthroughs": "put the settings on the task itself and take the TaskConfig parameter away",
    "singlePlatformSpecs": "put the settings on the task with kfp.kubernetes",
    "lifecycle": "take the pre-cache check away",
    "workspace": "use a PersistentVolumeClaim with kfp.kubernetes.mount_pvc, or S3",
    "podAffinity": "use a node affinity or a node selector",
    "enabledSharedMemory": "use kfp.kubernetes.empty_dir_mount with medium='Memory'",
    "initContainers": "put the work of the init container into the step's image",
    "isArtifactList": "write one artifact a task, and collect them with dsl.Collected",
    "runtimeParameter": "compile the pipeline with kfp 2.17",
    "notifications": "send them from an exit handler",
}
"""What to do about constructs that KFP documents and this translation does not run."""


M = TypeVar("M", bound=Node)


class Pipeline(BaseModel):
    """A compiled pipeline, read."""

    source: str
    spec: PipelineSpec
    kubernetes: dict[str, KubernetesSettings]
    """Settings by executor label."""
    config: PipelineConfig

    def component(self, name: str) -> Component:
        """The component of that name.

        Raises:
            BadConfig: there is none.
        """
        found = self.spec.components.get(name)
        if found is None:
            raise BadConfig(f"{self.source}: component '{name}' is not defined; compile the pipeline again")
        return found


def read_pipeline(path: Path) -> Pipeline:
    """Read a compiled pipeline.

    Raises:
        BadConfig: the file is no compiled pipeline, or asks for something that is not translated; the sentence names
            the construct, the task and the mend.
    """
    documents = read_ir(path)
    if len(documents) > 2:
        raise BadConfig(f"{path}: holds {len(documents)} documents, but a compiled pipeline has one or two")
    spec = _validated(PipelineSpec, documents[0], path, documents[0])
    platform = _validated(PlatformDocument, documents[1] if len(documents) == 2 else {}, path, documents[0])
    kubernetes = platform.platforms.kubernetes
    unknown = sorted(set(kubernetes.deployment_spec.executors) - set(spec.deployment_spec.executors))
    if unknown:
        raise BadConfig(
            f"{path}: Kubernetes settings name executor '{unknown[0]}', which does not exist; compile again"
        )
    return Pipeline(
        source=str(path),
        spec=spec,
        kubernetes=kubernetes.deployment_spec.executors,
        config=kubernetes.pipeline_config,
    )


def _validated(model: type[M], document: Any, path: Path, spec: dict[str, Any]) -> M:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        # An unknown key says more than the key that is missing in its place.
        first = min(error.errors(include_url=False), key=lambda mistake: mistake["type"] != "extra_forbidden")
        location = [str(part) for part in first["loc"]]
        raise BadConfig(f"{path}: {_place(location, spec)}: {_refusal(first, location)}") from None


def _refusal(mistake: Any, location: list[str]) -> str:
    """What is wrong, and the mend."""
    where = ".".join(location)
    if mistake["type"] == "extra_forbidden":
        mend = MENDS.get(location[-1], "take it out of the pipeline, or run the pipeline on Kubeflow")
        return f"'{location[-1]}' ({where}) is not translated to Argo; {mend}"
    for name in reversed(location):
        if name in MENDS:
            return f"'{name}' ({where}) is not translated to Argo; {MENDS[name]}"
    if mistake["type"] == "missing":
        return f"'{where}' is missing; compile the pipeline again"
    if mistake["type"] == "value_error":
        return f"'{where}': {mistake['ctx']['error']}"
    return f"'{where}' is {mistake['input']!r}, which is not translated to Argo ({mistake['msg']})"


def _place(location: list[str], spec: dict[str, Any]) -> str:
    """The task at which a mistake stands, as the pipeline's author knows it."""
    if "tasks" in location[:-1]:
        return f"task '{location[location.index('tasks') + 1]}'"
    components = spec.get("components", {})
    owner = ""
    if "executors" in location[:-1]:
        label = location[location.index("executors") + 1]
        owner = next((name for name, part in components.items() if part.get("executorLabel") == label), label)
    elif location[:1] == ["components"] and len(location) > 1:
        owner = location[1]
    if not owner:
        return "the pipeline"
    dags = [part["dag"] for part in (spec.get("root", {}), *components.values()) if isinstance(part.get("dag"), dict)]
    tasks = [
        name
        for dag in dags
        for name, task in dag.get("tasks", {}).items()
        if task.get("componentRef") == {"name": owner}
    ]
    return f"task '{tasks[0]}'" if tasks else f"component '{owner}'"
