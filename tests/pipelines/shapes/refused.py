"""Pipelines with constructs that KFP documents and the Argo translation refuses, each with words of the refusal."""

from kfp import dsl, kubernetes

from tests.pipelines.shapes import components as c
from tests.pipelines.shapes.running import inner


@dsl.pipeline
def imported():
    made = dsl.importer(artifact_uri="s3://bucket/data", artifact_class=dsl.Dataset)
    c.read(made=made.output)


@dsl.pipeline
def claim_created():
    claim = kubernetes.CreatePVC(pvc_name="room", access_modes=["ReadWriteOnce"], size="1Gi")
    kubernetes.mount_pvc(c.say(text="a"), pvc_name=claim.outputs["name"], mount_path="/room")


@dsl.pipeline
def claim_of_a_parameter(claim: str):
    kubernetes.mount_pvc(c.say(text="a"), pvc_name=claim, mount_path="/room")


@dsl.pipeline
def secret_of_a_parameter(secret: str):
    kubernetes.use_secret_as_env(c.say(text="a"), secret, {"key": "KEY"})


@dsl.pipeline
def cpu_of_a_parameter(cpu: str = "1"):
    c.say(text="a").set_cpu_limit(cpu)


@dsl.pipeline
def image_of_a_parameter(image: str):
    c.say(text="a").set_container_image(image)


@dsl.pipeline
def retried_pipeline():
    inner().set_retry(2)


@dsl.pipeline
def broken_factor():
    c.flaky().set_retry(2, backoff_duration="1s", backoff_factor=1.5)


@dsl.pipeline
def task_id():
    c.say(text=dsl.PIPELINE_TASK_ID_PLACEHOLDER)


@dsl.component(
    base_image="python:3.11",
    task_config_passthroughs=[dsl.TaskConfigField.RESOURCES],
    install_kfp_package=False,
)
def configured_task(settings: dsl.TaskConfig):
    print(settings)


@dsl.pipeline
def passed_through():
    configured_task()


@dsl.pipeline
def takes_an_artifact(made: dsl.Input[dsl.Dataset]):
    c.read(made=made)


@dsl.pipeline
def write_several() -> list[dsl.Dataset]:
    with dsl.ParallelFor(["a", "b"]) as text:
        made = c.write(text=text)
    return dsl.Collected(made.outputs["made"])


@dsl.pipeline
def loop_over_artifacts():
    with dsl.ParallelFor(write_several().output) as one:
        c.read(made=one)


@dsl.pipeline
def lost_items(names: list):
    with dsl.ParallelFor(c.count(up_to=2).outputs["numbers"]) as number:
        with dsl.ParallelFor(names) as name:
            # KFP's compiler loses the way of the inner item.
            c.say(text=f"{name}{number}")
            c.double(number=number)


def workspace():
    """A pipeline with a workspace."""

    @dsl.pipeline(name="workspace", pipeline_config=dsl.PipelineConfig(workspace=dsl.WorkspaceConfig(size="1Gi")))
    def pipeline():
        c.say(text=dsl.WORKSPACE_PATH_PLACEHOLDER)

    return pipeline


REFUSED = [
    (imported, ("task 'importer'", "'importer'", "pass the URI")),
    (claim_created, ("task 'createpvc'", "CreatePVC", "kubectl")),
    (claim_of_a_parameter, ("task 'say'", "pvcMount", "constant")),
    (secret_of_a_parameter, ("task 'say'", "secretAsEnv", "constant")),
    (cpu_of_a_parameter, ("task 'say'", "cpu limit", "constant")),
    (image_of_a_parameter, ("task 'say'", "image", "name the image")),
    (retried_pipeline, ("task 'inner'", "set_retry", "tasks inside")),
    (broken_factor, ("task 'flaky'", "backoff_factor 1.5", "use 2")),
    (task_id, ("task 'say'", "pipeline_task_uuid", "PIPELINE_JOB_ID")),
    (passed_through, ("task 'configured-task'", "taskConfigPassthroughs", "task itself")),
    (takes_an_artifact, ("artifact 'made'", "pass its URI")),
    (loop_over_artifacts, ("artifactIterator", "list parameter of URIs")),
    (lost_items, ("names", "a loop inside a loop", "pass the item")),
    (workspace(), ("'workspace'", "mount_pvc")),
]
