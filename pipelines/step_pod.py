"""The pod of a pipeline step on a cluster: identity, requests, credentials and scratch space, the same for every step.

Kubeflow and the Argo translation read these settings from the compiled pipeline; a local run has no use for them.

Only the loop is retried by the pipeline: its pods outlive a launcher that was killed, and the retry goes on with them.
Kubeflow retries every failure alike, so a step leaves in its marker which workflow it failed in: a mistake in the
configuration or the data (exit codes 64 and 65) is told again at once instead of made again. A pod whose node is lost is
not retried by Kubeflow at all. There, and for the other steps, `tandem retry` goes on: finished steps repeat their outputs.
"""

from __future__ import annotations

from typing import Any

from kfp import kubernetes

from components.step import WORKFLOW

USER = 10001
"""The user of the images."""
SCRATCH = "/scratch"
SETTINGS = ("MLFLOW_TRACKING_URI", "AWS_REGION", "AWS_ENDPOINT_URL", "MLFLOW_S3_ENDPOINT_URL")
"""Keys of ConfigMap `tandem`, and the environment variables they become."""
STORE = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
TRACKING = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


def step(
    task: Any,
    *,
    cpu: str = "100m",
    memory: str = "512Mi",
    limit_s: int = 0,
    redis: bool = False,
    reward: bool = False,
    retries: int = 0,
) -> Any:
    """Say how a step's pod is to be, and that its result is never taken from a cache.

    Args:
        task: KFP task.
        cpu: Requested; no limit, so a step uses what is idle.
        memory: Requested; no limit, so a large dataset slows a small cluster before it ends the step.
        limit_s: Seconds after which the pod is ended, for steps whose length does not depend on the run; 0 for none.
        redis: Whether the step talks to the loop's Redis and gets its password.
        reward: Whether the step asks a reward endpoint and gets its token.
        retries: Times the step is tried again, ten seconds later.

    Returns:
        The task.
    """
    task.set_caching_options(False)
    task.set_cpu_request(cpu).set_memory_request(memory)
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
    kubernetes.empty_dir_mount(task, volume_name="scratch", mount_path=SCRATCH)
    kubernetes.use_config_map_as_env(task, "tandem", {key: key for key in SETTINGS}, optional=True)
    # Without the secret a step takes S3's credentials from its ServiceAccount's IAM role.
    kubernetes.use_secret_as_env(task, "tandem-s3", {key: key for key in STORE}, optional=True)
    kubernetes.use_secret_as_env(task, "tandem-tracking", {key: key for key in TRACKING}, optional=True)
    kubernetes.use_field_path_as_env(task, WORKFLOW, "metadata.labels['workflows.argoproj.io/workflow']")
    if retries:
        # Argo counts the longest backoff from the first attempt's start, ends a later attempt that runs past it and then
        # retries no more; KFP's default of an hour would cut off a loop that runs longer.
        task.set_retry(retries, backoff_duration="10s", backoff_factor=2.0, backoff_max_duration="720h")
    if redis:
        kubernetes.use_secret_as_env(task, "tandem-redis", {"password": "REDIS_PASSWORD"})
    if reward:
        kubernetes.use_secret_as_env(task, "tandem-reward", {"REWARD_TOKEN": "REWARD_TOKEN"}, optional=True)
    if limit_s:
        kubernetes.set_timeout(task, limit_s)
    return task
