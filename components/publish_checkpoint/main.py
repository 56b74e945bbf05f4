"""Pipeline step: export the loop's last durable checkpoint and register it as `candidate`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from components.publish_checkpoint.card import model_card
from components.publish_checkpoint.export import CARD, Export, export_checkpoint
from components.step import Step, read_marker, run_step
from components.tracking.client import tracking_uri
from components.tracking.registry import CANDIDATE, Registry

DATA_MANIFEST = "data/manifest.json"


def publish_checkpoint(step: Step) -> None:
    """Export, prove, upload to `export/step-N`, register; outputs `model` (URI) and `version`."""
    config, checkpoint, run = step.config, step.parameters["checkpoint"], step.parameters["tracking_run"]
    registry = Registry(tracking_uri(config), config.registered_model)
    step.layout.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=step.layout.scratch, prefix="publish-") as work:
        export = export_checkpoint(checkpoint, config.storage, Path(work))
        (export.folder / CARD).write_text(_card(step, export), encoding="utf-8")
        key = f"export/step-{export.step:06d}"
        step.store.upload(export.folder, key)
    model = f"{step.layout.uri}/{key}"
    version = registry.register(_tags(step, export, model), {"parameters": str(export.parameters)})
    registry.point(CANDIDATE, version.number)
    step.finish(
        {"model": model, "version": version.number},
        {
            "train_step": float(export.step),
            "parameters": float(export.parameters),
            "weights_bytes": float(export.weights_bytes),
        },
    )
    print(
        f"published {model} as {registry.name} version {version.number} ({CANDIDATE}) of MLflow run {run}", flush=True
    )


def _card(step: Step, export: Export) -> str:
    loop = read_marker(step.layout, "rl_loop")
    data = json.loads(step.store.read(DATA_MANIFEST)) if step.store.exists(DATA_MANIFEST) else {}
    return model_card(
        step.config,
        export,
        checkpoint=step.parameters["checkpoint"],
        tracking_run=step.parameters["tracking_run"],
        data_digest=data.get("digest", ""),
        metrics=loop.metrics if loop else {},
    )


def _tags(step: Step, export: Export, model: str) -> dict[str, str]:
    tags = {
        "run": step.config.name,
        "tracking_run": step.parameters["tracking_run"],
        "train_step": str(export.step),
        "weights_digest": export.weights_digest,
        "checkpoint_uri": step.parameters["checkpoint"],
        "model_uri": model,
    }
    return tags | ({"s3_uri": model} if model.startswith("s3://") else {})


if __name__ == "__main__":
    run_step("publish_checkpoint", publish_checkpoint)
