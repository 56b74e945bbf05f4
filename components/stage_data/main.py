"""stage_data: check a dataset row by row, split it by a hash of the prompt, and put it beside the run with its digest."""

from __future__ import annotations

from components.stage_data.length import check_lengths
from components.stage_data.rows import SourceRow, read_rows
from components.stage_data.split import MANIFEST, split_rows, write_splits
from components.stage_data.tasks import EXAMPLE, task_rows
from components.step import Step, run_step
from configs.run import RunConfig


def source_rows(config: RunConfig) -> list[SourceRow]:
    """Rows of the dataset or example task that `config.data` names.

    Raises:
        BadData, BadConfig: the source cannot be used.
    """
    data = config.data
    if not data.uri.startswith(EXAMPLE):
        return read_rows(data, config.storage)
    rows = task_rows(data.uri.removeprefix(EXAMPLE), data.rows, config.seed)
    return [SourceRow(row, f"row {number}") for number, row in enumerate(rows, 1)]


def body(step: Step) -> None:
    """Stage the data; output `data` is the URI of its manifest."""
    config = step.config
    rows = source_rows(config)
    check_lengths(rows, config)
    splits = split_rows(rows, config.data.eval_fraction, config.data.uri)
    store = step.store.child("data")
    manifest = write_splits(store, splits, config.data.uri)
    print(
        f"stage_data: {manifest['train_rows']} train rows, {manifest['eval_rows']} eval rows,"
        f" {manifest['duplicates']} duplicates left out, digest {manifest['digest']}",
        flush=True,
    )
    counts = {name: float(manifest[name]) for name in ("train_rows", "eval_rows", "duplicates")}
    lengths = {name: float(manifest[name]) for name in ("max_prompt_characters", "max_answer_characters")}
    step.finish(parameters={"data": f"{store.uri}/{MANIFEST}"}, metrics=counts | lengths)


if __name__ == "__main__":
    run_step("stage_data", body)
