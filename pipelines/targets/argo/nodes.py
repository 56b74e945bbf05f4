"""A Workflow's status read as an execution: its steps in order, and why it failed."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from configs.failure import DEFECT
from pipelines.pods import moment, trouble
from pipelines.targets.target import ExecutionState, State, StepState

STATES: dict[str, State] = {
    "": "pending", "Pending": "pending", "Running": "running", "Succeeded": "succeeded", "Failed": "failed", "Error": "failed",
    "Skipped": "succeeded", "Omitted": "succeeded",
}  # fmt: skip
NODE_ID = "workflows.argoproj.io/node-id"
Words = Callable[[str, str], str]
"""Gives the last line of a pod's log, or the last that begins with a prefix."""


def execution_state(
    workflow: dict[str, Any], pods: list[dict[str, Any]] | None = None, words: Words | None = None
) -> ExecutionState:
    """Read a Workflow.

    Args:
        workflow: The Workflow as the API server returns it.
        pods: Its pods; None leaves the steps out.
        words: Reads what a failed step said.
    """
    metadata, status = workflow["metadata"], workflow.get("status") or {}
    state = STATES[status.get("phase", "")]
    if state == "failed" and workflow["spec"].get("shutdown"):
        state = "canceled"
    labels = metadata.get("labels", {})
    run = labels.get("tandem.run", metadata["name"])
    found = ExecutionState(
        name=metadata["name"],
        run=run,
        state=state,
        created=moment(metadata["creationTimestamp"]),  # type: ignore[arg-type]
        started=moment(status.get("startedAt")),
        ended=moment(status.get("finishedAt")),
        digest=metadata.get("annotations", {}).get("tandem.run/config", ""),
        config=_argument(workflow, "config").replace("{{workflow.name}}", run),
        schedule=labels.get("workflows.argoproj.io/cron-workflow", ""),
    )
    if pods is None:
        return found
    nodes = [node for node in _nodes(status) if node.get("type") == "Pod"]
    by_node = {pod["metadata"].get("annotations", {}).get(NODE_ID): pod for pod in pods}
    steps = tuple(_step(node, by_node.get(node["id"]), found.over) for node in sorted(nodes, key=_order))
    found = replace(found, steps=steps)
    return _with_failure(found, status, nodes, by_node, words) if state == "failed" else found


def _argument(workflow: dict[str, Any], name: str) -> str:
    parameters = workflow["spec"].get("arguments", {}).get("parameters", [])
    return next((str(one.get("value", "")) for one in parameters if one["name"] == name), "")


def _nodes(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes; Argo packs them when there are many."""
    packed = status.get("compressedNodes")
    nodes = json.loads(gzip.decompress(base64.b64decode(packed))) if packed else status.get("nodes") or {}
    return list(nodes.values())


def _order(node: dict[str, Any]) -> tuple[str, str]:
    return node.get("startedAt") or "9", node["id"]


def _step(node: dict[str, Any], pod: dict[str, Any] | None, over: bool) -> StepState:
    state = STATES[node.get("phase", "")]
    if over and state in ("pending", "running"):
        # Argo leaves the nodes of a stopped Workflow as they stood; the pod knows how it went on.
        phase = (pod or {}).get("status", {}).get("phase")
        state = STATES[phase] if phase in ("Succeeded", "Failed") else "canceled"
    found = trouble(pod) if pod and state in ("pending", "running") else None
    words = found.sentence if found else node.get("message", "") if state in ("pending", "failed") else ""
    return StepState(
        name=step_name(node),
        state="pending" if found else state,
        started=moment(node.get("startedAt")),
        ended=moment(node.get("finishedAt")),
        words=" ".join(words.split()),
        lasting=bool(found and found.lasting),
    )


def step_name(node: dict[str, Any]) -> str:
    """The step a node is; an exit handler's node is named after what it follows, so its template tells."""
    name = str(node["displayName"])
    return str(node.get("templateName", name)).removeprefix("comp-") if name.endswith(".onExit") else name


def _with_failure(
    state: ExecutionState,
    status: dict[str, Any],
    nodes: list[dict[str, Any]],
    by_node: dict[str, dict[str, Any]],
    words: Words | None,
) -> ExecutionState:
    """Add the sentence and the exit code of the step that failed first."""
    failed = [node for node in nodes if STATES[node.get("phase", "")] == "failed"]
    if not failed:
        return replace(
            state,
            sentence=f"execution {state.name}: {status.get('message') or 'failed without a word'}",
            exit_code=DEFECT,
        )
    # Of a step's attempts the last one tells; of several steps the one that failed first.
    first = min(failed, key=lambda node: node.get("finishedAt") or "9")
    base = _base(first)
    node = max((one for one in failed if _base(one) == base), key=_order)
    pod, message = by_node.get(node["id"]), " ".join(node.get("message", "").split())
    own = f"{base.replace('-', '_')}: "
    said = words(pod["metadata"]["name"], own) if pod and words else ""
    found = trouble(pod) if pod else None
    code = _exit_code(node, message)
    if found is not None:
        sentence = f"{own}{found.sentence}"
    elif said.startswith(own):
        sentence = said
    else:
        sentence = f"{own}{message or 'failed'}" + (f"; its last line: {said}" if said else "")
    return replace(state, sentence=sentence, exit_code=code)


def _base(node: dict[str, Any]) -> str:
    """The step's name without the number of its attempt."""
    return re.sub(r"\(\d+\)$", "", step_name(node))


def _exit_code(node: dict[str, Any], message: str) -> int:
    given = (node.get("outputs") or {}).get("exitCode") or ""
    told = re.search(r"exit code (\d+)", message)
    text = given or (told[1] if told else "")
    return int(text) if text and int(text) else DEFECT
