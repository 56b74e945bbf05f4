"""The KFP component `adopt_checkpoint`: its image, command, parameters and outputs."""

from kfp import dsl


@dsl.container_component
def adopt_checkpoint(
    config: str,
    data: str,
    given: str,
    tracking_run: str,
    checkpoint: dsl.OutputPath(str),
):
    """Checks that a given checkpoint is one the loop can train, without loading it.

    Args:
        config: Whole run configuration as one JSON string.
        data: URI of the staged data's manifest.
        given: URI of a Hugging Face safetensors checkpoint.
        tracking_run: Id of the run on the tracking server.

    Returns:
        checkpoint: URI of the checkpoint to start from.
    """
    return dsl.ContainerSpec(
        image="control",
        command=["python3", "-m", "components.adopt_checkpoint.main"],
        args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER],
    )
