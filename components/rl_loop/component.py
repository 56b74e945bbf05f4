"""The KFP component `rl_loop`: its image, command, parameters and outputs."""

from kfp import dsl


@dsl.container_component
def rl_loop(
    config: str,
    data: str,
    checkpoint: str,
    tracking_run: str,
    policy: dsl.OutputPath(str),
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
):
    """Owns the asynchronous loop: starts rollout, reward, train and broadcast, and watches their progress.

    Args:
        config: Whole run configuration as one JSON string.
        data: URI of the staged data's manifest.
        checkpoint: URI of the checkpoint to start from.
        tracking_run: Id of the run on the tracking server.

    Returns:
        policy: URI of the last durable checkpoint.
        metrics: Final figures of the loop.
        report: Learning curve and timeline on one page.
    """
    return dsl.ContainerSpec(
        image="control",
        command=["python3", "-m", "components.rl_loop.main"],
        args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER],
    )
