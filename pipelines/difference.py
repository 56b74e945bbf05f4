"""What changed between two compiled pipelines, in words: steps, wiring, images, parameters, resources, settings.

Compiled pipelines are reviewed as files; this says the same for a person in a hurry. Two files that differ only in the
SDK that compiled them, in the order of keys or in descriptions have no difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.failure import BadConfig
from pipelines.compile import read_ir

SHOWN = 60
"""Characters of a value that a sentence shows."""


def differences(old: Path, new: Path) -> list[str]:
    """What is different in `new`, a sentence a change, in the order: parameters, steps, images, wiring, settings.

    Raises:
        BadConfig: a file is missing or is no compiled pipeline.
    """
    before, after = _outline(old), _outline(new)
    found = [
        *_changes("", {"name": before.name}, {"name": after.name}, "the pipeline is called"),
        *_changes("", before.parameters, after.parameters, "pipeline parameter"),
        *_changes("", before.outputs, after.outputs, "pipeline output"),
        *_changes("", before.results, after.results, "pipeline result"),
        *_steps(before, after),
    ]
    for name in sorted(before.steps.keys() & after.steps.keys()):
        found += _step(name, before.steps[name], after.steps[name])
    found += _changes("pipeline: ", before.settings, after.settings)
    return found


def _outline(path: Path) -> Outline:
    documents = read_ir(path)
    try:
        return Outline(documents)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        # A part is not of the kind that every compiled pipeline has there.
        raise BadConfig(f"{path}: is no compiled pipeline; write one with `tandem compile`") from None


class Outline:
    """What a compiled pipeline says that a reviewer cares for.

    Attributes:
        name: Of the pipeline.
        parameters: Type and default by name.
        outputs: Type by name.
        results: Where each output comes from, flat.
        steps: Facts by the step's path, such as `exit-handler-1/condition-branches-2/warm-start`.
        settings: Of the whole pipeline, flat.
    """

    def __init__(self, documents: list[dict[str, Any]]) -> None:
        self._ir = documents[0]
        platforms = documents[1].get("platforms", {}) if len(documents) > 1 else {}
        self._kubernetes = platforms.get("kubernetes", {})
        others = {name: settings for name, settings in platforms.items() if name != "kubernetes"}
        self.name = self._ir["pipelineInfo"].get("name", "")
        root = self._ir.get("root", {})
        self.parameters = _definitions(root.get("inputDefinitions", {}))
        self.outputs = _definitions(root.get("outputDefinitions", {}))
        self.results = dict(_flat(root.get("dag", {}).get("outputs", {})))
        self.settings = dict(_flat({"pipelineConfig": self._kubernetes.get("pipelineConfig", {}), **others}))
        if self._ir.get("defaultPipelineRoot"):
            self.settings["defaultPipelineRoot"] = self._ir["defaultPipelineRoot"]
        self.steps: dict[str, dict[str, Any]] = {}
        self._walk(root, "")

    def _walk(self, component: dict[str, Any], prefix: str) -> None:
        for name, task in component.get("dag", {}).get("tasks", {}).items():
            reference = task.get("componentRef", {}).get("name", "")
            inner = self._ir.get("components", {}).get(reference, {})
            self.steps[prefix + name] = self._facts(task, inner)
            self._walk(inner, f"{prefix}{name}/")

    def _facts(self, task: dict[str, Any], component: dict[str, Any]) -> dict[str, Any]:
        label = component.get("executorLabel", "")
        executor = self._ir.get("deploymentSpec", {}).get("executors", {}).get(label, {})
        container = executor.get("container", {})
        return {
            "image": str(container.get("image", "")),
            "command": [*container.get("command", []), *container.get("args", [])],
            "resources": _resources(container.get("resources", {})),
            "environment": {str(one["name"]): one.get("value", "") for one in container.get("env", [])},
            "inputs": _definitions(component.get("inputDefinitions", {})),
            "outputs": _definitions(component.get("outputDefinitions", {})),
            "wiring": _wiring(task),
            "results": dict(_flat(component.get("dag", {}).get("outputs", {}))),
            "after": sorted(map(str, task.get("dependentTasks", []))),
            "condition": _condition(task),
            "loop": dict(_flat({key: task[key] for key in task if "terator" in key})),
            "retry": dict(_flat(task.get("retryPolicy", {}))),
            "cache": bool(task.get("cachingOptions", {}).get("enableCache")),
            "kubernetes": _settings(self._kubernetes.get("deploymentSpec", {}).get("executors", {}).get(label, {})),
            "other": {
                **dict(_flat({key: part for key, part in executor.items() if key != "container"})),
                **dict(_flat({key: part for key, part in component.items() if key not in KNOWN_OF_COMPONENT})),
            },
        }


KNOWN_OF_COMPONENT = ("dag", "executorLabel", "inputDefinitions", "outputDefinitions")
WORDS = {
    "resources": "requests and limits",
    "environment": "environment",
    "wiring": "input",
    "results": "result",
    "loop": "loop",
    "retry": "retry",
    "kubernetes": "Kubernetes",
    "other": "setting",
}


def _steps(before: Outline, after: Outline) -> Iterator[str]:
    gone, come = before.steps.keys() - after.steps.keys(), after.steps.keys() - before.steps.keys()
    for name in sorted(gone):
        yield f"step {name}: removed"
    for name in sorted(come):
        image = after.steps[name]["image"]
        yield f"step {name}: added" + (f", in image {image}" if image else "")


def _step(name: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Changes of one step that is in both."""
    start = f"step {name}: "
    if before["image"] != after["image"]:
        yield start + _image(before["image"], after["image"])
    if before["command"] != after["command"]:
        yield f"{start}command changed from {_shown(before['command'])} to {_shown(after['command'])}"
    for side in ("inputs", "outputs"):
        yield from _changes(start, before[side], after[side], side.removesuffix("s") + " parameter")
    if before["after"] != after["after"]:
        lost = sorted(set(before["after"]) - set(after["after"]))
        won = sorted(set(after["after"]) - set(before["after"]))
        parts = [f"no longer waits for {', '.join(lost)}"] * bool(lost) + [f"now waits for {', '.join(won)}"] * bool(
            won
        )
        yield start + " and ".join(parts)
    if before["condition"] != after["condition"]:
        yield f"{start}condition changed from {before['condition'] or 'none'} to {after['condition'] or 'none'}"
    if before["cache"] != after["cache"]:
        yield f"{start}caching turned {'on' if after['cache'] else 'off'}"
    for part, word in WORDS.items():
        yield from _changes(start, before[part], after[part], word)


