"""adopt_checkpoint: takes a trainable Qwen3-MoE, refuses everything else in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from components.adopt_checkpoint.main import adopt_checkpoint
from components.stage_data.rows import Row
from components.stage_data.split import Splits, write_splits
from components.step import Step
from components.storage.store import open_store
from components.warm_start.tokenizer import character_tokenizer
from components.weights.policy import load_policy, new_policy, save_policy
from configs.failure import BadData
from configs.run import ModelConfig, RunConfig
from tests.components.execution import config_in, execute, executor_input

GEOMETRY = ModelConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=3,
    num_experts_per_tok=2, moe_intermediate_size=8, context_length=32,
)  # fmt: skip
TEXT = "0123456789+=\n"


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    tokenizer = character_tokenizer(TEXT)
    save_policy(new_policy(GEOMETRY, tokenizer.get_vocab_size(), 0), tokenizer, folder)
    return folder


@pytest.fixture
def given(policy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(policy, tmp_path / "given"))


def staged(given: Path, folder: Path, prompt: str = "12+34=") -> tuple[RunConfig, dict[str, str]]:
    config = config_in(folder, model=GEOMETRY.model_dump())
    data = open_store(f"{folder}/tested/data", config.storage)
    write_splits(data, Splits([Row("a", prompt, "46")], [Row("b", "1+1=", "2")], 0), "test")
    return config, {"data": f"{data.uri}/manifest.json", "given": str(given), "tracking_run": "r"}


def adopt(given: Path, folder: Path, prompt: str = "12+34=") -> None:
    config, parameters = staged(given, folder, prompt)
    adopt_checkpoint(Step("adopt_checkpoint", executor_input(config, parameters, folder / "out", ("checkpoint",))))


def test_a_good_checkpoint_comes_whole_into_the_run(given: Path, tmp_path: Path) -> None:
    config, parameters = staged(given, tmp_path)
    done = execute("adopt_checkpoint", config, parameters, tmp_path / "out", outputs=("checkpoint",))
    assert done.code == 0, done.sentence
    start = tmp_path / "tested" / "start"
    assert done.parameters == {"checkpoint": start.as_uri()} and (start / "_digests.json").exists()
    before, after = load_policy(given), load_policy(start)
    assert f"{sum(p.numel() for p in before.parameters()):,} parameters" in done.out
    assert all(bool((a == b).all()) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_the_older_name_of_the_expert_count_is_read(given: Path, tmp_path: Path) -> None:
    file = given / "config.json"
    values = json.loads(file.read_text())
    values.pop("num_local_experts")
    file.write_text(json.dumps(values))
    adopt(given, tmp_path)
    assert (tmp_path / "tested" / "start" / "_digests.json").exists()


def edit(given: Path, name: str, **values: object) -> None:
    file = given / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def retensor(given: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(given / "model.safetensors")
    change(tensors)
    save_file(tensors, given / "model.safetensors")


def truncate(given: Path) -> None:
    file = given / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another architecture": (
        lambda g: edit(g, "config.json", architectures=["LlamaForCausalLM"], model_type="llama"),
        "architecture is LlamaForCausalLM (llama)",
    ),
    "no architecture": (lambda g: edit(g, "config.json", architectures=None), "architecture is none"),
    "config is no object": (lambda g: (g / "config.json").write_text("[1]"), "no JSON object"),
    "a size of another type": (lambda g: edit(g, "config.json", num_experts="8"), "config.json: expected `int`"),
    "a size of zero": (lambda g: edit(g, "config.json", head_dim=0), "a size below 1"),
    "a width the kernels cannot take": (
        lambda g: edit(g, "config.json", moe_intermediate_size=9),
        "moe_intermediate_size 9 is no multiple of 4",
    ),
    "scaled positions": (lambda g: edit(g, "config.json", rope_scaling={"type": "yarn"}, rope_parameters=None), "yarn"),
    "dense layers": (lambda g: edit(g, "config.json", mlp_only_layers=[0]), "layers without experts"),
    "quantized": (lambda g: edit(g, "config.json", quantization_config={"bits": 4}), "is quantized"),
    "other width": (
        lambda g: edit(g, "config.json", moe_intermediate_size=12),
        "has shape [16, 8], but config.json makes it [16, 12]",
    ),
    "another expert": (lambda g: edit(g, "config.json", num_experts=4), "mlp.gate.weight' has shape [3, 16]"),
    "fewer layers": (lambda g: edit(g, "config.json", num_hidden_layers=1), "is none that config.json asks for"),
    "a tensor gone": (lambda g: retensor(g, lambda t: t.pop("model.norm.weight")), "'model.norm.weight' is in no file"),
    "integers": (
        lambda g: retensor(g, lambda t: t.update({"model.norm.weight": np.ones(16, np.int8)})),
        "'model.norm.weight' is I8",
    ),
    "a file twice": (
        lambda g: shutil.copy(g / "model.safetensors", g / "more.safetensors"),
        "is also in model.safetensors",
    ),
    "cut off": (truncate, "is not a whole safetensors file"),
    "pickled": (lambda g: (g / "pytorch_model.bin").write_bytes(b"\x80"), "pytorch_model.bin: may hold pickled code"),
    "no weights": (lambda g: (g / "model.safetensors").unlink(), "holds no .safetensors file"),
    "no tokenizer": (lambda g: (g / "tokenizer.json").unlink(), "tokenizer.json: is missing"),
    "broken tokenizer": (lambda g: (g / "tokenizer.json").write_text("{}"), "cannot be read as a tokenizer"),
    "tokenizer of another model": (
        lambda g: character_tokenizer(TEXT + "abcdef").save(str(g / "tokenizer.json")),
        "but the model embeds 16 tokens",
    ),
    "tokenizer without a character": (
        lambda g: character_tokenizer(TEXT.replace("+", "")).save(str(g / "tokenizer.json")),
        "cannot write '12+34=' of the data",
    ),
    "no end": (
        lambda g: (edit(g, "config.json", eos_token_id=None), (g / "generation_config.json").unlink(missing_ok=True)),
        "names no eos_token_id",
    ),
    "an end past the tokenizer": (lambda g: edit(g, "config.json", eos_token_id=999), "eos_token_id [999] is no token"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_unusable_checkpoint_is_refused(case: str, given: Path, tmp_path: Path) -> None:
    spoil, words = CASES[case]
    spoil(given)
    with pytest.raises(BadData) as caught:
        adopt(given, tmp_path)
    assert words in str(caught.value) and str(given) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tested" / "start").exists()


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="holds no files"):
        adopt(tmp_path / "none", tmp_path)


def test_a_prompt_past_the_context_is_refused(given: Path, tmp_path: Path) -> None:
    adopt(given, tmp_path, prompt="1" * 27)
    with pytest.raises(BadData, match="has 29 tokens, but 28 fit"):
        adopt(given, tmp_path, prompt="1" * 28)
