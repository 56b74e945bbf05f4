"""A pipeline's graph as Argo templates: one DAG template a DAG of the IR, one container template a component.

A task's condition becomes `when`, a loop a template of its own around `withParam`, an exit handler the exit hook of the
tasks it closes, `dsl.OneOf` and `dsl.Collected` expressions over the outputs of the branches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from configs.failure import BadConfig
from pipelines.targets.argo.expression import (
    Value,
    check_known,
    computed,
    condition,
    constant,
    encoded,
    given,
    produced,
    produced_if_succeeded,
    selected,
    tag,
    text,
)
from pipelines.targets.argo.ir import (
    COMPLETED,
    Component,
    Dag,
    DagOutputArtifact,
    DagOutputParameter,
    ParameterIterator,
    ParameterSource,
    Task,
)
from pipelines.targets.argo.pipeline import Pipeline
from pipelines.targets.argo.pod import Pod, input_parameters
from pipelines.targets.argo.settings import KubernetesSettings

ROOT = "root"
ENDED = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted")
ARGO_NAME = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]{0,127}")


class Graph:
    """Builds the templates of one pipeline.

    Attributes:
        templates: By name, in the order in which they were first needed.
    """

    def __init__(self, pipeline: Pipeline, folder: str, pull_policy: str) -> None:
        self.pipeline = pipeline
        self.folder = folder
        self.pull_policy = pull_policy
        self.templates: dict[str, dict[str, Any]] = {}
        root = pipeline.spec.root
        if root.dag is None:
            raise BadConfig(f"{pipeline.source}: the pipeline has no tasks; compile a function with @dsl.pipeline")
        self._dag_template(ROOT, root, root.dag)

    def _where(self, task: str) -> str:
        return f"{self.pipeline.source}: task '{task}'"

    def _add(self, template: dict[str, Any], where: str) -> str:
        name = template["name"]
        if not ARGO_NAME.fullmatch(name):
            raise BadConfig(f"{where}: '{name}' is no name Argo takes; use letters, digits and dashes")
        self.templates[name] = template
        return name

    def _template(self, name: str, task: Task) -> str:
        """Name of the template that runs a task's component, made when it is first needed."""
        reference = task.component_ref.name
        component = self.pipeline.component(reference)
        where = self._where(name)
        if component.dag is not None:
            if task.retry_policy:
                raise BadConfig(
                    f"{where}: set_retry on a nested pipeline does nothing on Kubeflow; set it on the tasks inside"
                )
            if reference not in self.templates:
                self._dag_template(reference, component, component.dag)
            return reference
        executor = self.pipeline.spec.deployment_spec.executors.get(component.executor_label)
        if executor is None:
            raise BadConfig(f"{where}: executor '{component.executor_label}' is not defined; compile again")
        unique = reference if task.retry_policy is None else f"{reference}-retry-{task.retry_policy.max_retry_count}"
        template = Pod(
            name=unique,
            folder=self.folder,
            component=component,
            container=executor.container,
            settings=self.pipeline.kubernetes.get(component.executor_label, KubernetesSettings()),
            retry=task.retry_policy,
            pull_policy=self.pull_policy,
            where=where,
        ).template()
        while self.templates.get(template["name"], template) != template:
            template = {**template, "name": template["name"] + "-b"}
        return self._add(template, where)

    def _dag_template(self, name: str, component: Component, dag: Dag) -> None:
        """Add the template of a DAG, and after it those of its tasks."""
        self.templates[name] = {}
        hooks = {task: _hooked(dag, task) for task in dag.tasks}
        tasks: list[dict[str, Any]] = []
        for key, task in sorted(dag.tasks.items()):
            self._check(key, task, component, dag)
            if not hooks[key]:
                tasks.append(self._task(key, task, dag))
        for closing, host in hooks.items():
            if host:
                written = next(task for task in tasks if task["name"] == host)
                if "hooks" in written:
                    raise BadConfig(
                        f"{self._where(closing)}: task '{host}' has a second exit task, and Argo runs one; put both into"
                        " one nested pipeline"
                    )
                written["hooks"] = {"exit": self._call(closing, dag.tasks[closing], dag)}
        template: dict[str, Any] = {"name": name}
        if inputs := input_parameters(component):
            template["inputs"] = {"parameters": inputs}
        template["dag"] = {"tasks": tasks}
        if any(_ignores_failure(task) and not hooks[key] for key, task in dag.tasks.items()):
            # A failed task fails the pipeline even if a later one runs all the same, as on Kubeflow.
            template["dag"]["target"] = " ".join(task["name"] for task in tasks)
        results: dict[str, DagOutputParameter | DagOutputArtifact] = {**dag.outputs.parameters, **dag.outputs.artifacts}
        outputs = [{"name": key, "valueFrom": _output(output)} for key, output in results.items()]
        if outputs:
            template["outputs"] = {"parameters": outputs}
        self._add(template, f"{self.pipeline.source}: component '{name}'")

    def _check(self, name: str, task: Task, around: Component, dag: Dag) -> None:
        """Refuse a task that refers to something its DAG has not: KFP's compiler writes such IR in some nested loops.

        Args:
            around: The component whose DAG it is.
        """
        where = self._where(name)
        if not ARGO_NAME.fullmatch(name):
            raise BadConfig(f"{where}: is no name Argo takes; use letters, digits and dashes")
        unknown = [key for key in task.upstream if key not in dag.tasks]
        if unknown:
            raise BadConfig(f"{where}: waits for '{unknown[0]}', which is not in its DAG; compile the pipeline again")
        inputs = self.pipeline.component(task.component_ref.name).input_definitions
        clash = sorted(set(inputs.parameters) & set(inputs.artifacts))
        if clash:
            raise BadConfig(f"{where}: input '{clash[0]}' is a parameter and an artifact; give them different names")
        known = {**around.input_definitions.parameters, **around.input_definitions.artifacts}
        for name_around in (
            *(source.component_input_parameter for source in task.inputs.parameters.values()),
            *(source.component_input_artifact for source in task.inputs.artifacts.values()),
        ):
            if name_around is not None and name_around not in known:
                raise BadConfig(
                    f"{where}: takes '{name_around}', which the pipeline around it does not have; KFP's compiler writes that"
                    " for an f-string over the item of a loop inside a loop: pass the item itself"
                )
        for producer, key in _taken_from(task):
            outputs = self.pipeline.component(dag.tasks[producer].component_ref.name).output_definitions
            if key not in outputs.parameters and key not in outputs.artifacts:
                raise BadConfig(f"{where}: takes '{key}' of '{producer}', which puts out no such thing; compile again")

    def _task(self, name: str, task: Task, dag: Dag) -> dict[str, Any]:
        """One task of a DAG template."""
        written: dict[str, Any] = {"name": name, **self._call(name, task, dag)}
        after = task.upstream
        if after and _ignores_failure(task):
            written["depends"] = " && ".join("(" + " || ".join(f"{key}.{end}" for end in ENDED) + ")" for key in after)
        elif after:
            # KFP's rule: a task runs only if every task before it succeeded; a skipped one is no success.
            written["depends"] = " && ".join(f"{key}.Succeeded" for key in after)
        if task.trigger_policy.condition:
            values = self._values(name, task, dag)
            written["when"] = condition(task.trigger_policy.condition, values, self._where(name))
        return written

    def _call(self, name: str, task: Task, dag: Dag) -> dict[str, Any]:
        """Template and arguments of a task, in a DAG or as a hook."""
        where = self._where(name)
        # Inputs that the component does not declare stand in texts and conditions, and are resolved there.
        declared = self.pipeline.component(task.component_ref.name).input_definitions.parameters
        values = self._values(name, task, dag)
        arguments = [{"name": key, "value": value.argument} for key, value in values.items() if key in declared]
        for key, artifact in task.inputs.artifacts.items():
            if artifact.component_input_artifact is not None:
                value = given(artifact.component_input_artifact)
            else:
                assert artifact.task_output_artifact is not None
                output = artifact.task_output_artifact
                value = self._taken(output.producer_task, output.output_artifact_key, task)
            arguments.append({"name": key, "value": value.argument})
        if _ignores_failure(task) and (task.trigger_policy.condition or task.parameter_iterator):
            raise BadConfig(
                f"{where}: an exit task with a condition or a loop is not translated to Argo; put it into a nested"
                " pipeline that is the exit task"
            )
        template = self._loop(name, task) if task.parameter_iterator else self._template(name, task)
        return {"template": template, **({"arguments": {"parameters": arguments}} if arguments else {})}

    def _taken(self, producer: str, key: str, task: Task) -> Value:
        return produced_if_succeeded(producer, key) if _ignores_failure(task) else produced(producer, key)

    def _values(self, name: str, task: Task, dag: Dag) -> dict[str, Value]:
        """The values of a task's parameters in the scope of its DAG."""
        sources = task.inputs.parameters
        constants = {key for key, source in sources.items() if source.runtime_value is not None}
        values = {
            key: self._value(key, source, name, task, dag) for key, source in sources.items() if key not in constants
        }
        others = dict(values)
        for key in constants:
            where = f"{self._where(name)}, parameter '{key}'"
            source = sources[key]
            assert source.runtime_value is not None
            values[key] = selected(constant(source.runtime_value.constant, others, name, where), source, where)
        return {key: values[key] for key in sources}

    def _value(self, key: str, source: ParameterSource, name: str, task: Task, dag: Dag) -> Value:
        """The value of one parameter that is no constant."""
        where = f"{self._where(name)}, parameter '{key}'"
        if source.component_input_parameter is not None:
            value = given(source.component_input_parameter)
        elif source.task_output_parameter is not None:
            output = source.task_output_parameter
            value = self._taken(output.producer_task, output.output_parameter_key, task)
        else:
            assert source.task_final_status is not None
            producer = source.task_final_status.producer_task
            if producer not in dag.tasks:
                raise BadConfig(f"{where}: asks for the status of '{producer}', which is not in its DAG; compile again")
            value = computed(
                f"toJson({{'state': tasks['{producer}'].status == 'Succeeded' ? 'SUCCEEDED' : 'FAILED',"
                f" 'pipelineTaskName': '{producer}', 'pipelineJobResourceName': workflow.name, 'error': {{}} }})"
            )
        return selected(value, source, where)

    def _loop(self, name: str, task: Task) -> str:
        """Template that runs a task's component once an item, and collects the outputs in the items' order."""
        iterator = task.parameter_iterator
        assert iterator is not None
        reference = task.component_ref.name
        component = self.pipeline.component(reference)
        inner = self._template(name, task)
        every = input_parameters(component)
        arguments = [
            {"name": part["name"], "value": given(part["name"]).argument}
            for part in every
            if part["name"] != iterator.item_input
        ]
        iteration = {
            "name": "iteration",
            "template": inner,
            "arguments": {"parameters": [*arguments, {"name": iterator.item_input, "value": "{{item}}"}]},
            "withParam": self._items(iterator, self._where(name)),
        }
        template: dict[str, Any] = {
            "name": f"{reference}-{name}-iterator",
            "inputs": {"parameters": [part for part in every if part["name"] != iterator.item_input]},
            "dag": {"tasks": [iteration]},
        }
        outputs = component.output_definitions
        if outputs.parameters or outputs.artifacts:
            collected = [(key, _collected(key)) for key in outputs.parameters]
            collected += [(key, f"flatten({_collected(key)})") for key in outputs.artifacts]
            template["outputs"] = {
                "parameters": [
                    {"name": key, "valueFrom": {"expression": encoded(expression)}} for key, expression in collected
                ]
            }
        if task.iterator_policy.parallelism_limit:
            template["parallelism"] = task.iterator_policy.parallelism_limit
        return self._add(template, self._where(name))

    def _items(self, iterator: ParameterIterator, where: str) -> str:
        """The items as Argo's list of strings, each the JSON text of one."""
        if iterator.items.raw is None:
            return tag(f"toJson(map({given(iterator.items.input_parameter).parsed}, {encoded('#')}))")
        try:
            raw = json.loads(iterator.items.raw)
        except json.JSONDecodeError:
            raw = None
        if not isinstance(raw, list):
            raise BadConfig(f"{where}: the items of its loop are no JSON list; compile the pipeline again")
        check_known(iterator.items.raw, f"{where}, items of its loop")
        return json.dumps([text(item) for item in raw], ensure_ascii=False)


