"""Versions in MLflow's model registry: registered once, found by tag, moved between aliases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from components.tracking.client import answering, open_client

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CANDIDATE = "candidate"
CHAMPION = "champion"
IDENTITY = ("tracking_run", "train_step", "weights_digest")
"""Tags that together say which weights of which run a version is."""


class Version(NamedTuple):
    """One version of a registered model."""

    number: str
    tags: dict[str, str]


class Registry:
    """The versions of one registered model. Every method raises `ServiceGone` when the server does not answer.

    Args:
        uri: Tracking server.
        name: The registered model.
    """

    def __init__(self, uri: str, name: str) -> None:
        self.uri = uri
        self.name = name
        self.client: MlflowClient = open_client(uri)

    def register(self, tags: Mapping[str, str], params: Mapping[str, str]) -> Version:
        """Register weights that lie in a store, or find the version that an earlier try registered.

        A LoggedModel in state READY stands behind the version; no weights are uploaded to MLflow.

        Args:
            tags: Set on both; must hold `IDENTITY`.
            params: Set on the LoggedModel.
        """
        with answering(self.uri):
            self._ensure_model()
            version = self._find(tags)
            if version is None:
                version = self._create(tags, params)
            return _version(version)

    def by_alias(self, alias: str) -> Version | None:
        """The version an alias points at, or None."""
        from mlflow.exceptions import MlflowException

        with answering(self.uri):
            try:
                return _version(self.client.get_model_version_by_alias(self.name, alias))
            except MlflowException as error:
                # Depending on what is missing, model or alias, the server names it one way or the other.
                if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    return None
                raise

    def get(self, number: str) -> Version:
        """The version with a number."""
        with answering(self.uri):
            return _version(self.client.get_model_version(self.name, number))

    def point(self, alias: str, number: str) -> None:
        """Make an alias point at a version."""
        with answering(self.uri):
            self.client.set_registered_model_alias(self.name, alias, number)

    def tag(self, number: str, tags: Mapping[str, str]) -> None:
        """Set tags on a version."""
        with answering(self.uri):
            for key, value in tags.items():
                self.client.set_model_version_tag(self.name, number, key, value)

    def _ensure_model(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(self.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _find(self, tags: Mapping[str, str]) -> ModelVersion | None:
        conditions = [f"name = '{self.name}'", *(f"tag.`{key}` = '{tags[key]}'" for key in IDENTITY)]
        found = self.client.search_model_versions(" and ".join(conditions), max_results=1)
        return found[0] if found else None

    def _create(self, tags: Mapping[str, str], params: Mapping[str, str]) -> ModelVersion:
        run_id = tags["tracking_run"]
        experiment_id = self.client.get_run(run_id).info.experiment_id
        label = f"{self.name}-step-{tags['train_step']}"
        logged = self.client.search_logged_models(
            [experiment_id],
            f"name = '{label}' and source_run_id = '{run_id}' and tags.`weights_digest` = '{tags['weights_digest']}'",
            max_results=1,
        )
        if logged:
            model_id = logged[0].model_id
        else:
            created = self.client.create_logged_model(
                experiment_id, label, run_id, tags=dict(tags), params=dict(params), model_type="policy"
            )
            model_id = created.model_id
        self.client.finalize_logged_model(model_id, "READY")
        version = self.client.create_model_version(
            self.name, source=f"models:/{model_id}", run_id=run_id, tags=dict(tags), model_id=model_id
        )
        # The server keeps no link from the model to its version; MLflow's own pages read it from this tag.
        link = json.dumps([{"name": self.name, "version": version.version}])
        self.client.set_logged_model_tags(model_id, {"mlflow.modelVersions": link})
        return version


def _version(version: ModelVersion) -> Version:
    return Version(str(version.version), dict(version.tags))
