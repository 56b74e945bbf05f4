"""`tandem bench`: measurements, as ratios of two things run in turn; as quick to load as `pipelines.cli`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from configs.failure import BadConfig
from pipelines.cli_options import JSON_FILE, OVERRIDE, write_json


@click.group()
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
    write_json(json_file, figures)


def _numbers(least: int) -> Any:
    def split(context: click.Context, option: click.Parameter, text: str) -> list[int]:
        try:
            numbers = [int(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if not numbers or min(numbers) < least:
            raise BadConfig(f"{option.opts[0]} {text}: is no list of numbers of at least {least}; write it as 1,8")
        return numbers

    return split


def _names(known: tuple[str, ...]) -> Any:
    def split(context: click.Context, option: click.Parameter, text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise BadConfig(f"{option.opts[0]} {unknown[0]}: is unknown; choose of {', '.join(known)}")
        return names

    return split


ROUTINGS = ("uniform", "skewed", "node_limited")
BACKENDS = ("all_to_all", "hierarchical", "hierarchical_fp8", "deep_ep", "auto")


@bench.command("dispatch")
@JSON_FILE
@click.option(
    "--fabric",
    type=click.Choice(["local", "emulated", "joined"]),
    default="local",
    show_default=True,
    help="local: processes of this machine, in groups that stand for nodes; emulated: network namespaces with shaped wires"
    " (root); joined: this process is one rank, started by torchrun.",
)
@click.option("--nodes", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--ranks-per-node", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option(
    "--mbit-s", type=click.FloatRange(min=1), default=400.0, show_default=True, help="Wire of an emulated node."
)
@click.option("--run", "run_file", type=click.Path(path_type=Path), help="Run file whose model gives shapes and type.")
@click.option("--hidden", type=click.IntRange(min=8), default=1024, show_default=True)
@click.option("--experts", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--topk", "tops", default="1,2,4,8", callback=_numbers(1), show_default=True)
@click.option("--tokens", default="64,512,4096", callback=_numbers(0), show_default=True, help="Tokens a rank.")
@click.option("--routing", "routings", default=",".join(ROUTINGS), callback=_names(ROUTINGS), show_default=True)
@click.option(
    "--backend",
    "backends",
    default="all_to_all,hierarchical,hierarchical_fp8,auto",
    callback=_names(BACKENDS),
    show_default=True,
    help="The first is what the ratios are taken to.",
)
@click.option("--chunks", type=click.IntRange(0, 16), default=0, show_default=True, help="As kernels.chunks.")
def bench_dispatch(json_file: Path | None, run_file: Path | None, **given: Any) -> None:
    """How tokens travel fastest to their experts, and why: time and bytes between nodes of every backend beside the first,
    in turn, bfloat16 on the wire unless fp8 is named."""
    from kernels.bench import Layout, measure, measure_joined
    from kernels.bench_rank import Plan

    if run_file is not None:
        given |= _shapes(run_file)
    if max(given["tops"]) > given["experts"]:
        raise BadConfig(f"--topk: must lie between 1 and --experts {given['experts']}")
    layout = Layout(given.pop("fabric"), given.pop("nodes"), given.pop("ranks_per_node"), given.pop("mbit_s"))
    plan = Plan(**given)
    if layout.fabric != "joined" or os.environ.get("RANK", "0") == "0":
        click.echo(f"{'backend':<17} topk tokens routing       inter-node MB  x fewer        ms  x faster  over wire")
    figures = measure_joined(plan, _tell) if layout.fabric == "joined" else measure(plan, layout, _tell)
    if layout.fabric != "joined" or os.environ["RANK"] == "0":
        write_json(json_file, figures)


def _shapes(run_file: Path) -> dict[str, Any]:
    """What a run's dispatches carry, and how it has them carried."""
    from configs.run import load_run

    config = load_run(run_file)
    if config.model.checkpoint:
        raise BadConfig(
            f"--run {run_file}: its model comes from {config.model.checkpoint}, which is not read here; give --hidden,"
            " --experts and --topk instead"
        )
    model = config.model
    return {
        "hidden": model.hidden_size,
        "experts": model.num_experts,
        "tops": [model.num_experts_per_tok],
        # Training keeps float32.
        "dtype": "float32",
        "kernels": config.kernels.model_dump(mode="json"),
        "chunks": config.kernels.chunks,
    }


def _tell(line: dict[str, Any]) -> None:
    """One line of the table, or the sentence of a choice."""
    if choice := line.get("choice"):
        click.echo(f"auto, top-{choice['topk']}, {choice['tokens']} tokens a rank: {choice['reason']}")
        return
    case = line["case"]
    fewer, over = (f"{case[key]:.2f}" if case[key] else "-" for key in ("ratio_bytes", "over_wire"))
    sent = case["inter_node_bytes"] / 1e6
    click.echo(
        f"{case['backend']:<17} {case['topk']:>4} {case['tokens']:>6} {case['routing']:<13} {sent:>13.2f}"
        f"  {fewer:>7} {1e3 * case['seconds']:>9.1f}  {case['ratio_time']:>8.2f}  {over:>9}"
    )


@bench.command("experts")
@JSON_FILE
@OVERRIDE
@click.option(
    "--run",
    "run_file",
    type=click.Path(path_type=Path),
    default=Path("configs/runs/quickstart.yaml"),
    show_default=True,
    help="Run file whose model and batch give the shapes.",
)
@click.option("--ranks", default="2,4", callback=_numbers(1), show_default=True, help="Ranks that share the experts.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
def bench_experts(
    json_file: Path | None, overrides: tuple[str, ...], run_file: Path, ranks: list[int], rounds: int
) -> None:
    """A layer's experts, forward and backward, beside transformers' own; a policy update by several ranks beside one."""
    from components.train.bench import measure
    from configs.run import load_run

    config = load_run(run_file, overrides)
    for size in ranks:
        if config.model.num_experts % size:
            raise BadConfig(f"--ranks {size} does not divide the {config.model.num_experts} experts; choose a divisor")
    figures = measure(config, ranks, rounds)
    _figures(figures["block"], None)
    for case in figures["updates"]:
        click.echo(
            f"update, {case['ranks']} rank{'s' * (case['ranks'] > 1)}  {1e3 * case['seconds']:.0f} ms"
            f"  x faster than one: {case['ratio_time']:.2f}"
        )
    write_json(json_file, figures)
