"""Values on their way through an Argo Workflow, and the expressions that choose and change them.

Every KFP value travels as JSON text in an Argo parameter, whatever its type: a string arrives at the next task as
`"text"`, a list as `[1,2]`. Two things would be changed on the way and are therefore kept out of the text by JSON's own
escapes: `{{`, which Argo takes for a tag of its own, and the `$` of `$(HOME)` and `$$`, which Kubernetes replaces in a
container's arguments.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from configs.failure import BadConfig
from pipelines.targets.argo.ir import ParameterSource

PLACEHOLDERS = {
    "{{$.pipeline_job_uuid}}": "workflow.uid",
    "{{$.pipeline_job_name}}": "workflow.name",
    "{{$.pipeline_job_resource_name}}": "workflow.name",
    "{{$.pipeline_job_create_time_utc}}": "workflow.creationTimestamp.RFC3339",
    # The controller creates a scheduled workflow within seconds of its time; Argo has no other name for that time
    # that is there in an unscheduled workflow too.
    "{{$.pipeline_job_schedule_time_utc}}": "workflow.creationTimestamp.RFC3339",
}
"""KFP's placeholders in constants, and Argo's name for the same."""
TASK_NAME = "{{$.pipeline_task_name}}"
REFUSED_PLACEHOLDERS = {
    "{{$.pipeline_task_uuid}}": "use dsl.PIPELINE_JOB_ID_PLACEHOLDER and the task's name",
    "{{$.workspace_path}}": "mount a PersistentVolumeClaim or use S3",
}
FUNCTIONS = {"int": "int", "double": "float", "string": "string"}
TOKEN = re.compile(
    r"""\s*(?:inputs\.parameter_values\['(?P<input>[^']+)'\]
        |(?P<text>'(?:[^'\\]|\\.)*')|(?P<number>-?\d+(?:\.\d+)?)|(?P<function>int|double|string)(?=\()
        |(?P<word>true|false)\b|(?P<sign>==|!=|<=|>=|&&|\|\||[<>!()]))""",
    re.VERBOSE,
)


def text(value: Any) -> str:
    """The JSON text of a value as it travels between tasks."""
    return guarded(json.dumps(value, ensure_ascii=False))


def guarded(document: str) -> str:
    """JSON text without what Argo or Kubernetes would replace in it; it stays the same JSON."""
    document = re.sub(r"\$(?=[$(])", r"\\u0024", document.replace("{{", "{\\u007b"))
    # The API server reads a patch as YAML, which knows no surrogate pairs; clients write rarer characters as such.
    return re.sub("[\U00010000-\U0010ffff]", lambda match: json.dumps(match[0])[1:-1], document)


def literal(value: str) -> str:
    """A string as Argo's expression language writes it, without braces that would end the tag around it."""
    return json.dumps(value, ensure_ascii=False).replace("{{", "{\\u007b").replace("}}", "}\\u007d")


def encoded(expression: str) -> str:
    """Expression of the JSON text of a value given by an expression."""
    return f"replace(replace(toJson({expression}), '{{' + '{{', '{{\\\\u007b'), '$', '\\\\u0024')"


def tag(expression: str) -> str:
    """An expression where Argo expects text."""
    while "}}" in expression:
        expression = expression.replace("}}", "} }")
    return "{{=" + expression + "}}"


@dataclass(frozen=True)
class Value:
    """JSON text that is known only when the workflow runs.

    Attributes:
        argument: As an argument of an Argo task.
        expression: The same in Argo's expression language.
    """

    argument: str
    expression: str

    @property
    def decoded(self) -> str:
        """Expression of the value itself."""
        return f"fromJSON({self.expression})"

    @property
    def parsed(self) -> str:
        """Expression of the value; a string that holds JSON counts as what it holds, as KFP reads lists and selectors."""
        return f"(type({self.decoded}) == 'string' ? fromJSON({self.decoded}) : {self.decoded})"


def computed(expression: str) -> Value:
    """The value of an expression that gives JSON text."""
    return Value(tag(expression), expression)


def given(name: str) -> Value:
    """An input of the template that the expression stands in."""
    return Value(f"{{{{inputs.parameters.{name}}}}}", f"inputs.parameters['{name}']")


def produced(task: str, name: str) -> Value:
    """An output of a task of the same DAG that has succeeded."""
    return Value(f"{{{{tasks.{task}.outputs.parameters.{name}}}}}", f"tasks['{task}'].outputs.parameters['{name}']")


def produced_if_succeeded(task: str, name: str) -> Value:
    """An output of a task that may have failed or been skipped: then JSON's null, which a component reads as not given."""
    # `get` keeps Argo from waiting for an output that never comes, which it does for one it can read from the text.
    outputs = f"get(get(tasks['{task}'], 'outputs'), 'parameters')"
    return computed(f"tasks['{task}'].status == 'Succeeded' ? get({outputs}, '{name}') : 'null'")


