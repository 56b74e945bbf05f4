"""The main pipeline: a policy, new or given, is post-trained by asynchronous RL, published, and evaluated.

Checkpoints and data travel as URIs, the configuration as one JSON string. Images, GPUs and network are no matter of
this page: `pipelines.compile` puts in the images of a stack, `step` says how the pods are to be.
"""

from kfp import dsl

from components.adopt_checkpoint.component import adopt_checkpoint
from components.evaluate.component import evaluate
from components.preflight.component import preflight
from components.publish_checkpoint.component import publish_checkpoint
from components.release.component import release
from components.rl_loop.component import rl_loop
from components.stage_data.component import stage_data
from components.warm_start.component import warm_start
from pipelines.step_pod import step


@dsl.pipeline(name="post-training")
def post_training(config: str, checkpoint: str = ""):
    """Post-train a Mixture-of-Experts language model by asynchronous reinforcement learning.

    Args:
        config: Whole run configuration as one JSON string, as `tandem run FILE --dry-run` resolves it. Its `name`
            is the run's: the same configuration again goes on with that run, so a new run needs a new name.
        checkpoint: URI of a Hugging Face safetensors checkpoint to start from; empty makes a new model.
    """
    # Steps that must look at the world again on a resume take the id of this execution.
    job = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    last = step(release(config=config, job=job), limit_s=900)

    with dsl.ExitHandler(last, name="run"):
        opened = step(preflight(config=config, checkpoint=checkpoint, job=job), limit_s=1800, redis=True)
        run = opened.outputs["tracking_run"]
        data = step(stage_data(config=config, tracking_run=run)).outputs["data"]

        with dsl.If(checkpoint == "", name="new-model"):
            new = step(warm_start(config=config, data=data, tracking_run=run), cpu="200m", memory="1Gi")
        with dsl.Else(name="given-checkpoint"):
            given = step(adopt_checkpoint(config=config, data=data, given=checkpoint, tracking_run=run), limit_s=3600)
        start = dsl.OneOf(new.outputs["checkpoint"], given.outputs["checkpoint"])

        loop = step(
            rl_loop(config=config, data=data, checkpoint=start, tracking_run=run), redis=True, reward=True, retries=2
        )
        published = publish_checkpoint(config=config, checkpoint=loop.outputs["policy"], tracking_run=run)
        step(published, cpu="200m", memory="1Gi")
        evaluated = evaluate(
            config=config,
            data=data,
            baseline=start,
            model=published.outputs["model"],
            version=published.outputs["version"],
            tracking_run=run,
        )
        step(evaluated, cpu="200m", memory="1Gi", reward=True)
