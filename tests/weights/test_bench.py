"""`tandem bench weights` tells what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from components.warm_start.tokenizer import character_tokenizer
from components.weights.bench_steps import difference_sizes
from components.weights.policy import new_policy, save_policy
from configs.failure import BadConfig
from configs.run import ModelConfig
from pipelines.cli import tandem

KEYS = {"copy_s", "collective_s", "pull_full_s", "pull_delta_s", "full_bytes", "delta_bytes", "pause_s"}


@pytest.mark.parametrize("store", [[], ["--store", "remote"]], ids=["in-place", "shared"])
def test_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--mib", "4", "--rounds", "1", "--steps", "0", "--place", ".", "--json", "figures.json", *store]
    done = CliRunner().invoke(tandem, ["bench", "weights", *arguments])
    assert done.exit_code == 0, done.output
    figures = json.loads(Path("figures.json").read_text())
    assert KEYS | {"shape", "setting"} <= set(figures)
    assert figures["full_bytes"] > 2 * 2 * 1024 * 768
    assert 0 < figures["delta_bytes"] < 0.15 * figures["full_bytes"]
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"], "it is to clean up"


def test_a_policy_that_learns_nothing_is_one_sentence(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("0123456789+=")
    save_policy(new_policy(ModelConfig(), tokenizer.get_vocab_size(), seed=1), tokenizer, tmp_path / "start")
    with pytest.raises(BadConfig, match="start: gets no reward on add2r"):
        difference_sizes(1, str(tmp_path / "start"), tmp_path)
