"""The run's record in MLflow: found or created once, written to by several processes, ended by one of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from components.storage.layout import RunLayout
from components.tracking.client import answering, open_client, tracking_uri
from configs.failure import BadConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from configs.run import RunConfig

PLACE_TAG = "tandem.store"
"""Tag with the URI of the run's store: two runs of one name in different places are two runs."""
RUN_TAG = "tandem.run"
"""Tag with the run's name, by which a retried step finds the run it created."""
Point = tuple[str, float, int, float]
"""Metric key, value, step, seconds since the epoch."""
_METRICS_A_CALL = 1000
_PARAMS_A_CALL = 100
_PARAM_CHARACTERS = 6000


def open_run(config: RunConfig, tags: Mapping[str, str] | None = None) -> str:
    """The id of this run's MLflow run, which is created if it is not there yet.

    `MLFLOW_RUN_ID` wins: that run is adopted and the variable stays for the processes started later. Else the
    run with this name and place is taken up again, so that a retried step or a resumed run creates no second one.

    Args:
        config: Names the server, the experiment and the run.
        tags: Set on the run.

    Raises:
        BadConfig: `MLFLOW_RUN_ID` names no run of this server, or the experiment was deleted.
        ServiceGone: the server does not answer.
    """
    uri = tracking_uri(config)
    client = open_client(uri)
    with answering(uri):
        run_id = os.environ.get("MLFLOW_RUN_ID") or _known_run(client, config) or _new_run(client, config)
        _adopt(client, uri, run_id, {RUN_TAG: config.name, **(tags or {})})
    return run_id


def _adopt(client: MlflowClient, uri: str, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise BadConfig(
            f"MLFLOW_RUN_ID {run_id} is no run of the tracking server at {uri}; unset it, or set tracking.uri to its server"
        ) from None
    if run.info.status != "RUNNING":
        client.update_run(run_id, status="RUNNING")
    _log(client, run_id, tags=tags)


def _known_run(client: MlflowClient, config: RunConfig) -> str | None:
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    if experiment is None:
        return None
    found = client.search_runs(
        [experiment.experiment_id],
        f"tags.`{RUN_TAG}` = '{config.name}' and tags.`{PLACE_TAG}` = '{RunLayout(config).uri}'",
        max_results=1,
        order_by=["attributes.start_time DESC"],
    )
    return found[0].info.run_id if found else None


def _new_run(client: MlflowClient, config: RunConfig) -> str:
    experiment_id = _experiment(client, config.tracking.experiment)
    run = client.create_run(
        experiment_id, run_name=config.name, tags={RUN_TAG: config.name, PLACE_TAG: RunLayout(config).uri}
    )
    return run.info.run_id


def _experiment(client: MlflowClient, name: str) -> str:
    from mlflow.exceptions import MlflowException

    existing = client.get_experiment_by_name(name)
    if existing is None:
        try:
            return client.create_experiment(name)
        except MlflowException as error:
            # Another run may create it between the look and the call.
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            existing = client.get_experiment_by_name(name)
    if existing is None or existing.lifecycle_stage == "deleted":
        raise BadConfig(
            f"tracking.experiment '{name}' was deleted on the tracking server; restore it there or choose another name"
        )
    return existing.experiment_id


def _log(
    client: MlflowClient,
    run_id: str,
    metrics: Sequence[Point] = (),
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> None:
    """Send metrics, params and tags in calls no larger than the server takes."""
    from mlflow.entities import Metric, Param, RunTag

    points = [Metric(key, float(value), round(time_s * 1000), step) for key, value, step, time_s in metrics]
    for at in range(0, len(points), _METRICS_A_CALL):
        client.log_batch(run_id, metrics=points[at : at + _METRICS_A_CALL])
    values = [Param(key, value) for key, value in (params or {}).items()]
    for at in range(0, len(values), _PARAMS_A_CALL):
        client.log_batch(run_id, params=values[at : at + _PARAMS_A_CALL])
    labels = [RunTag(key, str(value)) for key, value in (tags or {}).items()]
    for at in range(0, len(labels), _PARAMS_A_CALL):
        client.log_batch(run_id, tags=labels[at : at + _PARAMS_A_CALL])


class Tracker:
    """Writes to one MLflow run; several processes may each hold one for the same run.

    Only `end` closes the run. Every method raises `ServiceGone` when the server does not answer.

    Args:
        uri: Tracking server.
        run_id: The run, from `open_run`.
    """

    def __init__(self, uri: str, run_id: str) -> None:
        self.uri = uri
        self.run_id = run_id

    @cached_property
    def client(self) -> MlflowClient:
        """MLflow's own client of the same server."""
        return open_client(self.uri)

    def log_config(self, config: RunConfig) -> None:
        """Log the configuration as parameters (`train.steps`) and as the artifact `config.yaml`.

        MLflow's parameters never change. A resumed run's changed ones become tags `config.changed.<key>`.
        """
        wanted = {key: str(value)[:_PARAM_CHARACTERS] for key, value in flattened(config.model_dump(mode="json"))}
        client = self.client
        with answering(self.uri):
            logged = client.get_run(self.run_id).data.params
            missing = {key: value for key, value in wanted.items() if key not in logged}
            changed = {
                f"config.changed.{key}": value for key, value in wanted.items() if logged.get(key, value) != value
            }
            _log(client, self.run_id, params=missing, tags=changed)
            client.log_text(self.run_id, config.to_yaml(), "config.yaml")

    def log_metrics(self, points: Sequence[Point]) -> None:
        """Log scalars.

        Args:
            points: `(key, value, step, seconds since the epoch)`, any number.
        """
        client = self.client
        with answering(self.uri):
            _log(client, self.run_id, metrics=points)

    def log_text(self, path: str, text: str) -> None:
        """Log `text` as the artifact `path`."""
        client = self.client
        with answering(self.uri):
            client.log_text(self.run_id, text, path)

    def log_file(self, file: Path, folder: str = "") -> None:
        """Log a local file as an artifact under `folder`, with its own name."""
        client = self.client
        with answering(self.uri):
            client.log_artifact(self.run_id, str(file), folder or None)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], cap: int, table: str = "samples") -> int:
        """Append rows to a table of the run (`<table>.json`) while it has fewer than `cap`.

        Args:
            rows: Rows with the same keys.
            cap: Rows the table may have; the rest is left out.
            table: Name of the table.

        Returns:
            Rows logged.
        """
        client = self.client
        tag = f"{table}.rows"
        with answering(self.uri):
            logged = int(client.get_run(self.run_id).data.tags.get(tag, "0"))
            fitting = rows[: max(0, cap - logged)]
            if fitting:
                columns = {key: [row[key] for row in fitting] for key in fitting[0]}
                client.log_table(self.run_id, columns, f"{table}.json")
                client.set_tag(self.run_id, tag, logged + len(fitting))
        return len(fitting)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags on the run."""
        client = self.client
        with answering(self.uri):
            _log(client, self.run_id, tags=tags)

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> None:
        """Close the run; `resume` opens it again."""
        client = self.client
        with answering(self.uri):
            client.set_terminated(self.run_id, status)

    def resume(self) -> None:
        """Mark the run as running again, after a run that ended is taken up."""
        client = self.client
        with answering(self.uri):
            client.update_run(self.run_id, status="RUNNING")


def flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings as `(dotted key, value)` pairs, in order."""
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            pairs += flattened(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
