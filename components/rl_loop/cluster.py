"""The Kubernetes API as rl_loop uses it: a few verbs, each failure a sentence."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ResourceNotFoundError
from urllib3.exceptions import HTTPError

from configs.failure import BadConfig, Failure, ServiceGone

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FIELD_MANAGER = "tandem-rl-loop"
LIMIT_S = 15.0
"""Seconds a request may take."""
LOG_LINES = 8

Object = dict[str, Any]


def connect(context: str | None = None, kubeconfig: str | None = None) -> client.ApiClient:
    """A client of the cluster: as the pod's ServiceAccount inside of one, else by kubeconfig.

    Raises:
        BadConfig: there is neither.
    """
    settings = client.Configuration()
    try:
        if SERVICE_ACCOUNT.exists() and context is None and kubeconfig is None:
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)
    except ConfigException as error:
        raise BadConfig(f"no Kubernetes cluster to talk to ({error}); give --kubeconfig or --context") from None
    settings.retries = False
    return client.ApiClient(settings)


def own_namespace() -> str:
    """Namespace of this pod.

    Raises:
        BadConfig: this process is not in a pod.
    """
    file = SERVICE_ACCOUNT / "namespace"
    if not file.exists():
        raise BadConfig(
            "loop.roles is kubernetes, but rl_loop is in no pod with a ServiceAccount; run it by `tandem submit`"
        )
    return file.read_text().strip()


class Cluster:
    """Objects of one namespace.

    Every method raises BadConfig when the ServiceAccount may not do that or the kind is not installed, and ServiceGone
    when the API server does not answer.
    """

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        with _explained("reading the cluster's kinds"):
            self._dynamic = DynamicClient(api)
        self._core = client.CoreV1Api(api)

    def get(self, api_version: str, kind: str, name: str) -> Object | None:
        """An object, or None."""
        with _explained(f"get {kind} {name}"):
            try:
                return (
                    self._kind(api_version, kind)
                    .get(name, namespace=self.namespace, _request_timeout=LIMIT_S)
                    .to_dict()
                )
            except ApiException as error:
                if error.status == 404:
                    return None
                raise

    def create(self, body: Object) -> Object:
        """Create an object; one of that name already there is a Failure."""
        with _explained(f"create {body['kind']} {body['metadata']['name']}"):
            kind = self._kind(body["apiVersion"], body["kind"])
            return kind.create(body, namespace=self.namespace, _request_timeout=LIMIT_S).to_dict()

    def replace(self, body: Object) -> Object | None:
        """Replace an object as it was read; None if somebody changed it since."""
        with _explained(f"update {body['kind']} {body['metadata']['name']}"):
            kind = self._kind(body["apiVersion"], body["kind"])
            try:
                return kind.replace(body, namespace=self.namespace, _request_timeout=LIMIT_S).to_dict()
            except ApiException as error:
                if error.status in (404, 409):
                    return None
                raise

    def apply(self, body: Object) -> Object:
        """Server-side apply: afterwards the object has these fields."""
        with _explained(f"apply {body['kind']} {body['metadata']['name']}"):
            kind = self._kind(body["apiVersion"], body["kind"])
            return self._dynamic.server_side_apply(
                kind, body, namespace=self.namespace, field_manager=FIELD_MANAGER, force_conflicts=True
            ).to_dict()

    def merge(self, api_version: str, kind: str, name: str, patch: Object) -> None:
        """Change fields of an object; one that is gone is left alone."""
        with _explained(f"patch {kind} {name}"):
            try:
                self._kind(api_version, kind).patch(
                    patch, name=name, namespace=self.namespace, content_type="application/merge-patch+json",
                    _request_timeout=LIMIT_S,
                )  # fmt: skip
            except ApiException as error:
                if error.status != 404:
                    raise

    def delete(self, api_version: str, kind: str, name: str, limit_s: float = LIMIT_S) -> None:
        """Delete an object and, in the background, what it owns; one that is gone is left alone."""
        with _explained(f"delete {kind} {name}"):
            try:
                self._kind(api_version, kind).delete(
                    name, namespace=self.namespace, body={"propagationPolicy": "Background"}, _request_timeout=limit_s
                )
            except ApiException as error:
                if error.status != 404:
                    raise

    def may(self, verb: str, group: str, resource: str) -> bool:
        """Whether this client may do that in the namespace."""
        asked = client.V1ResourceAttributes(namespace=self.namespace, verb=verb, group=group, resource=resource)
        review = client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=asked))
        with _explained("ask for its own rights"):
            made = client.AuthorizationV1Api(self.api).create_self_subject_access_review(
                review, _request_timeout=LIMIT_S
            )
        return bool(made.status.allowed)

    def pods(self, selector: str) -> list[Object]:
        """Pods with the labels of `selector`, oldest first."""
        with _explained("list pods"):
            found = self._core.list_namespaced_pod(self.namespace, label_selector=selector, _request_timeout=LIMIT_S)
        plain = [self.api.sanitize_for_serialization(pod) for pod in found.items]
        return sorted(plain, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def warnings(self, prefix: str, reason: str = "") -> list[str]:
        """Messages of warning events about objects whose name begins with `prefix`, oldest first."""
        fields = "type=Warning" + (f",reason={reason}" if reason else "")
        with _explained("list events"):
            found = self._core.list_namespaced_event(self.namespace, field_selector=fields, _request_timeout=LIMIT_S)
        items = [event for event in found.items if event.involved_object.name.startswith(prefix)]
        items.sort(key=lambda event: str(event.last_timestamp or event.event_time or event.metadata.creation_timestamp))
        return [" ".join((event.message or event.reason or "").split()) for event in items]

    def log_tail(self, pod: str) -> list[str]:
        """The last lines of a pod's log; nothing if there is none."""
        try:
            text = self._core.read_namespaced_pod_log(
                pod, self.namespace, tail_lines=LOG_LINES, _request_timeout=LIMIT_S
            )
        except (ApiException, HTTPError):
            return []
        return [line for line in text.splitlines() if line.strip()]

    def _kind(self, api_version: str, kind: str) -> Any:
        try:
            return self._dynamic.resources.get(api_version=api_version, kind=kind)
        except ResourceNotFoundError:
            raise BadConfig(
                f"the cluster has no kind {kind} ({api_version}); install its controller (docs/cluster.md)"
            ) from None


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except ApiException as error:
        words = " ".join(str(error.body or error.reason).split())[:300]
        if error.status in (401, 403):
            raise BadConfig(f"may not {what} ({words}); `tandem install` gives the ServiceAccount its rights") from None
        if error.status is None or error.status == 0 or error.status >= 500 or error.status == 429:
            raise ServiceGone(f"the Kubernetes API does not answer: {what} ({words})") from None
        raise Failure(f"the Kubernetes API refused: {what} ({words})") from None
    except HTTPError as error:
        raise ServiceGone(f"the Kubernetes API does not answer: {what} ({type(error).__name__})") from None


def pod_name() -> str:
    """Name of this pod."""
    return os.environ.get("HOSTNAME", "") or os.uname().nodename
