"""Takes a given Hugging Face checkpoint into the run, after checking that the loop can train it.

The checks read names, shapes and the tokenizer, not the weights, and never unpickle. The checkpoint is copied into the
run's store with digests, so that a resumed run starts from the same bytes even if the original has moved.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from components.adopt_checkpoint.checkpoint import check_files, check_tensors, check_tokenizer
from components.stage_data.split import read_manifest, read_split
from components.step import Step, run_step
from components.storage.store import as_uri, open_store, split_uri
from components.weights.geometry import read_geometry
from configs.failure import BadData
from configs.run import RunConfig

PROMPTS = 64
"""Prompts encoded as a sample, the longest ones."""


def adopt_checkpoint(step: Step) -> None:
    """Check the checkpoint `given` and store it under `start/`."""
    config, given = step.config, as_uri(step.parameters["given"])
    parent, key = split_uri(given)
    store = open_store(parent, config.storage)
    check_files([name.removeprefix(f"{key}/") for name in store.list(key)], given)
    step.layout.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=step.layout.scratch) as temporary:
        folder = Path(temporary) / "start"
        store.download(key, folder, verify=False)
        parameters = _check(folder, config, step.parameters["data"], given)
        # Digests of an earlier upload describe that one; the upload below writes its own.
        (folder / "_digests.json").unlink(missing_ok=True)
        step.store.upload(folder, "start")
        shutil.rmtree(folder)
    print(f"adopted {given}: {parameters:,} parameters", flush=True)
    step.finish({"checkpoint": f"{step.layout.uri}/start"})


def _check(folder: Path, config: RunConfig, data: str, uri: str) -> int:
    """Raise BadData unless the loop can train the checkpoint on the data; returns its parameters."""
    geometry = read_geometry(folder / "config.json", f"{uri}/config.json")
    parameters = check_tensors(folder, geometry, uri)
    context = min(config.model.context_length, geometry.max_position_embeddings)
    limit = context - config.rollout.max_new_tokens
    if limit < 1:
        raise BadData(
            f"{uri}/config.json: max_position_embeddings {geometry.max_position_embeddings} leaves no room beside"
            f" rollout.max_new_tokens {config.rollout.max_new_tokens}; lower the latter"
        )
    rows = [row for split in ("train", "eval") for row in read_split(data, split, config.storage)]
    prompts = sorted((row.prompt for row in rows), key=len, reverse=True)[:PROMPTS]
    characters = read_manifest(data, config.storage)["prompt_characters"]
    check_tokenizer(folder, geometry, [*prompts, *characters], limit, uri)
    return parameters


if __name__ == "__main__":
    run_step("adopt_checkpoint", adopt_checkpoint)
