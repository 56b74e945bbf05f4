"""Least privilege, asked of a real API server with each ServiceAccount's own token: what it needs, and what it must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from components.cluster.api import Access, Cluster
from configs.failure import BadConfig
from pipelines.install import Settings, install, render
from pipelines.readiness import LOOKING
from pipelines.targets.argo.runs import SCHEDULE, SUBMIT
from pipelines.targets.run_objects import KINDS, objects_of
from tests.cluster.accounts import kubeconfig_of

JOBSETS, SETS, ARGO = "jobset.x-k8s.io", "leaderworkerset.x-k8s.io", "argoproj.io"
OWNED = ((JOBSETS, "jobsets"), (SETS, "leaderworkersets"), ("apps", "statefulsets"), ("", "services"), ("", "configmaps"),
         ("coordination.k8s.io", "leases"))  # fmt: skip
NEEDED = {
    "tandem-pipeline": (
        *(Access(verb, group, kind) for group, kind in OWNED for verb in ("get", "list", "create", "patch", "delete")),
        Access("update", "coordination.k8s.io", "leases"),
        Access("patch", SETS, "leaderworkersets/scale"),
        *(Access(verb, "", kind) for kind in ("pods", "events") for verb in ("get", "list")),
        Access("get", "", "pods/log"),
        Access("get", ARGO, "workflows"),
        *(Access(verb, ARGO, "workflowtaskresults") for verb in ("create", "patch")),
    ),
    "tandem-role": (),
    "tandem-mlflow": (),
    "tandem-submitter": (
        *LOOKING,
        *SUBMIT,
        *SCHEDULE,
        Access("patch", ARGO, "workflows"),
        Access("delete", ARGO, "cronworkflows"),
        Access("delete", JOBSETS, "jobsets"),
        Access("get", "", "secrets", "tandem-redis"),
        Access("get", "", "serviceaccounts", "tandem-role"),
        Access("get", "", "namespaces"),
        Access("get", "kueue.x-k8s.io", "localqueues"),
    ),
}
"""What each account does in a run; taken from the code where the code says it."""
NOBODY = (
    *(Access(verb, "", "secrets") for verb in ("get", "list", "watch", "create", "delete")),
    Access("get", "", "secrets", "tandem-s3"),
    *(Access("create", "", kind) for kind in ("pods", "pods/exec", "pods/attach", "pods/portforward")),
    Access("delete", "", "pods"),
    Access("create", "", "serviceaccounts"),
    Access("create", "", "serviceaccounts/token", "tandem-pipeline"),
    Access("impersonate", "", "serviceaccounts"),
    *(Access(verb, "", "nodes") for verb in ("get", "list", "patch")),
    Access("get", "", "nodes/proxy"),
    *(Access(verb, "rbac.authorization.k8s.io", kind) for kind in ("roles", "rolebindings", "clusterroles", "clusterrolebindings")
      for verb in ("create", "patch", "bind", "escalate")),
    Access("list", "", "namespaces"),
    Access("patch", "", "namespaces"),
    Access("create", "apps", "deployments"),
    Access("patch", "networking.k8s.io", "networkpolicies"),
    Access("create", "admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    Access("*", "*", "*"),
)  # fmt: skip
REFUSED = {
    "tandem-pipeline": (
        *NOBODY,
        Access("get", "", "secrets", "tandem-redis"),
        *(Access(verb, ARGO, "workflows") for verb in ("create", "patch", "delete", "list")),
        *(Access("update", group, kind) for group, kind in OWNED if kind != "leases"),
        *(Access("watch", group, kind) for group, kind in (*OWNED, ("", "pods"), ("", "events"))),
        Access("create", ARGO, "cronworkflows"),
    ),
    "tandem-role": (*NOBODY, *NEEDED["tandem-pipeline"], *NEEDED["tandem-submitter"]),
    "tandem-mlflow": (*NOBODY, *NEEDED["tandem-pipeline"], *NEEDED["tandem-submitter"]),
    "tandem-submitter": (
        *NOBODY,
        *(Access(verb, JOBSETS, "jobsets") for verb in ("create", "patch")),
        Access("create", SETS, "leaderworkersets"),
        Access("create", "apps", "statefulsets"),
        Access("delete", "", "configmaps"),
        Access("delete", ARGO, "workflows"),
        Access("create", ARGO, "workflowtaskresults"),
    ),
}
ACCOUNTS = tuple(NEEDED)


@dataclass(frozen=True)
class Installed:
    """An installation, and another namespace."""

    namespace: str
    elsewhere: str
    as_account: Callable[..., Cluster]
    """The cluster with the token of an account; `namespace` names where it looks."""


@pytest.fixture(scope="module")
def installed(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    namespaces = [cluster.namespace("permissions"), cluster.namespace("elsewhere")]
    for namespace in namespaces:
        objects = render(Settings(namespace=namespace, image="localhost/tandem/control:1", mlflow_storage_gib=0))
        # MLflow itself is not needed to ask what its account may do.
        objects = [one for one in objects if one["kind"] != "Deployment"]
        install(Cluster(namespace, cluster.context, cluster.kubeconfig), objects)
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "tandem-redis"},
            "stringData": {"password": "x"},
        }
        cluster.api.apply([secret], namespace)
    folder = tmp_path_factory.mktemp("accounts")

    def as_account(account: str, namespace: str = namespaces[0]) -> Cluster:
        return Cluster(namespace, cluster.context, kubeconfig_of(cluster, account, namespaces[0], folder))

    yield Installed(*namespaces, as_account)
    for namespace in namespaces:
        cluster.delete_namespace(namespace)


@pytest.mark.parametrize("account", ACCOUNTS)
def test_an_account_may_do_its_work(installed: Installed, account: str) -> None:
    asked = installed.as_account(account)
    assert [str(access) for access in NEEDED[account] if not asked.allowed(access)] == []


@pytest.mark.parametrize("account", ACCOUNTS)
def test_an_account_may_do_nothing_else(installed: Installed, account: str) -> None:
    asked = installed.as_account(account)
    assert [str(access) for access in REFUSED[account] if asked.allowed(access)] == []


@pytest.mark.parametrize("account", ACCOUNTS)
def test_an_account_may_do_nothing_elsewhere(installed: Installed, account: str) -> None:
    for place in (installed.elsewhere, "kube-system", "default"):
        asked = installed.as_account(account, place)
        assert [str(access) for access in (*NEEDED[account], *NOBODY) if asked.allowed(access)] == []


def test_the_launcher_makes_what_it_owns(installed: Installed) -> None:
    """By requests, not only by asking: a ConfigMap, a Lease and a Service come and go; a Secret is refused."""
    launcher = installed.as_account("tandem-pipeline")
    metadata = {"name": "probe", "labels": {"tandem.run": "probe"}}
    made = (
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}},
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {"holderIdentity": "me"},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"clusterIP": "None", "ports": [{"port": 1}]},
        },
    )
    for one in made:
        launcher.apply(one)
    claim = launcher.get("coordination.k8s.io/v1", "Lease", "probe")
    assert claim is not None
    assert launcher.take({**claim, "spec": {"holderIdentity": "another"}})
    submitter = installed.as_account("tandem-submitter")
    assert set(objects_of(submitter, "probe")) == {"ConfigMap/probe", "Lease/probe", "Service/probe"}
    for one in made:
        assert launcher.delete(one["apiVersion"], one["kind"], "probe")
    assert objects_of(submitter, "probe") == []
    with pytest.raises(BadConfig, match="forbids to get Secret 'tandem-redis'"):
        launcher.get("v1", "Secret", "tandem-redis")
    with pytest.raises(BadConfig, match="forbids to list Secret"):
        submitter.find("v1", "Secret")


@pytest.mark.parametrize("account", ["tandem-role", "tandem-mlflow"])
def test_a_role_sees_nothing(installed: Installed, account: str) -> None:
    asked = installed.as_account(account)
    for api_version, kind in KINDS:
        with pytest.raises(BadConfig, match=f"forbids to list {kind}"):
            asked.find(api_version, kind)


def test_a_pod_of_a_role_gets_no_token(cluster: Any, installed: Installed) -> None:
    """The token is left out by the account, whatever a pod's own specification says nothing about."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe"},
        "spec": {
            "serviceAccountName": "tandem-role",
            "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "main",
                    "image": "localhost/none:1",
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
    administrator = Cluster(installed.namespace, cluster.context, cluster.kubeconfig)
    applied = administrator.apply(pod, dry_run=True)
    volumes = applied["spec"].get("volumes", [])
    assert not [
        source
        for volume in volumes
        for source in volume.get("projected", {}).get("sources", [])
        if "serviceAccountToken" in source
    ]
    pod["spec"]["containers"][0]["securityContext"] = {"privileged": True}  # type: ignore[index]
    with pytest.raises(BadConfig, match="PodSecurity"):
        administrator.apply(pod, dry_run=True)
