"""Runs and recurring runs of Kubeflow's API, read as executions and schedules."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from typing import Any

from components.cluster.api import Cluster
from configs.failure import DEFECT
from pipelines.compile import POST_TRAINING, read_ir
from pipelines.pods import last_line, trouble
from pipelines.targets.pod_logs import part_of
from pipelines.targets.target import ExecutionState, Schedule, State, StepState

STATES: dict[str, State] = {
    "RUNTIME_STATE_UNSPECIFIED": "pending", "PENDING": "pending", "PAUSED": "pending", "RUNNING": "running",
    "CANCELING": "running", "SUCCEEDED": "succeeded", "SKIPPED": "succeeded", "FAILED": "failed", "CANCELED": "canceled",
}  # fmt: skip


@cache
def step_names() -> frozenset[str]:
    """Names of the pipeline's steps; Kubeflow lists drivers and groups beside them."""
    ir = read_ir(POST_TRAINING)[0]
    dags = [ir["root"]["dag"], *(part["dag"] for part in ir["components"].values() if "dag" in part)]
    return frozenset(
        name
        for dag in dags
        for name, task in dag["tasks"].items()
        if "executorLabel" in ir["components"][task["componentRef"]["name"]]
    )


def execution_state(run: Any, host: str, steps: bool = False) -> ExecutionState:
    """Read a V2beta1Run."""
    parameters = (run.runtime_config.parameters if run.runtime_config else None) or {}
    config = str(parameters.get("config", ""))
    try:
        own = str(json.loads(config)["name"])
    except (ValueError, KeyError, TypeError):
        own = run.display_name
    state = STATES.get(str(run.state or "PENDING"), "pending")
    found = ExecutionState(
        name=run.display_name,
        run=own,
        state=state,
        created=run.created_at,
        started=run.created_at,
        ended=run.finished_at if state in ("succeeded", "failed", "canceled") else None,
        digest=hashlib.sha256(config.encode()).hexdigest()[:12],
        config=config,
        schedule=run.recurring_run_id or "",
        link=f"{host}/#/runs/details/{run.run_id}",
        sentence=" ".join((run.error.message or "").split()) if run.error and state == "failed" else "",
        exit_code=DEFECT if state == "failed" else 0,
    )
    return replace(found, steps=_steps(run)) if steps else found


def _steps(run: Any) -> tuple[StepState, ...]:
    details = (run.run_details.task_details if run.run_details else None) or []
    tasks = [task for task in details if task.display_name in step_names()]
    return tuple(
        StepState(
            name=task.display_name,
            state=STATES.get(str(task.state or "PENDING"), "pending"),
            started=task.start_time or task.create_time,
            ended=task.end_time,
            words=" ".join((task.error.message or "").split()) if task.error else "",
        )
        for task in sorted(tasks, key=lambda task: (str(task.create_time or "9"), task.display_name))
    )


def with_pods(state: ExecutionState, run_id: str, cluster: Cluster) -> ExecutionState:
    """Add what the pods know: why one waits, and the sentence and exit code of a step that failed."""
    steps, told = {step.name: step for step in state.steps}, False
    for pod in cluster.find("v1", "Pod", f"pipeline/runid={run_id}"):
        step = part_of(pod)
        if step not in step_names():
            continue
        name, found = pod["metadata"]["name"], trouble(pod)
        if found and not state.over:
            known = steps.get(step, StepState(step, "pending"))
            steps[step] = replace(known, state="pending", words=found.sentence, lasting=found.lasting)
        if state.state == "failed" and pod.get("status", {}).get("phase") == "Failed" and not told:
            own = f"{step.replace('-', '_')}: "
            said = last_line(cluster.pod_log(name, "main", tail=20), own)
            sentence = (
                f"{own}{found.sentence}"
                if found
                else said
                if said.startswith(own)
                else f"{own}failed; its last line: {said}"
            )
            state, told = replace(state, sentence=sentence, exit_code=_exit_code(pod)), True
    return replace(state, steps=tuple(steps.values()))


def _exit_code(pod: dict[str, Any]) -> int:
    for container in pod.get("status", {}).get("containerStatuses", []):
        if container["name"] == "main":
            return int(container.get("state", {}).get("terminated", {}).get("exitCode") or DEFECT)
    return DEFECT


def schedule_of(recurring: Any) -> Schedule:
    """Read a V2beta1RecurringRun."""
    cron = recurring.trigger.cron_schedule.cron if recurring.trigger and recurring.trigger.cron_schedule else ""
    fields = cron.split()
    return Schedule(
        name=recurring.display_name,
        cron=" ".join(fields[1:]) if len(fields) == 6 else cron,
        timezone="",
        enabled=str(recurring.status or recurring.mode) in ("ENABLED", "ENABLE"),
    )
