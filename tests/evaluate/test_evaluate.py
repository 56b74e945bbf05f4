import json
from pathlib import Path
from typing import Any

import pytest

from components.evaluate.main import EVALUATION, evaluate
from components.evaluate.promotion import REPLACED, opponent
from components.evaluate.scoring import score_uri
from components.publish_checkpoint.main import publish_checkpoint
from components.stage_data.rows import Row
from components.stage_data.split import Splits, write_splits
from components.storage.layout import RunLayout
from components.tracking.client import open_client
from components.tracking.registry import CHAMPION, Registry
from components.tracking.run import open_run
from components.tracking.server import Server
from configs.failure import BadData
from configs.run import RunConfig
from tests.evaluate.policies import LETTERS, save_upper_case
from tests.publish_checkpoint.execution import execute


class Lab:
    """One registered model, several runs of it on the same data."""

    def __init__(self, folder: Path, server: Server, model: str) -> None:
        self.folder = folder
        self.server = server
        self.model = model
        self.registry = Registry(server.uri, model)

    def config(self, name: str, **rule: float) -> RunConfig:
        storage = {"root": str(self.folder / "runs"), "scratch": str(self.folder / "scratch")}
        tracking = {"uri": self.server.uri, "registered_model": self.model}
        fields = {"name": name, "storage": storage, "tracking": tracking, "rollout": {"max_new_tokens": 2}}
        return RunConfig.model_validate({**fields, "evaluate": {"bootstrap_samples": 500, **rule}})

    def run(self, name: str, before: str, after: str, **rule: float) -> dict[str, str]:
        """Publish a policy that knows the letters `after` and evaluate it; returns what evaluate needs again."""
        config = self.config(name, **rule)
        layout = RunLayout(config)
        rows = [Row(letter, letter, letter.upper()) for letter in LETTERS]
        write_splits(layout.store.child("data"), Splits(rows[:1], rows, 0), "letters")
        places = {}
        for step, known in ((0, before), (5, after)):
            local = self.folder / f"{name}-{step}"
            save_upper_case(local, known)
            layout.store.upload(local, f"checkpoints/step-{step:06d}")
            places[step] = f"{layout.uri}/checkpoints/step-{step:06d}"
        run = open_run(config)
        published = execute(
            "publish_checkpoint", publish_checkpoint, config, self.folder, checkpoint=places[5], tracking_run=run
        )
        parameters = {"data": f"{layout.uri}/data/manifest.json", "baseline": places[0], "tracking_run": run}
        return parameters | published["parameterValues"]

    def number(self, alias: str) -> str:
        """Number of the version behind an alias; empty when there is none."""
        version = self.registry.by_alias(alias)
        return version.number if version else ""

    def evaluate(self, name: str, parameters: dict[str, str], **rule: float) -> dict[str, Any]:
        outputs = execute("evaluate", evaluate, self.config(name, **rule), self.folder, **parameters)
        promoted = outputs["parameterValues"]["promoted"]
        return {"promoted": promoted, **outputs["artifacts"]["metrics"]["artifacts"][0]["metadata"]}


def test_the_first_win_makes_a_champion_and_a_later_loss_leaves_it(mlflow_server: Server, tmp_path: Path) -> None:
    lab = Lab(tmp_path, mlflow_server, "letters-win")
    first = lab.evaluate("first", won := lab.run("first", before="ab", after="abcdefghij"))
    assert first["promoted"] == "true"
    assert first["eval/exact_match"] == pytest.approx(10 / 12) and first["eval/exact_match_before"] == pytest.approx(
        2 / 12
    )
    assert first["eval/champion_exact_match"] == first["eval/exact_match_before"]
    champion = lab.registry.by_alias(CHAMPION)
    assert champion is not None and champion.number == won["version"] and champion.tags[REPLACED] == "none"

    second = lab.evaluate("second", lost := lab.run("second", before="ab", after="abcdefg"))
    assert second["promoted"] == "false"
    assert second["eval/champion_exact_match"] == pytest.approx(10 / 12)
    assert second["eval/difference_high"] <= 0
    assert lab.number(CHAMPION) == won["version"] != lost["version"]
    assert lab.number("candidate") == lost["version"]

    third = lab.evaluate("third", better := lab.run("third", before="ab", after=LETTERS), margin=0.1)
    assert third["promoted"] == "false", "2/12 better, but two wins of twelve may be chance"
    assert third["eval/difference"] > 0.1 and third["eval/difference_low"] == 0
    assert better["version"] == "3"
    _check_records(lab, "first", won)