def _image(before: str, after: str) -> str:
    """A change of an image; of one whose name stays, only the version."""
    old_name, old_version = _split(before)
    new_name, new_version = _split(after)
    if old_name == new_name and before and after:
        return f"image {new_name} changed from {old_version} to {new_version}"
    return f"image changed from {before or 'none'} to {after or 'none'}"


def _split(reference: str) -> tuple[str, str]:
    name, _, digest = reference.partition("@")
    if digest:
        return name, digest
    head, colon, tag = name.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (name, "latest")


def _changes(start: str, before: dict[str, Any], after: dict[str, Any], word: str = "") -> Iterator[str]:
    """Entries of a mapping that came, went or changed."""
    space = f"{word} " if word else ""
    for key in sorted(before.keys() | after.keys()):
        if key not in after:
            yield f"{start}{space}{key} removed (was {_shown(before[key])})"
        elif key not in before:
            yield f"{start}{space}{key} added: {_shown(after[key])}"
        elif before[key] != after[key]:
            yield f"{start}{space}{key} changed from {_shown(before[key])} to {_shown(after[key])}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    text = " ".join(text.split())
    text = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    return text if text else "''"


def _definitions(definitions: dict[str, Any]) -> dict[str, str]:
    """Type and default of each parameter and artifact, in words."""
    written = {}
    for name, definition in definitions.get("parameters", {}).items():
        words = definition.get("parameterType", "").lower()
        if "defaultValue" in definition:
            words += f" with default {json.dumps(definition['defaultValue'], sort_keys=True)}"
        elif definition.get("isOptional"):
            words += ", optional"
        if definition.get("literals"):
            words += f", one of {json.dumps(definition['literals'])}"
        written[name] = words
    for name, definition in definitions.get("artifacts", {}).items():
        kind = definition.get("artifactType", {})
        words = f"artifact {kind.get('schemaTitle') or kind.get('instanceSchema', '')}"
        words += ", a list" if definition.get("isArtifactList") else ""
        written[name] = words + (", optional" if definition.get("isOptional") else "")
    return written


