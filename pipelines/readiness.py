"""What a cluster must have before a run is sent to it; the first thing that is missing is told in one sentence."""

from __future__ import annotations

from components.cluster.api import Access, Cluster
from configs.failure import BadConfig
from configs.kubernetes import RolePods
from configs.run import RunConfig
from pipelines.submission import Submission

INSTALL = "`tandem install`"
ROLE_ACCOUNT_MEND = f"{INSTALL} makes tandem-role"
REDIS_SECRET_MEND = 'kubectl create secret generic tandem-redis --from-literal=password="$(openssl rand -hex 24)"'
ROLE_KINDS = (
    ("jobset.x-k8s.io/v1alpha2", "JobSet", "the JobSet controller"),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "the LeaderWorkerSet controller"),
)
LOOKING = (
    Access("list", "", "pods"),
    Access("get", "", "pods/log"),
    Access("get", "", "configmaps"),
    Access("list", "jobset.x-k8s.io", "jobsets"),
)


def check_cluster(
    cluster: Cluster, submission: Submission, kinds: tuple[tuple[str, str, str], ...], needed: tuple[Access, ...] = ()
) -> list[str]:
    """Look for what every run needs.

    Args:
        cluster: Where it is to run.
        submission: What is to run.
        kinds: Further kinds the target needs: API version, kind, and who brings it.
        needed: Further permissions the target needs.

    Returns:
        Notes on what could not be looked at, or may hold the run up.

    Raises:
        BadConfig: something is missing.
        ServiceGone: the cluster does not answer.
    """
    config, notes = submission.config, list[str]()
    queue = (("kueue.x-k8s.io/v1beta2", "LocalQueue", "Kueue"),) if config.kubernetes.queue else ()
    for api_version, kind, bringer in (*kinds, *ROLE_KINDS, *queue):
        if not cluster.serves(api_version, kind):
            raise BadConfig(
                f"{cluster.where} does not know {kind} ({api_version}); install {bringer} there (docs/cluster.md)"
            )
    _namespace(cluster, notes)
    check_access(cluster, (*LOOKING, *needed))
    _account(cluster, config.kubernetes.service_account, notes)
    _secret(cluster, notes)
    _queue(cluster, config, notes)
    _tracking(cluster, config, notes)
    notes += [*nodes_short(cluster, config), *images_of_this_machine(submission)]
    return notes


def images_of_this_machine(submission: Submission) -> list[str]:
    """Notes on images that no registry holds, so that only nodes they were loaded into have them."""
    if submission.config.kubernetes.pull_policy == "Never":
        return []
    local = [one for one in submission.images.model_dump().values() if one.startswith("localhost/")]
    return [
        f"image {one} is in no registry, so a node has it only if it was loaded there; push the images:"
        ' make images ARGS="--push REGISTRY/tandem"'
        for one in local[:1]
    ]


def check_access(cluster: Cluster, needed: tuple[Access, ...]) -> None:
    """Ask for each permission a command needs.

    Raises:
        BadConfig: one is missing.
    """
    missing = [access for access in needed if not cluster.allowed(access)]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise BadConfig(
            f"{cluster.where} does not allow you to {missing[0]} in namespace '{cluster.namespace}'{more}; ask for a binding"
            f" to the Role tandem-submitter, which {INSTALL} makes"
        )


def account_exists(cluster: Cluster, name: str, mend: str, notes: list[str]) -> None:
    """Look for a ServiceAccount, or note that it could not be looked for.

    Raises:
        BadConfig: there is none.
    """
    if not cluster.allowed(Access("get", "", "serviceaccounts", name)):
        notes.append(f"could not look for ServiceAccount {name}: you may not get it")
    elif cluster.get("v1", "ServiceAccount", name) is None:
        raise BadConfig(f"namespace '{cluster.namespace}' has no ServiceAccount '{name}'; {mend}")


def _namespace(cluster: Cluster, notes: list[str]) -> None:
    if not cluster.allowed(Access("get", "", "namespaces", cluster.namespace)):
        notes.append(f"could not look for namespace {cluster.namespace}: you may not get it")
    elif cluster.get("v1", "Namespace", cluster.namespace) is None:
        raise BadConfig(
            f"{cluster.where} has no namespace '{cluster.namespace}'; make it with {INSTALL} or give --namespace"
        )


