"""Executions on Kubeflow Pipelines: the compiled pipeline is uploaded as a version and run through `kfp.Client`.

A run keeps its id through retries, so an execution is a Kubeflow run and has the run's name. Kubeflow itself tells
states and its own errors; a step's own sentence and its logs are in the pods, which are read if a cluster context is
given too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from components.cluster.api import Cluster
from configs.failure import BadConfig, Failure, ServiceGone
from configs.stack import load_stack
from pipelines.compile import compile_pipeline, read_ir
from pipelines.readiness import check_cluster, images_of_this_machine
from pipelines.submission import Submission, same_or_refuse
from pipelines.targets.kubeflow_runs import execution_state, schedule_of, with_pods
from pipelines.targets.pod_logs import PodLogs
from pipelines.targets.run_objects import end_objects
from pipelines.targets.target import ExecutionState, Schedule

SCHEDULED_NAME = "{name}-[[CurrentTime.20060102-150405]]"
"""Kubeflow replaces the macro by the time (in Go's notation) when it starts a scheduled run."""
ANSWER_S = 20.0
CANCEL_LIMIT_S = 120.0
POLL_S = 1.0
PAGE = 100


class KubeflowTarget:
    """A Kubeflow Pipelines API server; in multi-user mode, one profile's namespace of it."""

    name = "kubeflow"

    def __init__(self, host: str, namespace: str, cluster: Cluster | None = None) -> None:
        self.host = host.rstrip("/")
        self.namespace = namespace
        self.cluster = cluster

    def check(self, submission: Submission) -> list[str]:
        """Look for everything a run needs; without a cluster context only the API server can be looked at."""
        _ = self.client
        if self.cluster is None:
            unseen = "gave no --context, so the cluster behind Kubeflow was not looked at"
            return [unseen, *images_of_this_machine(submission)]
        return check_cluster(self.cluster, submission, ())

    def submit(self, submission: Submission) -> ExecutionState:
        """Start the run, or find the execution that has its name and configuration."""
        found = self._runs(submission.name)
        if found:
            same_or_refuse(submission, execution_state(found[0], self.host))
            return self._state(found[0].run_id)
        pipeline, version = self._upload(submission)
        experiment = self._experiment(submission)
        run = self._ask(
            lambda: self.client.run_pipeline(
                experiment_id=experiment,
                job_name=submission.name,
                pipeline_id=pipeline,
                version_id=version,
                params=submission.arguments(),
                pipeline_root=submission.pipeline_root,
            ),
            f"start run '{submission.name}'",
        )
        return self._state(run.run_id)

    def schedule(self, submission: Submission, cron: str, timezone: str) -> Schedule:
        """Start a run of this configuration at every time of `cron`; the same name again replaces the schedule."""
        if timezone not in ("", "UTC"):
            raise BadConfig(
                f"--timezone {timezone}: Kubeflow schedules all by its server's CRON_SCHEDULE_TIMEZONE; leave it out and give"
                " --cron in that zone"
            )
        pipeline, version = self._upload(submission)
        experiment = self._experiment(submission)
        earlier = [one for one in self._recurring() if one.display_name == submission.name]
        made = self._ask(
            lambda: self.client.create_recurring_run(
                experiment_id=experiment,
                job_name=submission.name,
                # Kubeflow's cron begins with seconds.
                cron_expression=cron if cron.startswith("@") else f"0 {cron}",
                max_concurrency=1,
                no_catchup=True,
                params=submission.arguments(SCHEDULED_NAME.format(name=submission.name)),
                pipeline_id=pipeline,
                version_id=version,
                pipeline_root=submission.pipeline_root,
            ),
            f"make schedule '{submission.name}'",
        )
        # A recurring run cannot be changed; the old one goes once the new one is there.
        for one in earlier:
            self._delete_recurring(one)
        return schedule_of(made)

    def schedules(self) -> list[Schedule]:
        """The schedules there are."""
        return [schedule_of(one) for one in self._recurring()]

    def unschedule(self, name: str) -> None:
        """Remove a schedule; what it started goes on."""
        found = self._recurring()
        chosen = [one for one in found if one.display_name == name]
        if not chosen:
            known = ", ".join(one.display_name for one in found) or "none"
            raise BadConfig(f"Kubeflow at {self.host} has no schedule '{name}'; known: {known}")
        for one in chosen:
            self._delete_recurring(one)

    def executions(self) -> list[ExecutionState]:
        """All executions, the newest first, without their steps."""
        pipeline = self._pipeline_id()
        found = [run for run in self._list_runs() if _pipeline_of(run) == pipeline] if pipeline else []
        states = [execution_state(run, self.host) for run in found]
        return sorted(states, key=lambda state: state.created, reverse=True)

    def status(self, name: str) -> ExecutionState:
        """One execution with its steps."""
        return self._state(self._run_id(name))

    def logs(self, name: str, part: str, follow: bool) -> Iterator[str]:
        """Lines of the steps and role pods of an execution; they are read from the cluster."""
        if self.cluster is None:
            raise BadConfig("logs are read from the pods; give the cluster behind Kubeflow by --context")
        run_id = self._run_id(name)
        logs = PodLogs(self.cluster, (f"pipeline/runid={run_id}", f"tandem.run={name}"), part)
        yield from logs.read()
        while follow and not self._state(run_id).over:
            time.sleep(2.0)
            yield from logs.read()
        if not logs.pods:
            raise BadConfig(f"execution {name} has no pod of '{part or 'any step'}' any more")

    def cancel(self, name: str, now: bool) -> ExecutionState:
        """End an execution and everything its run has on the cluster."""
        if now:
            raise BadConfig("--now: Kubeflow ends a run in one way only; leave it out")
        run_id = self._run_id(name)
        state = self._state(run_id)
        if not state.over:
            self._ask(lambda: self.client.terminate_run(run_id), f"cancel run '{name}'")
        if self.cluster is not None:
            end_objects(self.cluster, state.run)
        end = time.monotonic() + CANCEL_LIMIT_S
        # kfp's own wait does not know that a canceled run is over.
        while not (state := self._state(run_id)).over:
            if time.monotonic() > end:
                raise ServiceGone(
                    f"run {name} did not end within {CANCEL_LIMIT_S:.0f} s of its cancel; look at it in {state.link}"
                )
            time.sleep(POLL_S)
        return state

    def retry(self, name: str) -> ExecutionState:
        """Go on with a run that failed or was canceled: finished steps are not repeated."""
        run_id = self._run_id(name)
        state = self._state(run_id)
        if not state.over:
            raise BadConfig(f"execution {name} is still {state.state}; cancel it first, or wait")
        if state.state == "succeeded":
            raise BadConfig(f"execution {name} succeeded; there is nothing to retry")
        self._ask(lambda: self.client.runs.run_service_retry_run(run_id), f"retry run '{name}'")
        return self._state(run_id)

    # ---- inside

    @cached_property
    def client(self) -> Any:
        """kfp's client, once the API server has answered.

        Raises:
            ServiceGone: it does not answer.
            BadConfig: it wants a login.
        """
        multi_user = self._health()
        import kfp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client = kfp.Client(
                host=self.host,
                # A server for one user refuses a namespace; the word 'kubeflow' would read the last one from a file.
                namespace=self.namespace if multi_user else "",
                existing_token=os.environ.get("KFP_TOKEN"),
                cookies=os.environ.get("KFP_COOKIE"),
            )
        return client

    def _health(self) -> bool:
        """Ask whether the server is there; whether it serves several users."""
        import httpx

        headers = {"Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {token}"} if (token := os.environ.get("KFP_TOKEN")) else {}
        headers |= {"Cookie": cookie} if (cookie := os.environ.get("KFP_COOKIE")) else {}
        try:
            answer = httpx.get(f"{self.host}/apis/v2beta1/healthz", headers=headers, timeout=ANSWER_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServiceGone(
                f"Kubeflow Pipelines does not answer at {self.host} ({str(error) or type(error).__name__}); check --host, or"
                " forward its port: kubectl -n kubeflow port-forward svc/ml-pipeline 8888"
            ) from None
        if answer.status_code in (301, 302, 303, 307, 401, 403):
            raise BadConfig(
                f"Kubeflow Pipelines at {self.host} wants a login (HTTP {answer.status_code}); set KFP_TOKEN or KFP_COOKIE"
                " (docs/kubeflow.md)"
            )
        try:
            if answer.status_code != 200:
                raise ValueError
            return bool(answer.json().get("multi_user"))
        except (ValueError, AttributeError):
            raise BadConfig(
                f"{self.host} is no Kubeflow Pipelines API (HTTP {answer.status_code} for its health); check --host"
            ) from None

    def _upload(self, submission: Submission) -> tuple[str, str]:
        """Ids of the pipeline and of the version with this content; uploaded if they are not there."""
        with tempfile.TemporaryDirectory() as folder:
            ir = Path(folder) / "pipeline.yaml"
            compile_pipeline(load_stack(submission.config.stack), ir, submission.images)
            version = hashlib.sha256(ir.read_bytes()).hexdigest()[:12]
            name = self._pipeline_name(ir)
            pipeline = self._pipeline_id(name)
            if pipeline is None:
                uploaded = self._ask(
                    lambda: self.client.upload_pipeline(str(ir), pipeline_name=name), "upload the pipeline"
                )
                pipeline = str(uploaded.pipeline_id)
            for known in self._pages(
                lambda token: self.client.list_pipeline_versions(pipeline, token, PAGE), "pipeline_versions"
            ):
                if known.display_name == version:
                    return pipeline, str(known.pipeline_version_id)
            made = self._ask(
                lambda: self.client.upload_pipeline_version(str(ir), version, pipeline_id=pipeline),
                f"upload version {version}",
            )
        return pipeline, str(made.pipeline_version_id)

    def _pipeline_name(self, ir: Path | None = None) -> str:
        from pipelines.compile import POST_TRAINING

        return str(read_ir(ir or POST_TRAINING)[0]["pipelineInfo"]["name"])

    def _pipeline_id(self, name: str | None = None) -> str | None:
        wanted = name or self._pipeline_name()
        found: str | None = self._ask(lambda: self.client.get_pipeline_id(wanted), f"find pipeline '{wanted}'")
        return found

    def _experiment(self, submission: Submission) -> str:
        name = submission.config.tracking.experiment
        made = self._ask(lambda: self.client.create_experiment(name), f"make experiment '{name}'")
        return str(made.experiment_id)

    def _list_runs(self, predicate: dict[str, str] | None = None) -> list[Any]:
        filter_ = json.dumps({"predicates": [predicate]}) if predicate else None
        return self._pages(lambda token: self.client.list_runs(token, PAGE, "created_at desc", filter=filter_), "runs")

    def _runs(self, name: str) -> list[Any]:
        """Runs of that name, the newest first."""
        found = self._list_runs({"operation": "EQUALS", "key": "display_name", "stringValue": name})
        return sorted((run for run in found if run.display_name == name), key=lambda run: run.created_at, reverse=True)

    def _run_id(self, name: str) -> str:
        found = self._runs(name)
        if found:
            return str(found[0].run_id)
        # A scheduled run has a name of Kubeflow's making; the run's own stands in its configuration.
        states = {execution_state(run, self.host).run: run.run_id for run in reversed(self._list_runs())}
        if name in states:
            return str(states[name])
        known = ", ".join(list(states)[-5:]) or "none"
        raise BadConfig(f"Kubeflow at {self.host} has no execution '{name}'; the newest: {known}")

    def _state(self, run_id: str) -> ExecutionState:
        run = self._ask(lambda: self.client.get_run(run_id), f"look at run {run_id}")
        state = execution_state(run, self.host, steps=True)
        if self.cluster is None or state.state == "succeeded":
            return state
        try:
            return with_pods(state, run_id, self.cluster)
        except Failure:
            return state

    def _recurring(self) -> list[Any]:
        namespace = self.client.get_user_namespace() or None
        return self._pages(
            lambda token: self.client.list_recurring_runs(token, PAGE, namespace=namespace), "recurring_runs"
        )

    def _delete_recurring(self, one: Any) -> None:
        self._ask(
            lambda: self.client.delete_recurring_run(one.recurring_run_id), f"remove schedule '{one.display_name}'"
        )

    def _pages(self, call: Callable[[str], Any], key: str) -> list[Any]:
        found: list[Any] = []
        token = ""
        while True:
            page = self._ask(lambda token=token: call(token), f"list {key.replace('_', ' ')}")  # type: ignore[misc]
            found += getattr(page, key) or []
            token = page.next_page_token or ""
            if not token:
                return found

    def _ask(self, call: Callable[[], Any], what: str) -> Any:
        """Make a request through kfp's client, which also prints; its errors become sentences."""
        from kfp_server_api import ApiException
        from urllib3.exceptions import HTTPError

        _ = self.client
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return call()
        except ApiException as error:
            raise self._refusal(error, what) from None
        except HTTPError as error:
            words = " ".join(str(error).split())[:160]
            raise ServiceGone(
                f"Kubeflow Pipelines at {self.host} stopped answering when asked to {what} ({words}); try again"
            ) from None

    def _refusal(self, error: Any, what: str) -> Failure:
        try:
            told = json.loads(error.body or "{}")
            words = str(told.get("message") or told.get("error") or error.reason)
        except (ValueError, AttributeError):
            words = str(error.reason)
        words = " ".join(words.split())[:300]
        if error.status in (401, 403):
            return BadConfig(
                f"Kubeflow Pipelines at {self.host} does not allow you to {what} ({words}); set KFP_TOKEN or KFP_COOKIE"
            )
        if not error.status or error.status >= 500:
            return ServiceGone(f"Kubeflow Pipelines at {self.host} failed to {what} ({words}); try again")
        return BadConfig(f"Kubeflow Pipelines at {self.host} refuses to {what}: {words}")


def _pipeline_of(run: Any) -> str | None:
    reference = run.pipeline_version_reference
    return reference.pipeline_id if reference else None
