"""A Kubernetes cluster: objects of any kind by API version, rights, logs; every failure a sentence.

The kinds come from the server's own discovery (the dynamic client), so custom resources need no code of their own. The
`kubernetes` package takes half a second to import and is imported when a cluster is first talked to.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from configs.failure import BadConfig, ServiceGone

ANSWER_S = 30.0
"""Seconds one request to the API server may take."""
FIELD_MANAGER = "tandem"
SECOND_LOOK_S = 1.0
"""Seconds after which a kind that the server did not list is looked for again: its lists are short of some at times."""


@dataclass(frozen=True)
class Access:
    """One thing a command needs to be allowed to do.

    Attributes:
        verb: `create`, `get`, `list`, `patch`, `delete`.
        group: API group; empty for the core group.
        resource: Plural, with a subresource after a slash: `pods/log`.
        name: One object's name; empty for any.
    """

    verb: str
    group: str
    resource: str
    name: str = ""

    def __str__(self) -> str:
        kind = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.verb} {kind}" + (f" '{self.name}'" if self.name else "")


class Cluster:
    """One cluster and one namespace of it, through a kubeconfig context (or the pod's own account inside a cluster).

    Args:
        namespace: Of everything that names none.
        context: Of the kubeconfig; None takes the current one.
        kubeconfig: File; None takes the default one, or the pod's account where there is none.
        rights: What to do about a missing right, as the end of a sentence.
        limit_s: Seconds one request may take.
    """

    def __init__(
        self,
        namespace: str,
        context: str | None = None,
        kubeconfig: Path | None = None,
        rights: str = "ask for the Role tandem-submitter (docs/cluster.md)",
        limit_s: float = ANSWER_S,
    ) -> None:
        self.namespace = namespace
        self.context = context
        self.kubeconfig = kubeconfig
        self.rights = rights
        self.limit_s = limit_s
        self._missing: set[tuple[str, str]] = set()

    @property
    def where(self) -> str:
        """The cluster's name in messages."""
        return f"cluster '{self.context}'" if self.context else "the cluster of the current context"

    @cached_property
    def api(self) -> Any:
        """The client, with its configuration read; nothing is sent yet.

        Raises:
            BadConfig: the kubeconfig or the context is missing, or cannot be read.
        """
        import yaml
        from kubernetes import client, config

        settings = client.Configuration()
        try:
            self._load(config, settings)
            settings.retries = False
            made = client.ApiClient(settings)
        except config.ConfigException as error:
            raise BadConfig(self._no_configuration(str(error))) from None
        except (OSError, ValueError, TypeError, AttributeError, LookupError, yaml.YAMLError) as error:
            words = " ".join(str(error).split())[:160] or type(error).__name__
            raise BadConfig(
                f"{self._file}: is no kubeconfig ({words}); mend it, or give another --kubeconfig"
            ) from None
        if not _is_address(str(settings.host)):
            raise BadConfig(
                f"{self._file}: the server of {self.where} is '{settings.host}', which is no address; write https://HOST:PORT"
            )
        return made

    def _load(self, config: Any, settings: Any) -> None:
        places = config.KUBE_CONFIG_DEFAULT_LOCATION.split(os.pathsep)
        there = any(Path(place).expanduser().exists() for place in places if place)
        if self.context is None and self.kubeconfig is None and not there:
            config.load_incluster_config(client_configuration=settings)
        else:
            file = str(self.kubeconfig) if self.kubeconfig else None
            config.load_kube_config(file, context=self.context, client_configuration=settings)

    @property
    def _file(self) -> str:
        return str(self.kubeconfig or "the default kubeconfig")

    def _no_configuration(self, words: str) -> str:
        if self.context and "context" in words.lower():
            return f"context '{self.context}' is not in the kubeconfig; list them with `kubectl config get-contexts`"
        return f"{self._file}: names no cluster ({' '.join(words.split())}); give --kubeconfig and --context"

    @cached_property
    def dynamic(self) -> Any:
        """The dynamic client; asks the server for its groups.

        Raises:
            ServiceGone: the server does not answer.
        """
        from kubernetes.dynamic import DynamicClient

        # The library would keep the server's kinds in a file of /tmp that any user may have put there.
        folder = tempfile.TemporaryDirectory(prefix="tandem-discovery-")
        self._discovery = folder
        try:
            return self._telling(
                lambda: DynamicClient(self.api, cache_file=f"{folder.name}/kinds.json"), "list the kinds it knows"
            )
        except ValueError as error:
            raise self._gone(error) from None

    def serves(self, api_version: str, kind: str) -> bool:
        """Whether the server knows a kind."""
        return self._resource(api_version, kind, missing_ok=True) is not None

    def get(self, api_version: str, kind: str, name: str) -> dict[str, Any] | None:
        """An object of this namespace (or of the cluster), or None."""
        path = self._path(api_version, kind, name)
        return self._request("GET", path, f"get {kind} '{name}'", absent=(404,))

    def find(self, api_version: str, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """The objects of this namespace that a label selector fits."""
        query = [("labelSelector", selector)] if selector else []
        found = self._request("GET", self._path(api_version, kind), f"list {kind}", query=query)
        items = (found or {}).get("items", [])
        return [{"apiVersion": api_version, "kind": kind, **item} for item in items]

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object.

        Raises:
            BadConfig: the server refuses it.
        """
        path = self._path(body["apiVersion"], body["kind"])
        made = self._request("POST", path, f"create {_named(body)}", body=body, query=_STRICT)
        assert made is not None
        return made

    def take(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Create an object, or replace it as it was read (by its resourceVersion); None if somebody else was faster."""
        metadata = body["metadata"]
        known = "resourceVersion" in metadata
        path = self._path(body["apiVersion"], body["kind"], metadata["name"] if known else None)
        method, what = ("PUT", f"update {_named(body)}") if known else ("POST", f"create {_named(body)}")
        return self._request(method, path, what, body, _STRICT, absent=(404, 409))

    def apply(self, body: dict[str, Any], dry_run: bool = False, namespace: str | None = None) -> dict[str, Any]:
        """Apply an object on the server's side; unknown fields are refused.

        Args:
            body: The object; its namespace is this cluster's unless it names one.
            dry_run: Have the server check and answer, and keep nothing.
            namespace: Namespace of an object that names none.
        """
        name = body["metadata"]["name"]
        place = body["metadata"].get("namespace") or namespace
        path = self._path(body["apiVersion"], body["kind"], name, place)
        query = [*_STRICT, ("force", "true"), *([("dryRun", "All")] if dry_run else [])]
        applied = self._request("PATCH", path, f"apply {_named(body)}", body, query, "application/apply-patch+yaml")
        assert applied is not None
        return applied

    def patch(self, api_version: str, kind: str, name: str, change: dict[str, Any]) -> dict[str, Any] | None:
        """Merge a change into an object; None if there is no such object."""
        path = self._path(api_version, kind, name)
        return self._request(
            "PATCH", path, f"patch {kind} '{name}'", change, _STRICT, "application/merge-patch+json", absent=(404,)
        )

    def delete(self, api_version: str, kind: str, name: str, dependents: str = "Background", uid: str = "") -> bool:
        """Delete an object and what it owns; whether it was there.

        Args:
            api_version: Of the object.
            kind: Of the object.
            name: Of the object.
            dependents: "Orphan" leaves what it owns.
            uid: Only the object with this id; another one of that name stays and counts as not there.
        """
        path = self._path(api_version, kind, name)
        query = [("propagationPolicy", dependents)]
        body = {"preconditions": {"uid": uid}} if uid else None
        absent = (404, 409) if uid else (404,)
        return self._request("DELETE", path, f"delete {kind} '{name}'", body, query, absent=absent) is not None

    def allowed(self, access: Access) -> bool:
        """Whether this user may do something in the namespace (SelfSubjectAccessReview)."""
        resource, _, subresource = access.resource.partition("/")
        attributes = {
            "namespace": self.namespace, "verb": access.verb, "group": access.group, "resource": resource,
            "subresource": subresource, "name": access.name,
        }  # fmt: skip
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = self._request("POST", path, "ask for permissions", body=body)
        return bool(answer and answer.get("status", {}).get("allowed"))

    def pod_log(self, pod: str, container: str, tail: int | None = None, since: str = "") -> str:
        """What a container wrote, each line after its time; empty while it has not started or when it is gone.

        Args:
            tail: Its last lines only.
            since: RFC 3339 time; only what was written at or after it.
        """
        query: list[tuple[str, str]] = [("container", container), ("timestamps", "true")]
        query += [("tailLines", str(tail))] if tail else []
        query += [("sinceTime", since)] if since else []
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        what = f"read the log of {pod}"
        return self._telling(lambda: self._send("GET", path, None, query, "application/json"), what, (400, 404)) or ""

    # ---- requests

    def _resource(self, api_version: str, kind: str, missing_ok: bool = False) -> Any:
        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        def look() -> Any:
            return self._telling(lambda: self.dynamic.resources.get(api_version=api_version, kind=kind), f"find {kind}")

        try:
            return look()
        except ResourceNotFoundError:
            if (api_version, kind) not in self._missing:
                # While others install or remove kinds, the server's list lacks even some of those that stay.
                self._missing.add((api_version, kind))
                time.sleep(SECOND_LOOK_S)
                return self._resource(api_version, kind, missing_ok)
            if missing_ok:
                return None
            raise BadConfig(
                f"{self.where} does not know {kind} ({api_version}); install what brings it (docs/cluster.md lists them)"
            ) from None

    def _path(self, api_version: str, kind: str, name: str | None = None, namespace: str | None = None) -> str:
        resource = self._resource(api_version, kind)
        place = (namespace or self.namespace) if resource.namespaced else None
        return str(resource.path(name=name, namespace=place))

    def _request(
        self,
        method: str,
        path: str,
        what: str,
        body: Any = None,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
        absent: tuple[int, ...] = (),
    ) -> dict[str, Any] | None:
        text = self._telling(lambda: self._send(method, path, body, query or [], content_type), what, absent)
        return json.loads(text) if text else None

    def _send(self, method: str, path: str, body: Any, query: list[tuple[str, str]], content_type: str) -> str:
        response = self.api.call_api(
            path, method, query_params=query, body=body, auth_settings=["BearerToken"], _preload_content=False,
            header_params={"Accept": "application/json", "Content-Type": content_type},
            _return_http_data_only=True, _request_timeout=self.limit_s,
        )  # fmt: skip
        return bytes(response.data).decode(errors="replace")

    def _telling(self, call: Callable[[], Any], what: str, absent: tuple[int, ...] = ()) -> Any:
        """Make a request; None for a status in `absent`.

        Raises:
            BadConfig: this user may not, or the server refuses the request.
            ServiceGone: the server does not answer.
        """
        from kubernetes.client import ApiException
        from kubernetes.dynamic.exceptions import DynamicApiError
        from urllib3.exceptions import HTTPError

        try:
            return call()
        except (ApiException, DynamicApiError) as error:
            if error.status in absent:
                return None
            if not error.status:
                # The library's way to tell of a certificate that does not fit.
                raise self._gone(error) from None
            raise self._refusal(error.status, error.body, what) from None
        except HTTPError as error:
            raise self._gone(error) from None

    def _gone(self, error: Exception) -> ServiceGone:
        host = self.api.configuration.host
        return ServiceGone(
            f"{self.where} does not answer at {host} ({_short(error)}); check --context, the network and the server"
        )

    def _refusal(self, status: int, body: Any, what: str) -> BadConfig | ServiceGone:
        words = _message(body)
        if status == 401:
            return BadConfig(
                f"{self.where} does not accept these credentials; log in again or choose another --context"
            )
        if status == 403:
            return BadConfig(f"{self.where} forbids to {what} in namespace '{self.namespace}' ({words}); {self.rights}")
        if status >= 500 or status == 429:
            return ServiceGone(f"{self.where} failed to {what} ({words}); try again")
        return BadConfig(f"{self.where} refuses to {what}: {words}")


_STRICT = [("fieldManager", FIELD_MANAGER), ("fieldValidation", "Strict")]


def _is_address(text: str) -> bool:
    try:
        address = urlsplit(text)
        return address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        return False


def _named(body: dict[str, Any]) -> str:
    name = body["metadata"].get("name") or f"{body['metadata'].get('generateName', '')}…"
    return f"{body['kind']} '{name}'"


def _message(body: Any) -> str:
    """The server's own words from a Status object."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    try:
        text = json.loads(text).get("message", text)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:400]


def _short(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split())[:160]