def _account(cluster: Cluster, name: str, notes: list[str]) -> None:
    account_exists(cluster, name, f"{ROLE_ACCOUNT_MEND}, or set kubernetes.service_account", notes)


def _secret(cluster: Cluster, notes: list[str]) -> None:
    if not cluster.allowed(Access("get", "", "secrets", "tandem-redis")):
        notes.append("could not look for Secret tandem-redis: you may not get it")
        return
    secret = cluster.get("v1", "Secret", "tandem-redis")
    if secret is None:
        raise BadConfig(f"namespace '{cluster.namespace}' has no Secret 'tandem-redis'; make it: {REDIS_SECRET_MEND}")
    if "password" not in secret.get("data", {}):
        raise BadConfig(f"Secret 'tandem-redis' in namespace '{cluster.namespace}' has no key 'password'; add it")


def _queue(cluster: Cluster, config: RunConfig, notes: list[str]) -> None:
    name = config.kubernetes.queue
    if not name:
        return
    if not cluster.allowed(Access("get", "kueue.x-k8s.io", "localqueues", name)):
        notes.append(f"could not look for LocalQueue {name}: you may not get it")
    elif cluster.get("kueue.x-k8s.io/v1beta2", "LocalQueue", name) is None:
        raise BadConfig(
            f"namespace '{cluster.namespace}' has no LocalQueue '{name}'; make it (`tandem install --kueue` makes 'tandem')"
            " or change kubernetes.queue"
        )


def _tracking(cluster: Cluster, config: RunConfig, notes: list[str]) -> None:
    """The steps' environment comes from ConfigMap `tandem`."""
    settings = (cluster.get("v1", "ConfigMap", "tandem") or {}).get("data", {})
    if not config.tracking.uri and not settings.get("MLFLOW_TRACKING_URI"):
        raise BadConfig(
            "no tracking server: tracking.uri is empty and namespace"
            f" '{cluster.namespace}' has no MLFLOW_TRACKING_URI in ConfigMap 'tandem'; {INSTALL} sets it, or give"
            " -s tracking.uri=http://HOST:PORT"
        )
    endpoint, known = config.storage.endpoint_url, settings.get("AWS_ENDPOINT_URL", "")
    if endpoint and endpoint != known:
        notes.append(
            f"storage.endpoint_url is {endpoint}, but ConfigMap tandem says {known or 'nothing'}, and the pipeline's own"
            " artifacts go there"
        )


def nodes_short(cluster: Cluster, config: RunConfig) -> list[str]:
    """Notes on roles that no node of the cluster has room for as it stands; an autoscaler may bring one."""
    if not cluster.allowed(Access("list", "", "nodes")):
        return []
    nodes = [node.get("status", {}).get("allocatable", {}) for node in cluster.find("v1", "Node")]
    notes = []
    for role in ("train", "rollout", "reward", "broadcast", "redis"):
        pods: RolePods = getattr(config.kubernetes, role)
        if not any(_has_room(allocatable, pods) for allocatable in nodes):
            notes.append(
                f"no node has room for a {role} pod ({_wishes(pods)}); it stays pending unless an autoscaler brings one"
            )
    return notes


def _has_room(allocatable: dict[str, str], pods: RolePods) -> bool:
    from kubernetes.utils import parse_quantity

    def has(resource: str) -> float:
        return float(parse_quantity(allocatable.get(resource, "0")))

    return (
        has("cpu") * 1000 >= pods.cpu_millicores
        and has("memory") >= pods.memory_mib * 2**20
        and has("nvidia.com/gpu") >= pods.gpus
        and has("vpc.amazonaws.com/efa") >= pods.efa_interfaces
        and has("hugepages-2Mi") >= pods.hugepages_mib * 2**20
    )


def _wishes(pods: RolePods) -> str:
    parts = [f"{pods.cpu_millicores}m CPU", f"{pods.memory_mib} MiB"]
    parts += [f"{pods.gpus} GPUs"] if pods.gpus else []
    parts += [f"{pods.efa_interfaces} EFA interfaces"] if pods.efa_interfaces else []
    parts += [f"{pods.hugepages_mib} MiB of 2 MiB pages"] if pods.hugepages_mib else []
    return ", ".join(parts)
