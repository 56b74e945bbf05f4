"""`tandem`: the command line. Each command imports what it needs when it runs, so that help answers at once."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import NoReturn

import click

from configs.failure import DEFECT, TOLD_TO_LEAVE, BadConfig, Failure
from pipelines.cli_bench import bench
from pipelines.cli_cluster import COMMANDS
from pipelines.cli_options import JSON_FILE, OVERRIDE, write_json

RUNS = click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of the runs (storage.scratch).",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tandem-rl")
def tandem() -> None:
    """Asynchronous RL post-training of Mixture-of-Experts language models, run as a Kubeflow pipeline."""


@tandem.command()
@click.argument("run_file", type=click.Path(path_type=Path), required=False)
@OVERRIDE
@JSON_FILE
@click.option("--name", help="Name of the run; default: the file's name and the time.")
@click.option("--resume", metavar="RUN", help="Go on with a run that was stopped or failed.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and stop.")
@click.option("--plain", is_flag=True, help="Plain lines instead of a live display.")
@RUNS
def run(
    run_file: Path | None,
    overrides: tuple[str, ...],
    json_file: Path | None,
    name: str | None,
    resume: str | None,
    dry_run: bool,
    plain: bool,
    runs: Path,
) -> None:
    """Run the compiled pipeline on this machine, from RUN_FILE or from where a run stopped."""
    from pipelines.execution import Execution, resolve, resume_config

    if (run_file is None) == (resume is None):
        raise BadConfig("give a run file (tandem run configs/runs/quickstart.yaml) or --resume RUN, one of the two")
    if resume is not None:
        if overrides or name:
            raise BadConfig("--resume goes on with the run's own configuration; leave out -s and --name")
        config = resume_config(resume, runs)
    else:
        assert run_file is not None
        config = resolve(run_file, overrides, name, runs)
    if dry_run:
        click.echo(config.to_yaml(), nl=False)
        return
    execution = Execution(config, resumed=resume is not None, plain=plain)
    summary = execution.run()
    write_json(json_file, summary)


@tandem.command()
@click.option("--stack", default="cpu", show_default=True, help="Stack whose images go into the pipeline.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; default: the committed one.")
@click.option("--check", is_flag=True, help="Write nothing; fail if the committed file is stale.")
def compile(stack: str, output: Path | None, check: bool) -> None:
    """Compile the pipeline to KFP IR."""
    import tempfile

    from configs.stack import load_stack
    from pipelines.compile import POST_TRAINING, compile_pipeline, same_ir

    target = output or POST_TRAINING
    if check:
        with tempfile.TemporaryDirectory() as folder:
            fresh = Path(folder) / "pipeline.yaml"
            compile_pipeline(load_stack(stack), fresh)
            if not target.exists() or not same_ir(fresh, target):
                raise BadConfig(f"{target}: is stale; run `make compiled` and commit it")
        click.echo(f"{target} is fresh")
    else:
        compile_pipeline(load_stack(stack), target)
        click.echo(f"wrote {target}")


@tandem.command()
@click.argument("run_name", metavar="RUN")
@JSON_FILE
@RUNS
def audit(run_name: str, json_file: Path | None, runs: Path) -> None:
    """Prove that every group of RUN was counted exactly once."""
    import msgspec

    from pipelines.execution import audit_run

    result = audit_run(run_name, runs)
    reasons = ", ".join(f"{reason} {count}" for reason, count in result.dropped_by_reason.items()) or "none"
    click.echo(
        f"{result.run}: issued {result.groups_issued} = durable {result.groups_durable} + in flight"
        f" {result.groups_in_flight} + dropped {result.groups_dropped} ({reasons})"
    )
    click.echo(
        f"durable updates {result.durable_updates}, leases reclaimed {result.groups_reclaimed},"
        f" duplicates refused {result.duplicates_refused}"
    )
    write_json(json_file, msgspec.to_builtins(result) | {"balanced": result.balanced})
    if result.findings:
        raise Failure(f"the audit of {result.run} fails: {'; '.join(result.findings)}")
    click.echo("balanced: every group is accounted for exactly once")


@tandem.command()
@click.argument("run_name", metavar="RUN")
@RUNS
def report(run_name: str, runs: Path) -> None:
    """Rebuild the report of RUN."""
    from components.report.page import build_report
    from components.storage.layout import RunLayout
    from pipelines.execution import resume_config

    layout = RunLayout(resume_config(run_name, runs))
    layout.store.write("report.html", build_report(layout))
    click.echo(layout.store.local("report.html") or f"{layout.uri}/report.html")


@tandem.command()
@click.argument("task", type=click.Choice(["add2r", "sort8", "rev8"]))
@click.argument("destination")
@click.option("--rows", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--endpoint-url", default="", help="Address of an S3-compatible server.")
def data(task: str, destination: str, rows: int, seed: int, endpoint_url: str) -> None:
    """Write an example task as JSONL or Parquet to DESTINATION (a path, file:// or s3://)."""
    from components.stage_data.tasks import write_task
    from configs.run import StorageConfig

    write_task(task, rows, seed, destination, StorageConfig(endpoint_url=endpoint_url))
    click.echo(f"wrote {rows} rows of {task} to {destination}")


@tandem.command()
@RUNS
@click.option("--port", type=click.IntRange(0, 65535), default=5000, show_default=True)
def mlflow(runs: Path, port: int) -> None:
    """Open MLflow on the runs of this folder, until interrupted."""
    from pipelines.execution import serve_tracking

    serve_tracking(runs, port)


@tandem.command()
def doctor() -> None:
    """Check that this machine has what a run needs."""
    from pipelines.doctor import examine

    findings = examine()
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        click.echo(f"{'ok  ' if finding.good else 'FAIL'} {finding.what:<{width}}  {finding.found}")
    if bad := [finding for finding in findings if not finding.good]:
        raise BadConfig(f"{bad[0].what}: {bad[0].mend}")


for command in (bench, *COMMANDS):
    tandem.add_command(command)


def main() -> NoReturn:
    """Entry point: a user's mistake is one sentence on standard error and exit code 64 or 65."""
    try:
        tandem.main(standalone_mode=False)
    except Failure as failure:
        click.echo(f"tandem: {failure.sentence}", err=True)
        sys.exit(failure.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(BadConfig.exit_code)
    except click.Abort:
        click.echo("tandem: interrupted", err=True)
        sys.exit(TOLD_TO_LEAVE)
    except Exception:
        traceback.print_exc()
        click.echo("tandem: this is a defect; please report it with the lines above", err=True)
        sys.exit(DEFECT)
    sys.exit(0)


if __name__ == "__main__":
    main()
