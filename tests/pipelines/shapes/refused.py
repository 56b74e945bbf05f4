"""Pipelines with constructs that KFP documents and the Argo translation refuses, each with words of the refusal."""

from kfp import dsl, kubernetes

from pipelines.targets.argo.pod import LAUNCHER_VOLUME, SCRATCH_VOLUME
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


@dsl.pipeline
def root_placeholder():
    c.say(text=f"to {dsl.PIPELINE_ROOT_PLACEHOLDER}")


@dsl.pipeline
def unknown_placeholder_in_a_list():
    c.environment(names=["a", ["{{$.unheard_of}}"]])


@dsl.pipeline
def placeholder_as_a_key(name: str):
    c.echo(text="a", whole=1, real=0.5, yes=True, several=[], mapping={"{{$.unheard_of}}": name})


@dsl.pipeline
def placeholder_as_an_item():
    with dsl.ParallelFor([dsl.PIPELINE_JOB_ID_PLACEHOLDER, "a"]) as text:
        c.say(text=text)


@dsl.pipeline
def escaped_newline(text: str):
    with dsl.If(text == "two\\nlines"):
        c.say(text="a")


@dsl.pipeline
def escaped_code(text: str):
    with dsl.If(text == "\\u0041"):
        c.say(text="a")


@dsl.pipeline
def volume_named_twice():
    task = c.say(text="a")
    kubernetes.use_secret_as_volume(task, "room", "/secret")
    kubernetes.empty_dir_mount(task, "room", "/room")


@dsl.pipeline
def volume_of_two_sizes():
    task = c.say(text="a")
    kubernetes.empty_dir_mount(task, "room", "/room", size_limit="1Mi")
    kubernetes.empty_dir_mount(task, "room", "/other", size_limit="2Mi")


def reserved_volume(name: str):
    """A pipeline that names a volume as the translation names one of its own."""

    @dsl.pipeline(name=f"volume-{name}")
    def pipeline():
        kubernetes.empty_dir_mount(c.say(text="a"), name, "/room")

    return pipeline


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
    (root_placeholder, ("task 'say'", "parameter 'text'", "{{$.pipeline_root}}", "pass the value")),
    (unknown_placeholder_in_a_list, ("task 'environment'", "parameter 'names'", "{{$.unheard_of}}")),
    (placeholder_as_a_key, ("task 'echo'", "parameter 'mapping'", "{{$.unheard_of}}")),
    (placeholder_as_an_item, ("items of its loop", "{{$.pipeline_job_uuid}}")),
    (escaped_newline, ("'\\n'", "without a backslash")),
    (escaped_code, ("'\\u'", "without a backslash")),
    (volume_named_twice, ("task 'say'", "called 'room'", "volume_name")),
    (volume_of_two_sizes, ("task 'say'", "called 'room'", "volume_name")),
    (reserved_volume(LAUNCHER_VOLUME), ("task 'say'", f"'{LAUNCHER_VOLUME}'", "volume_name")),
    (reserved_volume(SCRATCH_VOLUME), ("task 'say'", f"'{SCRATCH_VOLUME}'", "volume_name")),
    (workspace(), ("'workspace'", "mount_pvc")),
]
