"""The KFP component `evaluate`: its image, command, parameters and outputs."""

from kfp import dsl


@dsl.container_component
def evaluate(
    config: str,
    data: str,
    baseline: str,
    model: str,
    version: str,
    tracking_run: str,
    promoted: dsl.OutputPath(str),
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
):
    """Scores candidate and champion on the same held-out prompts and promotes a candidate that wins by the margin.

    Args:
        config: Whole run configuration as one JSON string.
        data: URI of the staged data's manifest.
        baseline: URI of the checkpoint the loop started from.
        model: URI of the candidate's Hugging Face folder.
        version: The candidate's version in the model registry.
        tracking_run: Id of the run on the tracking server.

    Returns:
        promoted: `true` if the alias `champion` moved, else `false`.
        metrics: Exact match before and after, with bootstrap bounds.
        report: The run on one page, with the evaluation.
    """
    return dsl.ContainerSpec(
        image="train",
        command=["python3", "-m", "components.evaluate.main"],
        args=[dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER],
    )
