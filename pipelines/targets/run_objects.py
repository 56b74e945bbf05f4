"""What rl_loop has on the cluster for a run, and its end."""

from __future__ import annotations

import time

from components.cluster.api import Access, Cluster
from configs.failure import ServiceGone

KINDS = (
    ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    ("apps/v1", "StatefulSet"),
    ("v1", "Service"),
    ("v1", "ConfigMap"),
    ("coordination.k8s.io/v1", "Lease"),
    ("v1", "Pod"),
)
SELECTOR = "tandem.run={run},!workflows.argoproj.io/workflow"
LAUNCHER_S = 15.0
"""Seconds rl_loop has to delete what it made before this command does."""
END_S = 90.0
"""Seconds after which what is left is told."""
POLL_S = 0.25


def objects_of(cluster: Cluster, run: str) -> list[str]:
    """What a run has on the cluster, as `Kind/name`."""
    found = []
    for api_version, kind in KINDS:
        if not cluster.serves(api_version, kind):
            continue
        items = cluster.find(api_version, kind, SELECTOR.format(run=run))
        found += [f"{kind}/{item['metadata']['name']}" for item in items]
    return found


def end_objects(cluster: Cluster, run: str) -> None:
    """Wait until nothing of a run is left; after 15 s delete its JobSet, which owns the rest.

    Raises:
        ServiceGone: something is left after 90 s; the sentence names it.
    """
    started, deleted = time.monotonic(), False
    while left := objects_of(cluster, run):
        passed = time.monotonic() - started
        if passed > END_S:
            raise ServiceGone(
                f"run {run}: {', '.join(left[:4])}{' and more' if len(left) > 4 else ''} still there after {END_S:.0f} s; look at"
                " their events (kubectl describe), then delete them"
            )
        if passed > LAUNCHER_S and not deleted:
            deleted = True
            if cluster.allowed(Access("delete", "jobset.x-k8s.io", "jobsets")):
                cluster.delete("jobset.x-k8s.io/v1alpha2", "JobSet", run)
        time.sleep(POLL_S)
