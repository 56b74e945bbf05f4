"""Run files and overrides: what is wrong is told in one sentence with exit code 64; what is right survives the trip."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from configs.document import validated
from configs.failure import BadConfig
from configs.run import RUNS, RunConfig, load_run

FILES = {
    "unknown key": ("nmae: x\n", "unknown key 'nmae'; known there: data, evaluate"),
    "unknown key below": ("train:\n  step: 3\n", "unknown key 'train.step'; known there: adam_beta1"),
    "wrong type": ("train:\n  steps: many\n", "'train.steps' is 'many'"),
    "a list for a section": ("train: [1]\n", "'train' is [1]"),
    "below the bound": ("rollout:\n  workers: 0\n", "'rollout.workers' is 0"),
    "batch not divisible": (
        "train:\n  batch_groups: 5\n",
        "train.batch_groups 5 is not divisible by train.minibatches 2",
    ),
    "one completion a group": ("rollout:\n  group_size: 1\n", "rollout.group_size is 1"),
    "no room for a prompt": ("rollout:\n  max_new_tokens: 256\n", "leaves no room for a prompt"),
    "more experts a token than experts": (
        "model:\n  num_experts_per_tok: 9\n",
        "num_experts_per_tok 9 exceeds num_experts 8",
    ),
    "heads not divisible": ("model:\n  num_key_value_heads: 3\n", "is not a multiple of num_key_value_heads 3"),
    "verifier without address": ("reward:\n  verifier: http\n", "reward.url is empty"),
    "name with a blank": ("name: my run\n", "'name' is 'my run'"),
    "two mistakes": ("seed: -1\nstck: cpu\n", "(and 1 more mistake)"),
    "not YAML": ("train: {steps: 3\n", "line 2 is not valid YAML"),
    "no mapping": ("- 1\n", "holds no mapping at its top level"),
    "empty": ("", "holds no mapping at its top level"),
}
OVERRIDES = {
    "no equals sign": ("train.steps", "override 'train.steps' has no '='"),
    "no key": ("=3", "has no '='"),
    "no YAML": ("train.steps=[", "the value is not valid YAML"),
    "through a value": ("seed.x=3", "'seed' is a value, not a section"),
    "unknown": ("train.stps=3", "unknown key 'train.stps'"),
    "wrong type": ("train.steps=many", "'train.steps' is 'many'"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_told_in_one_sentence(case: str, tmp_path: Path) -> None:
    text, words = FILES[case]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(BadConfig) as caught:
        load_run(file)
    assert words in str(caught.value) and str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 64


@pytest.mark.parametrize("case", OVERRIDES)
def test_a_bad_override_is_told_in_one_sentence(case: str, tmp_path: Path) -> None:
    override, words = OVERRIDES[case]
    file = tmp_path / "run.yaml"
    file.write_text("name: x\nseed: 3\n")
    with pytest.raises(BadConfig) as caught:
        load_run(file, (override,))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="no such file"):
        load_run(tmp_path / "none.yaml")
    with pytest.raises(BadConfig, match="cannot be read"):
        load_run(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(BadConfig, match="not UTF-8"):
        load_run(tmp_path / "latin.yaml")


def test_overrides_reach_any_depth_and_the_last_one_counts() -> None:
    config = load_run(RUNS / "quickstart.yaml", ("train.steps=5", "train.steps=7", "reward.url=http://h:1", "seed=2"))
    assert (config.train.steps, config.reward.url, config.seed) == (7, "http://h:1", 2)
    assert config.data.uri == "example:add2r"


def test_overrides_are_read_as_yaml() -> None:
    config = load_run(
        RUNS / "quickstart.yaml", ("train.learning_rate=2e-4", "storage.root='7'", "warm_start={max_steps: 9}")
    )
    assert config.train.learning_rate == 2e-4
    assert config.storage.root == "7"
    assert config.warm_start.max_steps == 9


@pytest.mark.parametrize("file", sorted(RUNS.glob("*.yaml")), ids=lambda file: file.stem)
def test_committed_files_load_and_survive_the_trip(file: Path, tmp_path: Path) -> None:
    config = load_run(file)
    assert config.name == file.stem
    text = config.to_json()
    assert "\n" not in text
    assert RunConfig.from_json(text) == config
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert load_run(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"sglang": {"urls": ["http://a:1"], "service": "s:1"}}, "urls and service are both set"),
        ({"sglang": {"urls": ["http://a:1"]}, "rollout": {"workers": 2}}, "names 1 servers for 2 rollout workers"),
        ({"sglang": {"urls": ["http://user:secret@a:1"]}}, "holds a user or a password"),
        ({"sglang": {"urls": ["http://a:99999"]}}, "is no address of a server"),
        ({"sglang": {"urls": ["http://a:1/sub"]}}, "is no address of a server"),
        ({"sglang": {"urls": ["http://a:1", "http://a:1/"]}}, "names a server twice"),
        ({"sglang": {"extra_arguments": ["--host=0.0.0.0"]}}, "holds --host, which the worker sets itself"),
        ({"sglang": {"tensor_parallel": 8, "data_parallel_attention": 2}}, "no engine could prove what it holds"),
        ({"sglang": {"tensor_parallel": 8, "data_parallel_attention": 3}}, "8 is not a multiple of"),
        (
            {"sglang": {"urls": ["http://a:1"]}, "loop": {"roles": "kubernetes"}, "storage": {"root": "s3://b/r"}},
            "among pods give sglang.service",
        ),
    ],
)
def test_engines_that_cannot_be_had_are_refused(values: dict[str, Any], sentence: str) -> None:
    given = {"name": "r", **values, "rollout": {"engine": "sglang", **values.get("rollout", {})}}
    with pytest.raises(BadConfig, match=re.escape(sentence)):
        validated(RunConfig, given, "r.yaml")


@pytest.mark.parametrize("text", ["", "[]", "{", "nonsense"])
def test_what_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match="step rl_loop: is not a JSON object"):
        RunConfig.from_json(text, "step rl_loop")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 3  # type: ignore[misc]
