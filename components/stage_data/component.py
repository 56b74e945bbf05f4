"""The KFP component `stage_data`: its image, command, parameters and outputs."""

from kfp import dsl


@dsl.container_component
def stage_data(
    config: str,
    tracking_run: str,
    data: dsl.OutputPath(str),
    metrics: dsl.Output[dsl.Metrics],
):
    """Reads the prompts, checks every row, splits and writes them to the run's store.

    Args:
        config: Whole run configuration as one JSON string.
        tracking_run: Id of the run on the tracking server.

    Returns:
        data: URI of the staged data's manifest.
        metrics: Rows of each split, and duplicates left out.
    """
    return dsl.ContainerSpec(
        image="control",
        command=["python3", "-m", "components.stage_data.main"],
        args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER],
    )
