"""The KFP component `warm_start`: its image, command, parameters and outputs."""

from kfp import dsl


@dsl.container_component
def warm_start(
    config: str,
    data: str,
    tracking_run: str,
    checkpoint: dsl.OutputPath(str),
    metrics: dsl.Output[dsl.Metrics],
):
    """Builds a new Qwen3-MoE and trains it on the references until reinforcement learning has something to reinforce.

    Args:
        config: Whole run configuration as one JSON string.
        data: URI of the staged data's manifest.
        tracking_run: Id of the run on the tracking server.

    Returns:
        checkpoint: URI of the checkpoint to start from.
        metrics: Optimizer steps, loss and greedy exact match.
    """
    return dsl.ContainerSpec(
        image="train",
        command=["python3", "-m", "components.warm_start.main"],
        args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER],
    )
