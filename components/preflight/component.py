"""The KFP component `preflight`: its image, command, parameters and outputs."""

from kfp import dsl


@dsl.container_component
def preflight(
    config: str,
    checkpoint: str,
    job: str,
    tracking_run: dsl.OutputPath(str),
    manifest: dsl.Output[dsl.Artifact],
):
    """Checks that the run can work here, before it costs anything, and opens its record on the tracking server.

    Args:
        config: Whole run configuration as one JSON string.
        checkpoint: URI of a checkpoint to start from; empty to make a new model.
        job: Id of this pipeline execution; a new one makes the checks run again.

    Returns:
        tracking_run: Id of the run on the tracking server.
        manifest: Build manifest: versions, images, commit and host facts (JSON).
    """
    return dsl.ContainerSpec(
        image="control",
        command=["python3", "-m", "components.preflight.main"],
        args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER],
    )
