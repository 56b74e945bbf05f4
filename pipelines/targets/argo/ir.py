"""The part of KFP's intermediate representation (IR) that is translated, as models that refuse every other key.

Each model lists the keys that the translation reads; a key of the IR that stands in no model is refused by name, so
nothing a pipeline asks for is dropped without a word. Field names follow KFP's pipeline_spec.proto (IR 2.1) in JSON
spelling.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel

ParameterType = Literal["STRING", "NUMBER_INTEGER", "NUMBER_DOUBLE", "BOOLEAN", "LIST", "STRUCT", "TASK_FINAL_STATUS"]
COMPLETED = "ALL_UPSTREAM_TASKS_COMPLETED"


class Node(BaseModel):
    """Base of every part of the IR: immutable, and a key it does not know is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel)


class ArtifactType(Node):
    schema_title: str = ""
    schema_version: str = ""
    instance_schema: str = ""


class InputParameter(Node):
    parameter_type: ParameterType
    default_value: Any = None
    is_optional: bool = False
    description: str = ""
    literals: list[Any] = []


class InputArtifact(Node):
    artifact_type: ArtifactType
    is_artifact_list: bool = False
    is_optional: bool = False
    description: str = ""


class InputDefinitions(Node):
    parameters: dict[str, InputParameter] = {}
    artifacts: dict[str, InputArtifact] = {}


class OutputParameter(Node):
    parameter_type: ParameterType
    description: str = ""


class OutputArtifact(Node):
    artifact_type: ArtifactType
    is_artifact_list: bool = False
    metadata: dict[str, Any] = {}
    description: str = ""


class OutputDefinitions(Node):
    parameters: dict[str, OutputParameter] = {}
    artifacts: dict[str, OutputArtifact] = {}


class ParameterSelector(Node):
    producer_subtask: str
    output_parameter_key: str


class ParameterSelectors(Node):
    parameter_selectors: list[ParameterSelector]


class DagOutputParameter(Node):
    value_from_parameter: ParameterSelector | None = None
    value_from_oneof: ParameterSelectors | None = None


class ArtifactSelector(Node):
    producer_subtask: str
    output_artifact_key: str


class DagOutputArtifact(Node):
    artifact_selectors: list[ArtifactSelector]


class DagOutputs(Node):
    parameters: dict[str, DagOutputParameter] = {}
    artifacts: dict[str, DagOutputArtifact] = {}


class TaskOutputParameter(Node):
    producer_task: str
    output_parameter_key: str


class RuntimeValue(Node):
    constant: Any


class TaskFinalStatus(Node):
    producer_task: str


class ParameterSource(Node):
    """Where the value of a task's parameter comes from: exactly one of the four."""

    task_output_parameter: TaskOutputParameter | None = None
    runtime_value: RuntimeValue | None = None
    component_input_parameter: str | None = None
    task_final_status: TaskFinalStatus | None = None
    parameter_expression_selector: str = ""

    @model_validator(mode="after")
    def _one(self) -> ParameterSource:
        sources = (self.task_output_parameter, self.runtime_value, self.component_input_parameter)
        if sum(source is not None for source in (*sources, self.task_final_status)) != 1:
            raise ValueError("a parameter has no source, or more than one; compile the pipeline again")
        return self


class TaskOutputArtifact(Node):
    producer_task: str
    output_artifact_key: str


class ArtifactSource(Node):
    task_output_artifact: TaskOutputArtifact | None = None
    component_input_artifact: str | None = None

    @model_validator(mode="after")
    def _one(self) -> ArtifactSource:
        if (self.task_output_artifact is None) == (self.component_input_artifact is None):
            raise ValueError("an artifact has no source, or more than one; compile the pipeline again")
        return self


class TaskInputs(Node):
    parameters: dict[str, ParameterSource] = {}
    artifacts: dict[str, ArtifactSource] = {}


class TaskInfo(Node):
    name: str = ""


class CachingOptions(Node):
    """Read and not acted on: nothing is cached here, so a task that allows a cached result runs anew."""

    enable_cache: bool = False
    cache_key: str = ""


class ComponentRef(Node):
    name: str


class TriggerPolicy(Node):
    condition: str = ""
    strategy: Literal["ALL_UPSTREAM_TASKS_SUCCEEDED", "ALL_UPSTREAM_TASKS_COMPLETED", ""] = ""


class IteratorItems(Node):
    raw: str | None = None
    input_parameter: str = ""


class ParameterIterator(Node):
    items: IteratorItems
    item_input: str


class IteratorPolicy(Node):
    parallelism_limit: int = 0


class RetryPolicy(Node):
    max_retry_count: int = 0
    backoff_duration: str = "0s"
    backoff_factor: float = 0.0
    backoff_max_duration: str = "0s"


class Task(Node):
    component_ref: ComponentRef
    task_info: TaskInfo = TaskInfo()
    inputs: TaskInputs = TaskInputs()
    dependent_tasks: list[str] = []
    caching_options: CachingOptions = CachingOptions()
    trigger_policy: TriggerPolicy = TriggerPolicy()
    parameter_iterator: ParameterIterator | None = None
    iterator_policy: IteratorPolicy = IteratorPolicy()
    retry_policy: RetryPolicy | None = None

    @property
    def upstream(self) -> list[str]:
        """Tasks this one waits for: the named ones, and those it takes a value from (as KFP's compiler adds them)."""
        parameters = [source.task_output_parameter for source in self.inputs.parameters.values()]
        artifacts = [source.task_output_artifact for source in self.inputs.artifacts.values()]
        taken = [source.producer_task for source in (*parameters, *artifacts) if source is not None]
        return sorted({*self.dependent_tasks, *taken})


class Dag(Node):
    tasks: dict[str, Task] = {}
    outputs: DagOutputs = DagOutputs()


class Component(Node):
    input_definitions: InputDefinitions = InputDefinitions()
    output_definitions: OutputDefinitions = OutputDefinitions()
    dag: Dag | None = None
    executor_label: str = ""


class Accelerator(Node):
    type: str = ""
    count: int = 0
    resource_type: str = ""
    resource_count: str = ""


class Resources(Node):
    cpu_limit: float = 0.0
    memory_limit: float = 0.0
    cpu_request: float = 0.0
    memory_request: float = 0.0
    resource_cpu_limit: str = ""
    resource_memory_limit: str = ""
    resource_cpu_request: str = ""
    resource_memory_request: str = ""
    accelerator: Accelerator | None = None


class EnvironmentVariable(Node):
    name: str
    value: str = ""


class Container(Node):
    image: str
    command: list[str] = []
    args: list[str] = []
    env: list[EnvironmentVariable] = []
    resources: Resources = Resources()


class Executor(Node):
    container: Container


class DeploymentSpec(Node):
    executors: dict[str, Executor] = {}


class PipelineInfo(Node):
    name: str
    display_name: str = ""
    description: str = ""


class PipelineSpec(Node):
    pipeline_info: PipelineInfo
    root: Component
    components: dict[str, Component] = {}
    deployment_spec: DeploymentSpec = DeploymentSpec()
    default_pipeline_root: str = ""
    schema_version: str = ""
    sdk_version: str = ""
