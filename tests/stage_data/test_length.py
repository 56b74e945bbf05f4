"""Rows against the context and the longest completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from components.stage_data.length import check_lengths
from components.stage_data.main import source_rows
from components.warm_start.tokenizer import character_tokenizer
from configs.failure import BadData
from configs.run import RunConfig


def check(folder: Path, rows: list[tuple[str, str]], **sections: Any) -> None:
    """What the step does before it splits."""
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))
    config = RunConfig.model_validate({"name": "one", "data": {"uri": str(path)}, **sections})
    check_lengths(source_rows(config), config)


def test_prompt_longer_than_the_context(tmp_path: Path) -> None:
    sizes = {"model": {"context_length": 16}, "rollout": {"max_new_tokens": 4}}
    rows = [("x" * 11, "1"), ("y" * 11, "1")]
    check(tmp_path, rows, **sizes)
    with pytest.raises(BadData, match="line 3: the prompt has 13 tokens.*leaves 12; shorten the prompt or raise"):
        check(tmp_path, [*rows, ("x" * 12, "1")], **sizes)


def test_answer_that_can_never_be_given(tmp_path: Path) -> None:
    check(tmp_path, [("x", "123")])
    with pytest.raises(BadData, match="line 2: the answer has 4 characters.*max_new_tokens to 5 or more"):
        check(tmp_path, [("x", "123"), ("y", "1234")])
    check(tmp_path, [("x", "123"), ("y", "1234")], rollout={"max_new_tokens": 5})
    check(tmp_path, [("x", "123"), ("y", "1234")], reward={"verifier": "contains"})


def test_tokens_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = [f"word{number}" for number in range(10)]
    tokenizer.train_from_iterator([" ".join(words)], trainers.WordLevelTrainer(special_tokens=["<unk>"]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = {"checkpoint": str(tmp_path), "context_length": 12}
    rows = [("word1 " * 8, "an answer of more characters than a completion has tokens")]
    check(tmp_path, rows, model=model)
    with pytest.raises(BadData, match="line 2: the prompt has 9 tokens"):
        check(tmp_path, [*rows, ("word1 " * 9, "x")], model=model)


def test_character_level_checkpoint(tmp_path: Path) -> None:
    model = {"checkpoint": str(tmp_path)}
    rows = [("1+1=", "2")]
    with pytest.raises(BadData, match=r"tokenizer\.json: no such file"):
        check(tmp_path, rows, model=model)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadData, match="cannot be read as a tokenizer"):
        check(tmp_path, rows, model=model)
    character_tokenizer("0123456789+=").save(str(tmp_path / "tokenizer.json"))
    check(tmp_path, rows, model=model)
    with pytest.raises(BadData, match=r"line 2: has the character '\*'"):
        check(tmp_path, [*rows, ("1*1=", "1")], model=model)
    with pytest.raises(BadData, match="line 2: the answer has 4 characters"):
        check(tmp_path, [*rows, ("1+1=", "1000")], model=model)