def _resources(resources: dict[str, Any]) -> dict[str, Any]:
    """Requests and limits, each once: KFP writes an amount as it was given and, for older backends, as a number."""
    written = dict(_flat(resources))
    for key in list(written):
        if f"resource{key[:1].upper()}{key[1:]}" in written:
            del written[key]
    names = {key: key.removeprefix("resource") for key in written}
    return {name[:1].lower() + name[1:]: written[key] for key, name in names.items()}


def _wiring(task: dict[str, Any]) -> dict[str, str]:
    """Where each input of a task comes from, in words."""
    inputs = task.get("inputs", {})
    written = {}
    for name, source in (*inputs.get("parameters", {}).items(), *inputs.get("artifacts", {}).items()):
        kind = next((key for key in source if key != "parameterExpressionSelector"), "")
        place = source.get(kind)
        if kind in ("taskOutputParameter", "taskOutputArtifact"):
            key = place.get("outputParameterKey") or place.get("outputArtifactKey")
            words = f"{place.get('producerTask')}.{key}"
        elif kind in ("componentInputParameter", "componentInputArtifact"):
            words = f"parameter {place}"
        elif kind == "runtimeValue":
            words = f"constant {json.dumps(place.get('constant'), sort_keys=True)}"
        elif kind == "taskFinalStatus":
            words = f"status of {place.get('producerTask')}"
        else:
            words = json.dumps(source, sort_keys=True)
        selector = source.get("parameterExpressionSelector")
        written[name] = words + (f", {selector}" if selector else "")
    return written


def _condition(task: dict[str, Any]) -> str:
    policy = task.get("triggerPolicy", {})
    words = [policy["condition"]] if policy.get("condition") else []
    if policy.get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED":
        words.append("whatever happened before")
    return " and ".join(words)


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of kfp-kubernetes, flat; secrets and config maps by what they become in the pod, never their values."""
    written: dict[str, Any] = {}
    rest = dict(settings)
    for group, keys in (("secretAsEnv", "secretKey"), ("configMapAsEnv", "configMapKey")):
        for one in rest.pop(group, []):
            name = one.get("secretName") or one.get("configMapName") or json.dumps(one, sort_keys=True)
            for key in one.get("keyToEnv", []):
                optional = ", optional" if one.get("optional") else ""
                written[f"env {key.get('envVar')}"] = f"{group[:-5]} {name} key {key.get(keys)}{optional}"
    for group in ("secretAsVolume", "configMapAsVolume", "pvcMount", "emptyDirMounts", "genericEphemeralVolume"):
        for one in rest.pop(group, []):
            about = {key: part for key, part in one.items() if not key.endswith("Parameter") and key != "mountPath"}
            written[f"mount {one.get('mountPath')}"] = f"{group} {json.dumps(about, sort_keys=True)}"
    return {**written, **dict(_flat(rest))}


def _flat(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings by their dotted keys; a list is one leaf."""
    if isinstance(part, dict):
        for key in part:
            yield from _flat(part[key], f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, part