def constant(value: Any, inputs: dict[str, Value], task: str, where: str) -> Value:
    """A constant of the IR, with KFP's placeholders for the run, the task and the task's other inputs replaced.

    Args:
        inputs: The other inputs, which a text may name: `f"run-{other.output}"` in a pipeline is compiled to that.
        task: Name of the task that gets it.
        where: File and task, for messages.

    Raises:
        BadConfig: it holds a placeholder that nothing here stands for.
    """
    if isinstance(value, (list, dict)) and "{{$" in json.dumps(value):
        return computed(encoded(_nested(value, inputs, task, where)))
    if not isinstance(value, str):
        return Value(text(value), literal(text(value)))
    for placeholder, mend in REFUSED_PLACEHOLDERS.items():
        if placeholder in value:
            raise BadConfig(f"{where}: placeholder {placeholder} is not translated to Argo; {mend}")
    named = {f"{{{{$.inputs.parameters['{name}']}}}}": other for name, other in inputs.items()}
    pattern = "(" + "|".join(map(re.escape, (*PLACEHOLDERS, *named))) + ")"
    pieces = [piece for piece in re.split(pattern, value.replace(TASK_NAME, task)) if piece]
    known = {*PLACEHOLDERS, *named}
    check_known("".join(piece for piece in pieces if piece not in known), where)
    if not any(piece in named for piece in pieces):
        shown = "".join(
            f"{{{{{PLACEHOLDERS[piece]}}}}}" if piece in PLACEHOLDERS else text(piece)[1:-1] for piece in pieces
        )
        if not any(piece in PLACEHOLDERS for piece in pieces):
            return Value(f'"{shown}"', literal(f'"{shown}"'))
        return Value(f'"{shown}"', encoded(_joined(pieces, named)))
    return computed(encoded(_joined(pieces, named)))


def _nested(value: Any, inputs: dict[str, Value], task: str, where: str) -> str:
    """Expression of a list or mapping whose texts may name the task's other inputs."""
    if isinstance(value, list):
        return "[" + ", ".join(_nested(one, inputs, task, where) for one in value) + "]"
    if isinstance(value, dict):
        check_known("".join(value), where)
        pairs = (f"{literal(key)}: {_nested(one, inputs, task, where)}" for key, one in value.items())
        return "{" + ", ".join(pairs) + " }"
    return constant(value, inputs, task, where).decoded


def check_known(rest: str, where: str) -> None:
    """Refuse a placeholder where the known ones are replaced already."""
    match = re.search(r"\{\{\$.{0,60}", rest, re.DOTALL)
    if match:
        written = " ".join(match[0].partition("}}")[0].split())
        raise BadConfig(f"{where}: placeholder {written}}}}} is not translated to Argo; pass the value as a parameter")


def _joined(pieces: list[str], named: dict[str, Value]) -> str:
    """Expression of a text of several pieces."""
    terms = []
    for piece in pieces:
        if piece in named:
            other = named[piece].decoded
            terms.append(f"(type({other}) == 'string' ? {other} : toJson({other}))")
        else:
            terms.append(PLACEHOLDERS.get(piece) or literal(piece))
    return " + ".join(terms)


def selected(value: Value, source: ParameterSource, where: str) -> Value:
    """The part of a value that KFP's selector names, such as `parseJson(string_value)["a"]`.

    Raises:
        BadConfig: the selector is none that KFP's compiler writes.
    """
    selector = source.parameter_expression_selector
    if not selector:
        return value
    match = re.fullmatch(r"parseJson\(string_value\)((?:\[\"[^\"\\]+\"\])+)", selector)
    if match is None:
        raise BadConfig(
            f"{where}: parameterExpressionSelector '{selector}' is not translated to Argo; pass the whole value and"
            " take the part of it in the component"
        )
    return computed(encoded(f"{value.parsed}{match[1]}"))


def condition(written: str, inputs: dict[str, Value], where: str) -> str:
    """KFP's condition of a task, in CEL, as an Argo tag that becomes `true` or `false`.

    Args:
        inputs: The task's inputs by name.

    Raises:
        BadConfig: the condition holds something that KFP's compiler does not write.
    """
    terms, position, end = [], 0, len(written.rstrip())
    while position < end:
        match = TOKEN.match(written, position)
        if match is None or (match["input"] and match["input"] not in inputs):
            raise BadConfig(
                f"{where}: condition '{written}' is not translated to Argo (at '{written[position:].strip()[:40]}');"
                " compare task outputs, parameters and constants with dsl.If"
            )
        if match["input"]:
            terms.append(inputs[match["input"]].decoded)
        elif match["text"]:
            terms.append(literal(_unescaped(match["text"][1:-1], written, where)))
        else:
            terms.append(FUNCTIONS.get(match[0].strip(), match[0].strip()))
        position = match.end()
    joined = " ".join(terms)
    return tag(re.sub(r"\b(int|float|string) \(", r"\1(", joined))


def _unescaped(quoted: str, written: str, where: str) -> str:
    """The text that a quoted one in CEL stands for; KFP's compiler writes a constant as it is, so escapes are rare."""
    escape = re.search(r"\\[^\\'\"]", re.sub(r"\\[\\'\"]", "", quoted))
    if escape:
        raise BadConfig(
            f"{where}: escape '{escape[0]}' in condition '{written}' is not translated to Argo; compare with a text"
            " without a backslash"
        )
    return re.sub(r"\\(.)", r"\1", quoted)
