"""The KFP component `publish_checkpoint`: its image, command, parameters and outputs."""

from kfp import dsl


@dsl.container_component
def publish_checkpoint(
    config: str,
    checkpoint: str,
    tracking_run: str,
    model: dsl.OutputPath(str),
    version: dsl.OutputPath(str),
    metrics: dsl.Output[dsl.Metrics],
):
    """Exports the policy as a Hugging Face checkpoint and registers it as `candidate`.

    Args:
        config: Whole run configuration as one JSON string.
        checkpoint: URI of the checkpoint to publish.
        tracking_run: Id of the run on the tracking server.

    Returns:
        model: URI of the Hugging Face folder.
        version: Version in the model registry.
        metrics: Size and export time.
    """
    return dsl.ContainerSpec(
        image="train",
        command=["python3", "-m", "components.publish_checkpoint.main"],
        args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER],
    )
