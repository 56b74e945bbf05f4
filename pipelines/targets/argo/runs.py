"""Executions on Argo Workflows: the translated pipeline is applied, watched, ended and repeated through the API server."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.cluster.api import Access, Cluster
from configs.failure import BadConfig, Failure, ServiceGone
from configs.stack import load_stack
from pipelines.compile import compile_pipeline
from pipelines.readiness import LOOKING, account_exists, check_access, check_cluster
from pipelines.submission import Submission, retry_name, same_or_refuse
from pipelines.targets.argo.nodes import execution_state
from pipelines.targets.pod_logs import PodLogs
from pipelines.targets.run_objects import end_objects
from pipelines.targets.target import ExecutionState, Schedule, StepState

API = "argoproj.io/v1alpha1"
GROUP = "argoproj.io"
ACCOUNT = "tandem-pipeline"
RUN_LABEL = "tandem.run"
DIGEST = "tandem.run/config"
NAME_LABEL = {"app.kubernetes.io/name": "tandem"}
OURS = "app.kubernetes.io/name=tandem"
WORKFLOW_NAME = "{{workflow.name}}"
"""What Argo replaces by the Workflow's own name: the run's name in a schedule."""
CANCEL_LIMIT_S = 90.0
"""Seconds a canceled Workflow has to end; its steps have 30 s to leave, its exit handler the rest."""
POLL_S = 0.5
TROUBLES = ("SpecError", "SubmissionError")
"""Conditions of a CronWorkflow that starts nothing."""
SUBMIT = (
    *(Access(verb, GROUP, "workflows") for verb in ("get", "list", "create")),
    *(Access(verb, "", "configmaps") for verb in ("create", "patch")),
)
SCHEDULE = (
    *(Access(verb, GROUP, "cronworkflows") for verb in ("get", "create", "patch")),
    *(Access(verb, "", "configmaps") for verb in ("create", "patch")),
)


class ArgoTarget:
    """Argo Workflows in one namespace."""

    name = "argo"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def check(self, submission: Submission) -> list[str]:
        """Look for everything a run needs; returns notes on what could not be looked at."""
        kinds = ((API, "Workflow", "Argo Workflows"), (API, "CronWorkflow", "Argo Workflows"))
        notes = check_cluster(self.cluster, submission, kinds, SUBMIT)
        account_exists(self.cluster, ACCOUNT, "`tandem install` makes it", notes)
        return notes

    def submit(self, submission: Submission) -> ExecutionState:
        """Start the run, or find the execution that has its name and configuration."""
        found = self._find(submission.name)
        if found is not None:
            same_or_refuse(submission, found)
            return self.status(submission.name)
        *others, workflow = self._objects(submission, submission.name, submission.arguments())
        for other in others:
            self.cluster.apply(other)
        try:
            self.cluster.create(_marked(workflow, submission))
        except BadConfig:
            # Another submission of the same name was faster.
            if (found := self._find(submission.name)) is None:
                raise
            same_or_refuse(submission, found)
        return self.status(submission.name)

    def schedule(self, submission: Submission, cron: str, timezone: str) -> Schedule:
        """Start a run of this configuration at every time of `cron`; the same name again replaces the schedule."""
        from pipelines.targets.argo.translation import cron as cron_workflow

        check_access(self.cluster, (*LOOKING, *SCHEDULE))
        *others, workflow = self._objects(submission, submission.name, submission.arguments(WORKFLOW_NAME))
        for other in others:
            self.cluster.apply(other)
        scheduled = cron_workflow(workflow, submission.name, cron, timezone=timezone or "UTC")
        scheduled["metadata"].setdefault("labels", {}).update(NAME_LABEL)
        metadata = scheduled["spec"].setdefault("workflowMetadata", {})
        metadata.setdefault("labels", {}).update(NAME_LABEL)
        metadata.setdefault("annotations", {})[DIGEST] = submission.digest
        applied = self.cluster.apply(scheduled)
        return _schedule(applied)

    def schedules(self) -> list[Schedule]:
        """The schedules there are."""
        return [_schedule(one) for one in self.cluster.find(API, "CronWorkflow", OURS)]

    def unschedule(self, name: str) -> None:
        """Remove a schedule; what it started goes on."""
        known = [schedule.name for schedule in self.schedules()]
        if name not in known:
            raise BadConfig(f"namespace '{self.cluster.namespace}' has no schedule '{name}'; known: {_listed(known)}")
        # What it started is owned by it and would go with it.
        self.cluster.delete(API, "CronWorkflow", name, "Orphan")

    def executions(self) -> list[ExecutionState]:
        """All executions, the newest first, without their steps."""
        found = [execution_state(workflow) for workflow in self.cluster.find(API, "Workflow", OURS)]
        return sorted(found, key=lambda state: (state.created, state.name), reverse=True)

    def status(self, name: str) -> ExecutionState:
        """One execution with its steps; a run's name means its newest execution."""
        workflow = self._workflow(name)
        execution = workflow["metadata"]["name"]
        pods = self.cluster.find("v1", "Pod", f"workflows.argoproj.io/workflow={execution}")
        state = execution_state(workflow, pods, self._words)
        return self._with_role_troubles(state)

    def logs(self, name: str, part: str, follow: bool) -> Iterator[str]:
        """Lines of the steps and role pods of an execution; `part` names one step or role, empty all."""
        state = self.status(name)
        selectors = (
            f"workflows.argoproj.io/workflow={state.name}",
            f"{RUN_LABEL}={state.run},!workflows.argoproj.io/workflow",
        )
        logs = PodLogs(self.cluster, selectors, part)
        yield from logs.read()
        while follow and not self.status(state.name).over:
            time.sleep(2.0)
            yield from logs.read()
        if not logs.pods:
            steps = [step.name for step in state.steps]
            raise BadConfig(
                f"execution {state.name} has no pod of '{part or 'any step'}' any more; its steps: {_listed(steps)}"
            )

    def cancel(self, name: str, now: bool) -> ExecutionState:
        """End an execution and everything its run has on the cluster.

        `Stop` ends the steps and lets the exit handler close the run's record, as Kubeflow's Terminate does; `now`
        (Argo's `Terminate`) leaves the exit handler out.

        Raises:
            BadConfig: it is over, and another execution of its run would lose what it has on the cluster.
            ServiceGone: something is left when the time is over; the sentence names it.
        """
        state = self.status(name)
        if state.over:
            self._refuse_for_another(state)
        else:
            check_access(self.cluster, (Access("patch", GROUP, "workflows"),))
            shutdown = "Terminate" if now else "Stop"
            self.cluster.patch(API, "Workflow", state.name, {"spec": {"shutdown": shutdown}})
        end_objects(self.cluster, state.run)
        end = time.monotonic() + CANCEL_LIMIT_S
        while not (state := self.status(state.name)).over:
            if time.monotonic() > end:
                raise ServiceGone(
                    f"execution {state.name} did not end within {CANCEL_LIMIT_S:.0f} s of its cancel; check that Argo's workflow"
                    f" controller runs, or use --now"
                )
            time.sleep(POLL_S)
        return state

    def retry(self, name: str) -> ExecutionState:
        """Go on with a run that failed or was canceled: finished steps repeat their outputs."""
        check_access(self.cluster, (*LOOKING, *SUBMIT))
        latest = self.status(name)
        if not latest.over:
            raise BadConfig(f"execution {latest.name} is still {latest.state}; cancel it first, or wait")
        if latest.state == "succeeded":
            raise BadConfig(f"run {latest.run} succeeded with execution {latest.name}; there is nothing to retry")
        workflow = self._workflow(latest.name)
        spec = {
            key: value for key, value in workflow["spec"].items() if key not in ("shutdown", "activeDeadlineSeconds")
        }
        spec = json.loads(json.dumps(spec).replace(WORKFLOW_NAME, latest.run))
        taken = [state.name for state in self.executions() if state.run == latest.run]
        metadata = workflow["metadata"]
        again = {
            "apiVersion": API,
            "kind": "Workflow",
            "metadata": {
                "name": retry_name(latest.run, taken),
                "namespace": self.cluster.namespace,
                "labels": {**NAME_LABEL, RUN_LABEL: latest.run},
                "annotations": {DIGEST: metadata.get("annotations", {}).get(DIGEST, "")},
            },
            "spec": spec,
        }
        return self.status(self.cluster.create(again)["metadata"]["name"])

    # ---- inside

    def _refuse_for_another(self, ended: ExecutionState) -> None:
        """What a run has on the cluster bears the run's name, whichever execution made it."""
        for other in self.executions():
            if other.run == ended.run and other.name != ended.name and not other.over:
                raise BadConfig(
                    f"execution {ended.name} is over, and {other.name} of the same run is {other.state};"
                    f" tandem cancel {other.name}"
                )

    def _objects(self, submission: Submission, name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """The launcher's ConfigMap and, last, the Workflow."""
        from pipelines.targets.argo.translation import translate

        with tempfile.TemporaryDirectory() as folder:
            ir = Path(folder) / "pipeline.yaml"
            compile_pipeline(load_stack(submission.config.stack), ir, submission.images)
            objects = translate(
                ir,
                name=name,
                namespace=self.cluster.namespace,
                arguments=arguments,
                service_account=ACCOUNT,
                pipeline_root=submission.pipeline_root,
                pull_policy=submission.config.kubernetes.pull_policy,
            )
        return sorted(objects, key=lambda one: one["kind"] == "Workflow")

    def _find(self, name: str) -> ExecutionState | None:
        workflow = self.cluster.get(API, "Workflow", name)
        return None if workflow is None else execution_state(workflow)

    def _workflow(self, name: str) -> dict[str, Any]:
        """The newest Workflow of a run, or the one of that name."""
        of_run = self.cluster.find(API, "Workflow", f"{RUN_LABEL}={name}")
        if of_run:
            return max(
                of_run,
                key=lambda one: (
                    one["metadata"]["creationTimestamp"],
                    len(one["metadata"]["name"]),
                    one["metadata"]["name"],
                ),
            )
        found = self.cluster.get(API, "Workflow", name)
        if found is None:
            known = [state.name for state in self.executions()][:5]
            raise BadConfig(
                f"namespace '{self.cluster.namespace}' has no execution '{name}'; the newest: {_listed(known)}"
            )
        return found

    def _words(self, pod: str, prefix: str) -> str:
        """The sentence a failed step ended with."""
        from pipelines.pods import last_line

        try:
            return last_line(self.cluster.pod_log(pod, "main", tail=20), prefix)
        except Failure:
            return ""

    def _with_role_troubles(self, state: ExecutionState) -> ExecutionState:
        """Add the pods of the loop that do not run, as steps of their own."""
        from pipelines.pods import trouble

        if state.over:
            return state
        rows = []
        for pod in self.cluster.find("v1", "Pod", f"{RUN_LABEL}={state.run},!workflows.argoproj.io/workflow"):
            if found := trouble(pod):
                rows.append(
                    StepState(
                        pod["metadata"]["name"], "pending", words=found.sentence, lasting=found.lasting, role=True
                    )
                )
        return replace(state, steps=(*state.steps, *rows)) if rows else state


def _marked(workflow: dict[str, Any], submission: Submission) -> dict[str, Any]:
    metadata = workflow["metadata"]
    metadata.setdefault("labels", {}).update({**NAME_LABEL, RUN_LABEL: submission.name})
    metadata.setdefault("annotations", {})[DIGEST] = submission.digest
    return workflow


def _schedule(scheduled: dict[str, Any]) -> Schedule:
    from pipelines.pods import moment

    spec, status = scheduled["spec"], scheduled.get("status") or {}
    troubles = [
        " ".join(str(one.get("message") or one["type"]).split())
        for one in status.get("conditions") or []
        if one.get("type") in TROUBLES and one.get("status") == "True"
    ]
    return Schedule(
        name=scheduled["metadata"]["name"],
        cron=" | ".join(spec.get("schedules", [])),
        timezone=spec.get("timezone", ""),
        enabled=not spec.get("suspend", False),
        last=moment(status.get("lastScheduledTime")),
        executions=tuple(one["name"] for one in status.get("active") or []),
        words="; ".join(troubles),
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
