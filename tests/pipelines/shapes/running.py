"""Pipelines of every construct that the Argo translation runs, and what each must end with."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kfp import dsl, kubernetes

from tests.pipelines.shapes import components as c

AWKWARD = 'two {{braces}} {{{three}}}, $(HOME) $$ "quotes" \\ back, é 😀 <b>&\n\ttab'
GIVEN = AWKWARD.replace("{", "(").replace("😀", "…")
"""The same as the argument of a pipeline, which Argo reads for tags of its own."""


@dsl.pipeline
def types(text: str, several: list, mapping: dict, whole: int = 3, real: float = 0.5, yes: bool = True):
    first = c.echo(text=text, whole=whole, real=real, yes=yes, several=several, mapping=mapping).set_caching_options(
        True
    )
    o = first.outputs
    c.echo(
        text=o["text_out"], whole=o["whole_out"], real=o["real_out"], yes=o["yes_out"], several=o["several_out"],
        mapping=o["mapping_out"], left_out="given",
    )  # fmt: skip
    c.echo(text=AWKWARD, whole=-1, real=1e-9, yes=False, several=[1, "a", [True]], mapping={"a": {"b": {"c": 1}}})


@dsl.pipeline
def artifacts():
    made = c.stored(c.write(text="one two three"))
    c.stored(c.read(made=made.outputs["made"]))


@dsl.pipeline
def branches(number: int = 7, flag: bool = False):
    with dsl.If(number < 5):
        low = c.say(text="low")
    with dsl.Elif(number < 10):
        middle = c.say(text=f"middle {number}")
    with dsl.Else():
        high = c.say(text="high")
    c.say(text=dsl.OneOf(low.outputs["said"], middle.outputs["said"], high.outputs["said"])).set_display_name("chosen")
    with dsl.If(flag == True):  # noqa: E712
        c.say(text="never").after(c.say(text="never before"))


@dsl.pipeline
def artifact_branches(which: str = "right"):
    with dsl.If(which == "left"):
        left = c.stored(c.write(text="left"))
    with dsl.Else():
        right = c.stored(c.write(text="right side"))
    c.stored(c.read(made=dsl.OneOf(left.outputs["made"], right.outputs["made"])))


@dsl.pipeline
def inner(number: int = 4, name: str = "inner") -> int:
    c.say(text=f"{name} {number}")
    return c.double(number=number).outputs["doubled"]


@dsl.pipeline
def nested():
    outer = inner(number=10, name="outer")
    c.double(number=outer.output)
    inner()


@dsl.pipeline
def loop():
    with dsl.ParallelFor(["a {{b}}", "$(HOME)", "c"]) as text:
        c.say(text=text)
    with dsl.ParallelFor([{"n": 1, "m": 5}, {"n": 2, "m": 6}, {"n": 3, "m": 7}], parallelism=2) as item:
        twice = c.double(number=item.n)
    c.total(numbers=dsl.Collected(twice.outputs["doubled"]))


@dsl.pipeline
def nested_loops(names: list = ["Ada", "Alan"]):  # noqa: B006
    numbers = c.count(up_to=3)
    with dsl.ParallelFor(numbers.outputs["numbers"]) as number:
        with dsl.ParallelFor(["x", "y"]) as letter:
            c.say(text=letter)
            twice = c.double(number=number)
    c.total(numbers=dsl.Collected(twice.outputs["doubled"]))
    with dsl.ParallelFor(names) as name:
        c.say(text=name)
    with dsl.ParallelFor(c.count(up_to=0).outputs["numbers"]) as nothing:
        never = c.double(number=nothing)
    c.total(numbers=dsl.Collected(never.outputs["doubled"]))


@dsl.pipeline
def loop_of_conditions():
    with dsl.ParallelFor([1, 5, 9]) as number:
        with dsl.If(number > 3):
            c.say(text=f"big {number}")


@dsl.pipeline
def collected_artifacts():
    with dsl.ParallelFor(["one", "two words"]) as text:
        made = c.stored(c.write(text=text))
    c.stored(c.read_all(made=dsl.Collected(made.outputs["made"])))


@dsl.pipeline
def closed():
    with dsl.ExitHandler(c.status_of(), name="work"):
        c.say(text="done")


@dsl.pipeline
def closed_after_failure():
    with dsl.ExitHandler(c.status_of(), name="work"):
        c.say(text="never").after(c.fail(code=65))


@dsl.pipeline
def retried():
    c.flaky().set_retry(2, backoff_duration="1s", backoff_factor=2.0, backoff_max_duration="600s")


@dsl.pipeline
def failure_ignored():
    broken = c.fail(code=64)
    c.say(text="still").after(broken).ignore_upstream_failure()


@dsl.pipeline
def two_failures_ignored():
    first, second = c.fail(code=64), c.say(text="fine")
    c.say(text="after both").after(first, second).ignore_upstream_failure()


@dsl.pipeline
def placeholders(name: str = "Ada"):
    said = c.words(first=name)
    c.words(first=f"{name} and {said.outputs['said']}", second=dsl.PIPELINE_TASK_NAME_PLACEHOLDER)
    c.say(text=f"job {dsl.PIPELINE_JOB_ID_PLACEHOLDER} of {dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER}")


@dsl.pipeline
def built_values(name: str = "q", number: int = 3):
    said = c.say(text="made").outputs["said"]
    c.echo(
        text=AWKWARD, whole=1, real=0.5, yes=True, several=[name, number, said, [f"{name}-{said}", 1.5, True, {}], AWKWARD],
        mapping={"{{a}}": {"b": {"c": said}}, "d": [name, 4], "e": "job of " + dsl.PIPELINE_TASK_NAME_PLACEHOLDER},
    )  # fmt: skip


@dsl.pipeline
def pod_settings():
    task = c.environment(names=["A", "SECRET", "MISSING", "SETTING", "NAMESPACE"])
    task.set_env_variable("A", "1").set_cpu_request("50m").set_memory_request("32Mi").set_memory_limit("256Mi")
    kubernetes.use_secret_as_env(task, "shape-secret", {"key": "SECRET"})
    kubernetes.use_secret_as_env(task, "shape-missing", {"key": "MISSING"}, optional=True)
    kubernetes.use_secret_as_volume(task, "shape-secret", "/etc/shape-secret", optional=True)
    kubernetes.use_config_map_as_env(task, "shape-settings", {"key": "SETTING"})
    kubernetes.use_config_map_as_volume(task, "shape-settings", "/etc/shape-settings")
    kubernetes.empty_dir_mount(task, "room", "/room", size_limit="16Mi")
    kubernetes.use_field_path_as_env(task, "NAMESPACE", "metadata.namespace")
    kubernetes.add_pod_label(task, "shape", "pod-settings")
    kubernetes.add_pod_annotation(task, "shape", "pod settings")
    kubernetes.add_node_selector(task, "kubernetes.io/os", "linux")
    kubernetes.add_toleration(task, "spot", operator="Exists", effect="NoSchedule", toleration_seconds=None)
    kubernetes.add_node_affinity(
        task, match_expressions=[{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}], weight=5
    )
    kubernetes.set_image_pull_policy(task, "IfNotPresent")
    kubernetes.set_image_pull_secrets(task, ["shape-registry"])
    kubernetes.set_timeout(task, 300)
    kubernetes.set_security_context(task, run_as_user=10001, run_as_group=10001, run_as_non_root=True)


def configured():
    """A pipeline with KFP's own settings of a run."""

    @dsl.pipeline(
        name="configured",
        pipeline_config=dsl.PipelineConfig(ttl_seconds_after_finished=3600, active_deadline_seconds=600),
    )
    def pipeline():
        c.say(text="configured")

    return pipeline