def _taken_from(task: Task) -> Iterator[tuple[str, str]]:
    """The outputs of other tasks that a task takes: producer and key."""
    for parameter in task.inputs.parameters.values():
        if parameter.task_output_parameter is not None:
            yield parameter.task_output_parameter.producer_task, parameter.task_output_parameter.output_parameter_key
    for artifact in task.inputs.artifacts.values():
        if artifact.task_output_artifact is not None:
            yield artifact.task_output_artifact.producer_task, artifact.task_output_artifact.output_artifact_key


def _ignores_failure(task: Task) -> bool:
    return task.trigger_policy.strategy == COMPLETED


def _hooked(dag: Dag, name: str) -> str:
    """The task whose exit hook a task is, if it closes exactly one and nothing waits for it; else an empty string.

    A hook also runs when the workflow was stopped, which a task that merely waits for another's end does not.
    """
    task = dag.tasks[name]
    if not _ignores_failure(task) or len(task.upstream) != 1:
        return ""
    if any(name in other.upstream for other in dag.tasks.values()):
        return ""
    host = dag.tasks.get(task.upstream[0])
    return "" if host is None or _ignores_failure(host) else task.upstream[0]


def _collected(key: str) -> str:
    """Expression of the list of an output over the iterations of a loop; Argo itself decodes lists and mappings."""
    outputs = f"fromJSON(tasks['iteration'].outputs.parameters['{key}'])"
    values = f"map({outputs}, type(#) == 'string' ? fromJSON(#) : #)"
    return f"(tasks['iteration'].status == 'Succeeded' ? {values} : [])"


def _output(output: DagOutputParameter | DagOutputArtifact) -> dict[str, str]:
    """Where a DAG's output comes from: one task, or the one branch of several that ran."""
    if isinstance(output, DagOutputArtifact):
        sources = [(source.producer_subtask, source.output_artifact_key) for source in output.artifact_selectors]
    elif output.value_from_oneof is not None:
        selectors = output.value_from_oneof.parameter_selectors
        sources = [(source.producer_subtask, source.output_parameter_key) for source in selectors]
    elif output.value_from_parameter is not None:
        source = output.value_from_parameter
        sources = [(source.producer_subtask, source.output_parameter_key)]
    else:
        raise BadConfig("an output of a nested pipeline has no source; compile the pipeline again")
    if len(sources) == 1:
        return {"parameter": produced(*sources[0]).argument}
    *branches, last = sources
    chosen = "".join(
        f"tasks['{task}'].status == 'Succeeded' ? {produced(task, key).expression} : " for task, key in branches
    )
    return {"expression": chosen + produced(*last).expression}