def _check_records(lab: Lab, name: str, parameters: dict[str, str]) -> None:
    store = RunLayout(lab.config(name)).store
    record = json.loads(store.read(EVALUATION))
    assert record["promoted"] is True and len(record["rows"]) == 12
    row = next(row for row in record["rows"] if row["prompt"] == "c")
    assert (row["before"], row["before_reward"], row["after"], row["after_reward"]) == ("", 0.0, "C", 1.0)
    report = store.read("report.html")
    assert b"is the new champion" in report and (lab.folder / "report").exists()
    client = open_client(lab.server.uri)
    logged = client.get_run(parameters["tracking_run"])
    assert logged.data.metrics["eval/exact_match"] == pytest.approx(10 / 12)
    assert client.get_metric_history(parameters["tracking_run"], "eval/exact_match")[0].step == 5
    artifacts = {item.path for item in client.list_artifacts(parameters["tracking_run"])}
    assert {"report.html", "evaluation_samples.json"} <= artifacts


def test_a_retry_after_the_alias_moved_decides_as_the_first_try(mlflow_server: Server, tmp_path: Path) -> None:
    lab = Lab(tmp_path, mlflow_server, "letters-retry")
    lab.evaluate("one", lab.run("one", before="", after="abc"))
    parameters = lab.run("two", before="", after=LETTERS)
    first = lab.evaluate("two", parameters)
    RunLayout(lab.config("two")).store.delete("steps/evaluate.json")
    replaced = opponent(lab.registry, parameters["version"])
    assert replaced is not None and replaced.number == "1"
    again = lab.evaluate("two", parameters)
    assert again == first and again["promoted"] == "true"
    assert again["eval/champion_exact_match"] == pytest.approx(3 / 12)
    assert lab.number(CHAMPION) == parameters["version"]


def test_a_win_within_the_margin_does_not_promote(mlflow_server: Server, tmp_path: Path) -> None:
    lab = Lab(tmp_path, mlflow_server, "letters-margin")
    result = lab.evaluate("narrow", lab.run("narrow", "abcdef", LETTERS, margin=0.5), margin=0.5)
    assert result["promoted"] == "false" and result["eval/difference_low"] > 0
    assert lab.registry.by_alias(CHAMPION) is None


def test_a_champion_whose_weights_are_gone_is_named(mlflow_server: Server, tmp_path: Path) -> None:
    lab = Lab(tmp_path, mlflow_server, "letters-gone")
    lab.evaluate("old", lab.run("old", before="", after=LETTERS))
    RunLayout(lab.config("old")).store.delete("export")
    parameters = lab.run("new", before="", after=LETTERS)
    with pytest.raises(BadData, match=r"champion \(letters-gone version 1\) cannot be scored"):
        lab.evaluate("new", parameters)


def test_no_more_rows_are_scored_than_asked_for(mlflow_server: Server, tmp_path: Path) -> None:
    lab = Lab(tmp_path, mlflow_server, "letters-rows")
    parameters = lab.run("rows", "", LETTERS, rows=4)
    assert lab.evaluate("rows", parameters, rows=4)["eval/rows"] == 4


def test_a_prompt_longer_than_the_context_is_bad_data(tmp_path: Path) -> None:
    save_upper_case(tmp_path / "policy", LETTERS)
    config = RunConfig.model_validate({"rollout": {"max_new_tokens": 2}})
    layout = RunLayout(RunConfig.model_validate({"storage": {"root": str(tmp_path), "scratch": str(tmp_path)}}))
    layout.store.upload(tmp_path / "policy", "policy")
    with pytest.raises(BadData, match="context"):
        score_uri(f"{layout.uri}/policy", [Row("1", "a" * 40, "A")], config, tmp_path)