class Outputs(NamedTuple):
    """Values that tasks of one name put out, in any order."""

    task: str
    key: str
    values: list[Any]


@dataclass(frozen=True)
class Shape:
    """A pipeline, its arguments, and how a run of it ends.

    Attributes:
        outputs: What tasks put out.
        skipped: Tasks that may not have run.
        message: Part of the message of the task that fails; empty for a run that succeeds.
    """

    pipeline: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[Outputs, ...] = ()
    skipped: tuple[str, ...] = ()
    message: str = ""

    @property
    def name(self) -> str:
        return str(self.pipeline.name).replace("_", "-")


def out(task: str, key: str, *values: Any) -> Outputs:
    return Outputs(task, key, list(values))


SHAPES = [
    Shape(
        types,
        {"text": GIVEN, "several": [1, {"a": "{{x}}"}], "mapping": {"k": [1.5, None]}},
        (
            out("echo", "text_out", GIVEN), out("echo-2", "text_out", GIVEN), out("echo-3", "text_out", AWKWARD),
            out("echo-2", "several_out", [1, {"a": "{{x}}"}]), out("echo-2", "mapping_out", {"k": [1.5, None]}),
            out("echo-2", "whole_out", 3), out("echo-2", "real_out", 0.5), out("echo-2", "yes_out", True),
            out("echo", "left_out_out", "default"), out("echo-2", "left_out_out", "given"),
            out("echo-3", "several_out", [1, "a", [True]]), out("echo-3", "mapping_out", {"a": {"b": {"c": 1}}}),
        ),
    ),
    Shape(artifacts, outputs=(out("read", "text", "one two three"), out("read", "words", 3))),
    Shape(
        branches, outputs=(out("say-2", "said", "middle 7"), out("say-4", "said", "middle 7")),
        skipped=("condition-2", "condition-4", "condition-5"),
    ),
    Shape(artifact_branches, outputs=(out("read", "text", "right side"),), skipped=("condition-2",)),
    Shape(nested, outputs=(out("double", "doubled", 20, 8, 40), out("say", "said", "outer 10", "inner 4"))),
    Shape(loop, outputs=(out("say", "said", "a {{b}}", "$(HOME)", "c"), out("total", "total", 12))),
    Shape(nested_loops, outputs=(
        out("say", "said", "x", "y", "x", "y", "x", "y"), out("say-2", "said", "Ada", "Alan"),
        out("total", "total", 12), out("total-2", "total", 0),
    )),
    Shape(loop_of_conditions, outputs=(out("say", "said", "big 5", "big 9"),)),
    Shape(collected_artifacts, outputs=(out("read-all", "text", "one two words"), out("read-all", "words", 3))),
    Shape(closed, outputs=(out("say", "said", "done"), out("exit-handler-1.onExit", "seen", "SUCCEEDED exit-handler-1"))),
    Shape(
        closed_after_failure, outputs=(out("exit-handler-1.onExit", "seen", "FAILED exit-handler-1"),), skipped=("say",),
        message="exit code 65): the data is bad; mend it",
    ),
    Shape(retried),
    Shape(failure_ignored, outputs=(out("fail.onExit", "said", "still"),), message="exit code 64)"),
    Shape(two_failures_ignored, outputs=(out("say-2", "said", "after both"),), message="exit code 64)"),
    Shape(placeholders, outputs=(
        out("words", "said", "<Ada> alone"), out("words-2", "said", "<Ada and <Ada> alone> with words-2"),
    )),
    # A pipeline's value inside a list or a mapping becomes text, as on Kubeflow.
    Shape(built_values, outputs=(
        out("echo", "several_out", ["q", "3", "made", ["q-made", 1.5, True, {}], AWKWARD]),
        out("echo", "mapping_out", {"{{a}}": {"b": {"c": "made"}}, "d": ["q", 4], "e": "job of echo"}),
    )),
    Shape(pod_settings, outputs=(
        out("environment", "found", '{"A": "1", "MISSING": null, "NAMESPACE": "NAMESPACE", "SECRET": "s", "SETTING": "t"}'),
    )),
    Shape(configured()),
]  # fmt: skip
