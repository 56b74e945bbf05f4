import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.publish_checkpoint.export import export_checkpoint, step_of
from components.publish_checkpoint.main import publish_checkpoint
from components.storage.layout import RunLayout
from components.tracking.client import open_client
from components.tracking.registry import CANDIDATE, Registry
from components.tracking.run import open_run
from components.tracking.server import Server
from components.weights.policy import load_policy
from configs.failure import BadData, Failure
from configs.run import RunConfig
from tests.evaluate.policies import save_upper_case
from tests.publish_checkpoint.execution import execute


def run_config(tmp_path: Path, server: Server, name: str) -> RunConfig:
    storage = {"root": str(tmp_path / "runs"), "scratch": str(tmp_path / "scratch")}
    tracking = {"uri": server.uri, "registered_model": f"model-{name}"}
    return RunConfig.model_validate({"name": name, "storage": storage, "tracking": tracking})


def put_checkpoint(config: RunConfig, work: Path, step: int, known: str) -> str:
    """A durable checkpoint with trainer state, as the loop leaves it; returns its URI."""
    folder = work / f"checkpoint-{step}"
    save_upper_case(folder, known)
    (folder / "trainer").mkdir()
    save_file({"exp_avg": torch.zeros(3)}, folder / "trainer" / "optimizer.safetensors")
    layout = RunLayout(config)
    layout.store.upload(folder, f"checkpoints/step-{step:06d}")
    return f"{layout.uri}/checkpoints/step-{step:06d}"


def test_a_published_checkpoint_loads_as_its_users_will_with_equal_logits(
    mlflow_server: Server, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = run_config(tmp_path, mlflow_server, "publish")
    checkpoint = put_checkpoint(config, tmp_path, 50, "abc")
    run = open_run(config)
    outputs = execute(
        "publish_checkpoint", publish_checkpoint, config, tmp_path, checkpoint=checkpoint, tracking_run=run
    )
    model, version = outputs["parameterValues"]["model"], outputs["parameterValues"]["version"]
    folder = RunLayout(config).store.local("export/step-000050")
    assert folder is not None and model == folder.as_uri()
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "_digests.json"} <= names
    assert "trainer" not in names
    published = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)("abcl", return_tensors="pt")["input_ids"]
    ours = load_policy(tmp_path / "checkpoint-50")
    with torch.inference_mode():
        assert torch.equal(published(input_ids=ids).logits, ours(input_ids=ids).logits)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and run in card and "step 50" in card
    _check_registry(mlflow_server, config, run, version, model, checkpoint)


def _check_registry(server: Server, config: RunConfig, run: str, version: str, model: str, checkpoint: str) -> None:
    registry = Registry(server.uri, config.registered_model)
    candidate = registry.by_alias(CANDIDATE)
    assert candidate is not None and candidate.number == version == "1"
    assert candidate.tags["model_uri"] == model and candidate.tags["checkpoint_uri"] == checkpoint
    assert candidate.tags["run"] == config.name and candidate.tags["train_step"] == "50"
    client = open_client(server.uri)
    entry = client.get_model_version(config.registered_model, version)
    logged = client.get_logged_model(str(entry.source).removeprefix("models:/"))
    assert entry.run_id == run and logged.status == "READY" and logged.tags["model_uri"] == model


def test_a_retry_finds_the_version_and_another_step_makes_a_new_one(mlflow_server: Server, tmp_path: Path) -> None:
    config = run_config(tmp_path, mlflow_server, "retry")
    first = put_checkpoint(config, tmp_path, 25, "a")
    run = open_run(config)
    versions = []
    for checkpoint in (first, first, put_checkpoint(config, tmp_path, 50, "ab")):
        RunLayout(config).store.delete("steps/publish_checkpoint.json")
        outputs = execute(
            "publish_checkpoint", publish_checkpoint, config, tmp_path, checkpoint=checkpoint, tracking_run=run
        )
        versions.append(outputs["parameterValues"]["version"])
    assert versions == ["1", "1", "2"]
    experiment = open_client(mlflow_server.uri).get_run(run).info.experiment_id
    logged = open_client(mlflow_server.uri).search_logged_models([experiment], f"source_run_id = '{run}'")
    assert len(logged) == 2


def test_an_export_with_other_logits_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.model_validate({"storage": {"root": str(tmp_path / "runs"), "scratch": str(tmp_path)}})
    checkpoint = put_checkpoint(config, tmp_path, 1, "a")
    copy = shutil.copy2

    def corrupting(source: Path, target: Path) -> None:
        copy(source, target)
        if target.name == "model.safetensors":
            tensors = load_file(target)
            tensors["lm_head.weight"][5, 5] += 1e-3
            save_file(tensors, target, metadata={"format": "pt"})

    monkeypatch.setattr("components.publish_checkpoint.export.shutil.copy2", corrupting)
    (tmp_path / "work").mkdir()
    with pytest.raises(Failure, match="computes other logits than its checkpoint"):
        export_checkpoint(checkpoint, config.storage, tmp_path / "work")


def test_a_damaged_or_foreign_checkpoint_is_bad_data(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"storage": {"root": str(tmp_path / "runs"), "scratch": str(tmp_path)}})
    checkpoint = put_checkpoint(config, tmp_path, 1, "a")
    stored = RunLayout(config).store.local("checkpoints/step-000001")
    assert stored is not None
    text = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(text | {"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "work").mkdir()
    with pytest.raises(BadData, match="config.json"):
        export_checkpoint(checkpoint, config.storage, tmp_path / "work")


def test_a_checkpoint_uri_names_its_step() -> None:
    assert step_of("s3://bucket/runs/one/checkpoints/step-000300") == 300
    with pytest.raises(BadData, match="names no training step"):
        step_of("s3://bucket/model")
