"""A policy keeps its values under every name it goes by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.rollout.torch_policy import TorchPolicy
from components.warm_start.tokenizer import character_tokenizer
from components.weights.policy import checkpoint_tensors, load_policy, new_policy, policy_tokenizer, save_policy
from configs.failure import BadData
from configs.run import ModelConfig

TOKENIZER = character_tokenizer("0123456789+=")
IDS = torch.randint(3, 15, (4, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "hf"
    save_policy(new_policy(ModelConfig(), TOKENIZER.get_vocab_size(), seed=1), TOKENIZER, folder)
    return folder


def test_the_quickstart_model_has_its_size() -> None:
    model = new_policy(ModelConfig(), TOKENIZER.get_vocab_size(), seed=1)
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_778_816


def test_transformers_loads_what_was_saved_with_equal_logits(folder: Path) -> None:
    model = new_policy(ModelConfig(), TOKENIZER.get_vocab_size(), seed=1).eval()
    with torch.inference_mode():
        expected = model(IDS).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(IDS).logits, expected)
        assert torch.equal(load_policy(folder)(IDS).logits, expected)
    assert AutoTokenizer.from_pretrained(folder)("37+58=").input_ids == [1, 7, 11, 3, 9, 12, 14]


def test_checkpoint_names_are_those_in_the_file_and_views_of_the_model(folder: Path) -> None:
    from safetensors import safe_open

    model = load_policy(folder)
    named = checkpoint_tensors(model)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = list(file.keys())
        assert set(named) == set(stored)
        assert all(torch.equal(named[name], file.get_tensor(name)) for name in stored)
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in named
    before = model(IDS).logits
    named["model.layers.0.mlp.experts.3.up_proj.weight"].zero_()
    assert not torch.equal(model(IDS).logits, before)


def test_the_torch_policy_shares_the_models_memory(folder: Path) -> None:
    model = load_policy(folder)
    shared = TorchPolicy.from_model(model).tensors
    assert {name: tensor.data_ptr() for name, tensor in shared.items()} == {
        name: tensor.data_ptr() for name, tensor in checkpoint_tensors(model).items()
    }


def test_special_tokens_are_not_decoded(folder: Path) -> None:
    assert policy_tokenizer(folder).decode([1, 7, 11, 2, 0]) == "37"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture is LlamaForCausalLM"),
        ({"architectures": None}, "architecture is not named"),
    ],
)
def test_another_architecture_is_one_sentence(
    folder: Path, tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BadData, match=sentence):
        load_policy(tmp_path)


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadData, match="no safetensors weights"):
        load_policy(tmp_path)
