"""The claim on a run's name: a Lease that the loop renews, so that two loops never drive one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from components.cluster.api import Cluster
from configs.failure import BadConfig

API = "coordination.k8s.io/v1"
HELD_S = 30
"""Seconds a claim holds without being renewed."""
RENEW_S = 5.0
POLL_S = 1.0


class Claim:
    """A Lease named after the run.

    Attributes:
        held: Whether this loop has the claim.

    Args:
        cluster: Where.
        run: Name of the run.
        holder: Name of this pod.
        labels: Of the Lease.
        owner: Owner reference of the Lease, or None.
    """

    def __init__(
        self, cluster: Cluster, run: str, holder: str, labels: dict[str, str], owner: dict[str, Any] | None
    ) -> None:
        self.cluster = cluster
        self.run = run
        self.holder = holder
        self._metadata: dict[str, Any] = {"name": run, "labels": labels}
        if owner is not None:
            self._metadata["ownerReferences"] = [owner]
        self.held = False
        self._renewed = 0.0

    def take(self, limit_s: float, each: Callable[[], None]) -> None:
        """Wait until nobody else holds the claim, and take it.

        Args:
            limit_s: Seconds to wait for a holder that lives.
            each: Called at every look; raises to end the wait.

        Raises:
            BadConfig: another loop of this run is alive.
        """
        end = time.monotonic() + limit_s
        while True:
            each()
            found = self.cluster.get(API, "Lease", self.run)
            holder = self._living_holder(found)
            if not holder and self._write(found):
                self.held = True
                return
            if time.monotonic() > end:
                raise BadConfig(f"another loop of run {self.run} is alive in pod {holder}; cancel it, then retry")
            time.sleep(POLL_S)

    def renew(self) -> None:
        """Say that the loop is alive, every few seconds.

        Raises:
            BadConfig: another loop has taken the claim.
        """
        if time.monotonic() - self._renewed < RENEW_S:
            return
        found = self.cluster.get(API, "Lease", self.run)
        if found is not None and found["spec"].get("holderIdentity") not in (self.holder, None, ""):
            self.held = False
            raise BadConfig(f"pod {found['spec']['holderIdentity']} has taken over run {self.run}; this loop ends")
        self._write(found)

    def release(self) -> None:
        """Give the claim up."""
        if not self.held:
            return
        self.held = False
        found = self.cluster.get(API, "Lease", self.run)
        if found is not None and found["spec"].get("holderIdentity") == self.holder:
            self.cluster.delete(API, "Lease", self.run, uid=found["metadata"]["uid"])

    def _living_holder(self, lease: dict[str, Any] | None) -> str:
        """Who holds the claim; empty when nobody does, or a pod that is gone."""
        spec = lease["spec"] if lease else {}
        holder = spec.get("holderIdentity") or ""
        if holder in ("", self.holder) or _age(spec.get("renewTime")) > HELD_S:
            return ""
        pod = self.cluster.get("v1", "Pod", holder)
        return holder if pod and pod["status"].get("phase") not in ("Succeeded", "Failed") else ""

    def _write(self, found: dict[str, Any] | None) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self.holder, "leaseDurationSeconds": HELD_S, "renewTime": now}
        body: dict[str, Any] = {"apiVersion": API, "kind": "Lease", "metadata": dict(self._metadata), "spec": spec}
        if found is None:
            body["spec"]["acquireTime"] = now
        else:
            body["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
        written = self.cluster.take(body)
        self._renewed = time.monotonic()
        return written is not None


def _age(time_text: str | None) -> float:
    """Seconds since a time as Kubernetes writes it; infinite if there is none."""
    if not time_text:
        return float("inf")
    return (datetime.now(UTC) - datetime.fromisoformat(time_text)).total_seconds()
