"""The commands of `tandem` that talk to a cluster; imported by `pipelines.cli`, and as quick to load."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from configs.failure import BadConfig

if TYPE_CHECKING:
    from pipelines.targets.target import ExecutionState, Target

Command = TypeVar("Command", bound=Callable[..., Any])
TARGETS = ("argo", "kubeflow")


def kubernetes_name(what: str, most: int = 63) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that takes only names that Kubernetes takes (RFC 1123): a mistyped one would find other objects."""

    def check(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if value is not None and (len(value) > most or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", value)):
            raise BadConfig(
                f"'{value}' is no {what}: Kubernetes takes up to {most} lower-case letters, digits and dashes, with a letter"
                " or digit at both ends; give another"
            )
        return value

    return check


RUN_FILE = click.argument("run_file", type=click.Path(path_type=Path))
EXECUTION = click.argument("name", metavar="NAME", callback=kubernetes_name("name"))
OVERRIDE = click.option("-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field.")
IMAGES = click.option(
    "--images", type=click.Path(path_type=Path), help="List of images; default: images/built.json, else the stack's."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
CONTEXT = click.option("--context", help="Context of the kubeconfig; default: the current one.")
KUBECONFIG = click.option("--kubeconfig", type=click.Path(path_type=Path), help="Kubeconfig file.")
NAMESPACE = click.option(
    "-n",
    "--namespace",
    default="tandem",
    show_default=True,
    callback=kubernetes_name("namespace"),
    help="Namespace of the runs.",
)


def on_target(command: Command) -> Command:
    """Give a command the options that choose a target, and the target itself as its first argument."""
    import functools

    @functools.wraps(command)
    def wrapped(
        target: str, context: str | None, kubeconfig: Path | None, namespace: str, host: str | None, **others: Any
    ) -> Any:
        return command(open_target(target, context, kubeconfig, namespace, host), **others)

    options = (
        click.option(
            "--target", type=click.Choice(TARGETS), default="argo", show_default=True, help="Who runs the pipeline."
        ),
        CONTEXT,
        KUBECONFIG,
        NAMESPACE,
        click.option("--host", metavar="URL", help="Kubeflow Pipelines API; default: KF_PIPELINES_ENDPOINT."),
    )
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def open_target(name: str, context: str | None, kubeconfig: Path | None, namespace: str, host: str | None) -> Target:
    """The target of that name; nothing is sent yet.

    Raises:
        BadConfig: Kubeflow's address is not known.
    """
    from components.cluster.api import Cluster

    if name == "argo":
        from pipelines.targets.argo.runs import ArgoTarget

        if host:
            raise BadConfig("--host is Kubeflow's; leave it out, or add --target kubeflow")
        return ArgoTarget(Cluster(namespace, context, kubeconfig))
    from pipelines.targets.kubeflow import KubeflowTarget

    host = host or os.environ.get("KF_PIPELINES_ENDPOINT", "")
    if not host:
        raise BadConfig(
            "--target kubeflow needs the API's address; give --host http://localhost:8888 (docs/kubeflow.md)"
        )
    cluster = Cluster(namespace, context, kubeconfig) if context or kubeconfig else None
    return KubeflowTarget(host if "://" in host else f"https://{host}", namespace, cluster)


@click.command()
@RUN_FILE
@OVERRIDE
@click.option("--name", help="Name of the run; the same name and configuration again finds the same execution.")
@IMAGES
@click.option("--follow/--no-follow", default=True, show_default=True, help="Watch until the end.")
@click.option("--check", is_flag=True, help="Look for what is missing on the cluster, and send nothing.")
@JSON
@on_target
def submit(
    target: Target,
    run_file: Path,
    overrides: tuple[str, ...],
    name: str | None,
    images: Path | None,
    follow: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Run the pipeline on a cluster, from RUN_FILE."""
    from pipelines.submission import prepare

    submission = prepare(run_file, overrides, name, images)
    for note in target.check(submission):
        click.echo(f"note: {note}", err=True)
    if check:
        click.echo("the cluster has what this run needs")
        return
    state = target.submit(submission)
    if not as_json:
        click.echo(f"execution {state.name}: {state.state}" + (f"  {state.link}" if state.link else ""))
    _watch(target, state, follow, as_json)


@click.command()
@RUN_FILE
@OVERRIDE
@click.option("--cron", required=True, metavar="EXPRESSION", help='Five fields: "0 3 * * 1" is Mondays at three.')
@click.option("--timezone", default="", help="IANA name, such as Europe/Berlin; default: UTC, or Kubeflow's own.")
@click.option("--name", help="Name of the schedule; default: the run file's.")
@IMAGES
@JSON
@on_target
def schedule(
    target: Target,
    run_file: Path,
    overrides: tuple[str, ...],
    cron: str,
    timezone: str,
    name: str | None,
    images: Path | None,
    as_json: bool,
) -> None:
    """Run the pipeline at set times; each run is named after the schedule and its time."""
    from pipelines.cron import check_cron, check_timezone
    from pipelines.submission import prepare_schedule

    cron, timezone = check_cron(cron), check_timezone(timezone)
    submission = prepare_schedule(run_file, overrides, name, images)
    for note in target.check(submission):
        click.echo(f"note: {note}", err=True)
    made = target.schedule(submission, cron, timezone)
    if as_json:
        click.echo(json.dumps(made.to_dict()))
    else:
        click.echo(f"schedule {made.name}: {made.cron} {made.timezone or '(the timezone of the controller)'}")


@click.command()
@EXECUTION
@on_target
def unschedule(target: Target, name: str) -> None:
    """Remove schedule NAME; the runs it started go on."""
    target.unschedule(name)
    click.echo(f"removed schedule {name}")


@click.command()
@JSON
@on_target
def executions(target: Target, as_json: bool) -> None:
    """List executions, the newest first."""
    from pipelines.following import duration

    found = target.executions()
    if as_json:
        click.echo(json.dumps([one.to_dict() for one in found], indent=2))
        return
    for one in found:
        origin = f"  by schedule {one.schedule}" if one.schedule else ""
        took = duration(one.started, one.ended)
        click.echo(f"{one.name:<44} {one.state:<10} {took:>8}  {one.created:%Y-%m-%d %H:%M}{origin}")
    if not found:
        click.echo("no executions")


@click.command()
@JSON
@on_target
def schedules(target: Target, as_json: bool) -> None:
    """List schedules."""
    found = target.schedules()
    if as_json:
        click.echo(json.dumps([one.to_dict() for one in found], indent=2))
        return
    for one in found:
        last = f"last {one.last:%Y-%m-%d %H:%M}" if one.last else "not run yet"
        state = "error" if one.words else "on" if one.enabled else "paused"
        click.echo(f"{one.name:<30} {state:<7} {one.cron:<16} {one.timezone:<6} {last}")
        if one.words:
            click.echo(f"  {one.words}")
    if not found:
        click.echo("no schedules")


@click.command()
@EXECUTION
@click.option("--follow/--no-follow", default=False, show_default=True, help="Watch until the end.")
@JSON
@on_target
def status(target: Target, name: str, follow: bool, as_json: bool) -> None:
    """Show the steps of execution NAME, or of the newest execution of run NAME; with --follow, end as it ends."""
    from pipelines.following import lines

    state = target.status(name)
    if follow:
        _watch(target, state, follow, as_json)
    elif as_json:
        click.echo(json.dumps(state.to_dict(), indent=2))
    else:
        click.echo("\n".join(lines(state)))


@click.command()
@EXECUTION
@click.option(
    "--part", default="", metavar="STEP|ROLE|POD", help="One step (rl_loop), role (train) or pod; default: all."
)
@click.option("-f", "--follow", is_flag=True, help="Go on until the execution ends.")
@on_target
def logs(target: Target, name: str, part: str, follow: bool) -> None:
    """Print the logs of the steps and roles of execution NAME."""
    for line in target.logs(name, part, follow):
        click.echo(line)


@click.command()
@EXECUTION
@click.option("--now", is_flag=True, help="Leave out the exit handler, which closes the run's MLflow record (Argo).")
@JSON
@on_target
def cancel(target: Target, name: str, now: bool, as_json: bool) -> None:
    """End execution NAME, and wait until nothing of it is left."""
    state = target.cancel(name, now)
    if as_json:
        click.echo(json.dumps(state.to_dict(), indent=2))
    else:
        click.echo(f"execution {state.name}: {state.state}; nothing of it is left on the cluster")


@click.command()
@EXECUTION
@click.option("--follow/--no-follow", default=True, show_default=True, help="Watch until the end.")
@JSON
@on_target
def retry(target: Target, name: str, follow: bool, as_json: bool) -> None:
    """Go on with run NAME, which failed or was canceled: finished steps repeat their outputs."""
    state = target.retry(name)
    if not as_json:
        click.echo(f"execution {state.name}: {state.state}")
    _watch(target, state, follow, as_json)


@click.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
def diff(old: Path, new: Path) -> None:
    """Tell in words how compiled pipeline NEW differs from OLD."""
    from pipelines.difference import differences

    lines = differences(old, new)
    for line in lines:
        click.echo(line)
    if not lines:
        click.echo("no difference")


@click.command()
@CONTEXT
@KUBECONFIG
@NAMESPACE
@click.option("--render", "render_only", is_flag=True, help="Print the objects as YAML and apply nothing.")
@click.option("--dry-run", is_flag=True, help="Have the server check the objects, and keep nothing.")
@IMAGES
@click.option("--mlflow/--no-mlflow", default=True, show_default=True, help="Install MLflow beside the runs.")
@click.option("--mlflow-storage", "mlflow_storage_gib", type=click.IntRange(min=0), default=20, show_default=True,
              help="GiB of MLflow's volume; 0 keeps its files in the pod.")  # fmt: skip
@click.option("--mlflow-artifacts", default="", metavar="S3_URI", help="MLflow's artifacts; default: its volume.")
@click.option("--tracking-uri", default="", metavar="URL", help="An MLflow that is there already, with --no-mlflow.")
@click.option("--kueue", is_flag=True, help="Make queues (ResourceFlavor, ClusterQueue, LocalQueue).")
@click.option("--kubeflow", is_flag=True, help="The namespace is Kubeflow's or a profile's.")
@click.option("--pod-security", type=click.Choice(("restricted", "baseline", "privileged")), default="restricted",
              show_default=True, help="Pod Security level; host-path GDRCopy needs privileged.")  # fmt: skip
@click.option("--role-arn", default="", metavar="ARN", help="IAM role for the bucket (EKS).")
@click.option("--region", default="", help="AWS region.")
@click.option("--s3-endpoint", default="", metavar="URL", help="S3-compatible server; default: AWS.")
@click.option("--pull-policy", type=click.Choice(("IfNotPresent", "Always", "Never")), default="IfNotPresent",
              help="Of MLflow's image.")  # fmt: skip
def install(
    context: str | None,
    kubeconfig: Path | None,
    namespace: str,
    render_only: bool,
    dry_run: bool,
    images: Path | None,
    **settings: Any,
) -> None:
    """Install what runs need in a namespace: accounts, roles, network rules, settings, MLflow."""
    from components.cluster.api import Cluster
    from pipelines.install import Settings, render, to_yaml
    from pipelines.install import install as apply
    from pipelines.submission import read_images

    built = read_images(images) if settings["mlflow"] or images else None
    objects = render(Settings(namespace=namespace, image=built.control if built else "", **settings))
    if render_only:
        click.echo(to_yaml(objects), nl=False)
        return
    for line in apply(Cluster(namespace, context, kubeconfig), objects, dry_run):
        click.echo(f"{line} {'accepted' if dry_run else 'applied'}")


def _watch(target: Target, state: ExecutionState, follow: bool, as_json: bool) -> None:
    """Follow an execution if asked, print how it stands, and end as it did."""
    from pipelines.following import Watch

    if follow and not state.over:
        try:
            state = Watch(target, quiet=as_json).follow(state.name)
        except KeyboardInterrupt:
            click.echo(
                f"execution {state.name} goes on; `tandem status {state.name} --follow` watches it again", err=True
            )
            raise click.Abort from None
    if as_json:
        click.echo(json.dumps(state.to_dict(), indent=2))
    elif state.over:
        click.echo(f"execution {state.name}: {state.state}")
    if failure := state.failure():
        raise failure


COMMANDS = (submit, schedule, schedules, unschedule, executions, status, logs, cancel, retry, diff, install)
