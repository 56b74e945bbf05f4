"""`tandem`: the command line. Each command imports what it needs when it runs, so that help answers at once."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import click

from configs.failure import DEFECT, TOLD_TO_LEAVE, BadConfig, Failure
from pipelines.cli_cluster import COMMANDS

OVERRIDE = click.option(
    "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field: train.steps=50."
)


def _writable(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Find out before the work that its figures can be written."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise BadConfig(f"--json {path}: cannot be written ({error.strerror}); name a writable file") from None
    return path


JSON_FILE = click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    callback=_writable,
    help="Write every figure as one JSON object.",
)
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
    _write_json(json_file, summary)


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
    _write_json(json_file, msgspec.to_builtins(result) | {"balanced": result.balanced})
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


@tandem.group()
def bench() -> None:
    """Measure, as ratios of two things run in turn."""


@bench.command("rollout")
@JSON_FILE
@click.option("--prompts", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--group-size", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--engine", type=click.Choice(["torch", "sglang"]), default="torch", show_default=True)
def bench_rollout(
    json_file: Path | None, prompts: int, group_size: int, max_new_tokens: int, rounds: int, engine: str
) -> None:
    """An engine beside its reference, same model, same prompts: torch beside transformers' generate, SGLang's server driven
    by the loop's engine beside the same server driven by SGLang's own benchmark."""
    if engine == "sglang":
        from components.rollout.sglang_bench import measure
    else:
        from components.rollout.bench import measure

    _figures(measure(prompts, group_size, max_new_tokens, rounds), json_file)


@bench.command("queue")
@JSON_FILE
@click.option("--groups", type=click.IntRange(min=64), default=20_000, show_default=True)
def bench_queue(json_file: Path | None, groups: int) -> None:
    """Groups a second through the experience streams beside redis-benchmark's XADD on the same server."""
    from components.experience.bench import measure

    _figures(measure(groups), json_file)


@bench.command("weights")
@JSON_FILE
@click.option("--mib", type=click.IntRange(min=4), default=128, show_default=True, help="Size of the timed version.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--steps", type=click.IntRange(min=0), default=6, show_default=True, help="Real updates a learning rate.")
@click.option(
    "--place",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder to work in; its file system is what is measured.  [default: /dev/shm, or where there is none, here]",
)
@click.option("--store", "store_uri", default="", metavar="URI", help="Pull from a shared store: s3://bucket/prefix.")
@click.option("--checkpoint", default="", metavar="DIR", help="Policy the updates begin with; default: warm one up.")
@click.option(
    "--engine",
    type=click.Choice(["torch", "sglang"]),
    default="torch",
    show_default=True,
    help="sglang: also send versions to a real server, collectively, and measure its pauses.",
)
@click.option(
    "--bucket-mib", type=click.IntRange(min=1), default=16, show_default=True, help="Message of a collective."
)
def bench_weights(
    json_file: Path | None,
    mib: int,
    rounds: int,
    steps: int,
    place: Path | None,
    store_uri: str,
    checkpoint: str,
    engine: str,
    bucket_mib: int,
) -> None:
    """A version published and pulled, whole and as a difference, beside a raw copy of its bytes."""
    from components.weights.bench import measure

    memory = Path("/dev/shm")
    place = place or (memory if memory.is_dir() else Path())
    figures: dict[str, Any] = {"collective_s": None, "pause_s": None}
    figures |= measure(mib, rounds, steps, place, store_uri, checkpoint)
    if engine == "sglang":
        from components.broadcast.bench import measure as measure_collective

        figures |= measure_collective(6, 512, rounds, bucket_mib)
    _figures(figures, json_file)


@bench.command("loop")
@click.argument("run_file", type=click.Path(path_type=Path), default=Path("configs/runs/sort8.yaml"))
@OVERRIDE
@JSON_FILE
@click.option("--seeds", default="0,1", show_default=True, help="Seeds, comma-separated.")
@click.option("--target", type=float, default=0.9, show_default=True, help="Exact match to reach.")
def bench_loop(run_file: Path, overrides: tuple[str, ...], json_file: Path | None, seeds: str, target: float) -> None:
    """The asynchronous loop beside the synchronous one, from the same start."""
    from components.rl_loop.bench import measure
    from configs.run import load_run

    if not all(seed.strip().isdigit() for seed in seeds.split(",")):
        raise BadConfig(f"--seeds {seeds}: is no list of numbers; write it as 0,1")
    _figures(measure(load_run(run_file, overrides), [int(seed) for seed in seeds.split(",")], target), json_file)


def _figures(figures: dict[str, Any], json_file: Path | None) -> None:
    width = max(map(len, figures))
    for key, value in figures.items():
        shown = f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 1000 else value
        click.echo(f"{key:<{width}}  {f'{shown:.4g}' if isinstance(shown, float) else shown}")
    _write_json(json_file, figures)


def _write_json(json_file: Path | None, figures: dict[str, Any]) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


for command in COMMANDS:
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
