"""The API server as the cluster's programs and tests use it: apply objects, look at them, wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import kubernetes
import urllib3
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError, NotFoundError, ResourceNotFoundError

from configs.failure import ServiceGone

FIELD_MANAGER = "tandem-test"
POLL_S = 0.2
Answer = TypeVar("Answer")
Unreachable = (kubernetes.client.ApiException, urllib3.exceptions.HTTPError, OSError)


class Api:
    """A connection with the rights of one kubeconfig."""

    def __init__(self, kubeconfig: Path, context: str) -> None:
        """Read the kubeconfig; nothing is asked of the server yet."""
        settings = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(str(kubeconfig), context, settings, persist_config=False)
        settings.proxy = None
        self.client = kubernetes.client.ApiClient(settings)
        self.core = kubernetes.client.CoreV1Api(self.client)
        self._discovered = kubeconfig.with_name("discovered.json")
        self._dynamic: DynamicClient | None = None

    @property
    def dynamic(self) -> DynamicClient:
        """The client for objects of any kind, own resources included."""
        if self._dynamic is None:
            self._dynamic = DynamicClient(self.client, cache_file=str(self._discovered))
        return self._dynamic

    def forget(self) -> None:
        """Forget what kinds the server knows, after new ones were added or it was wiped."""
        self._discovered.unlink(missing_ok=True)
        self._dynamic = None

    def ready(self) -> bool:
        """Whether the server serves."""
        try:
            self.client.call_api("/readyz", "GET", _request_timeout=5, auth_settings=["BearerToken"])
            return True
        except Unreachable:
            return False

    def apply(self, objects: Iterable[dict[str, Any]], namespace: str = "default", dry_run: bool = False) -> int:
        """Server-side apply, in the given order; custom resource definitions are waited for.

        Args:
            namespace: For namespaced objects that name none.
            dry_run: Have the server check and default them without keeping them.

        Returns:
            How many were applied.

        Raises:
            DynamicApiError: The server refused one.
        """
        count = 0
        for each in objects:
            resource = self._resource(each["apiVersion"], each["kind"])
            options = {"dry_run": "All"} if dry_run else {}
            self.dynamic.server_side_apply(
                resource,
                body=each,
                namespace=each["metadata"].get("namespace", namespace),
                field_manager=FIELD_MANAGER,
                force_conflicts=True,
                **options,
            )
            count += 1
        return count

    def create(self, content: dict[str, Any], namespace: str) -> dict[str, Any]:
        """Create one object, with a name made by the server if it has `generateName`; returns it as stored."""
        resource = self._resource(content["apiVersion"], content["kind"])
        stored: dict[str, Any] = self.dynamic.create(resource, body=content, namespace=namespace).to_dict()
        return stored

    def get(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        """One object, or None when there is none."""
        try:
            resource = self._resource(api_version, kind)
            found: dict[str, Any] = self.dynamic.get(resource, name=name, namespace=namespace).to_dict()
            return found
        except NotFoundError:
            return None

    def list(
        self, api_version: str, kind: str, namespace: str | None = None, selector: str = ""
    ) -> list[dict[str, Any]]:
        """Objects of a kind, in all namespaces without one, with labels that match."""
        resource = self._resource(api_version, kind)
        answer = self.dynamic.get(resource, namespace=namespace, label_selector=selector or None)
        items: list[dict[str, Any]] = answer.to_dict()["items"]
        return items

    def delete(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> None:
        """Delete one object and what it owns, in the background; an absent one is fine."""
        try:
            resource = self._resource(api_version, kind)
            body = {"propagationPolicy": "Background"}
            self.dynamic.delete(resource, name=name, namespace=namespace, body=body)
        except NotFoundError:
            pass

    def _resource(self, api_version: str, kind: str) -> Any:
        """The server's entry for a kind; a definition that was just made takes a moment to be served."""
        limit = time.monotonic() + 30
        while True:
            try:
                return self.dynamic.resources.get(api_version=api_version, kind=kind)
            except ResourceNotFoundError:
                if time.monotonic() > limit:
                    raise
                time.sleep(POLL_S)
                self.dynamic.resources.invalidate_cache()


def wait_for(what: str, limit_s: float, look: Callable[[], Answer | None], poll_s: float = POLL_S) -> Answer:
    """Look until there is a truthy answer, which is returned; errors of the API count as not yet.

    Raises:
        ServiceGone: Not within the limit; the last error of the API is told.
    """
    limit = time.monotonic() + limit_s
    trouble = ""
    while True:
        try:
            answer = look()
            if answer:
                return answer
            trouble = ""
        except (*Unreachable, DynamicApiError, ResourceNotFoundError) as error:
            trouble = f" ({' '.join(str(error).split())[:300]})"
        if time.monotonic() > limit:
            raise ServiceGone(f"{what}: not within {limit_s:.0f} s{trouble}")
        time.sleep(poll_s)
