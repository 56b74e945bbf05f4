"""Pipeline step: score candidate, baseline and champion on the same held-out prompts; promote on a win."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from components.evaluate.interval import Interval, bootstrap_interval
from components.evaluate.promotion import Decision, decide, model_uri, opponent, promote
from components.evaluate.scoring import Scores, score_uri
from components.report.page import build_report
from components.stage_data.rows import Row
from components.stage_data.split import read_split
from components.step import Step, run_step
from components.tracking.client import tracking_uri
from components.tracking.registry import Registry, Version
from components.tracking.run import Tracker
from configs.failure import BadData
from configs.run import RunConfig

EVALUATION = "evaluation.json"
"""Key in the run's store that the report reads."""


def evaluate(step: Step) -> None:
    """Score, decide, record, rebuild the report; output `promoted` (`true` or `false`)."""
    config, parameters = step.config, step.parameters
    rows = read_split(parameters["data"], "eval", config.storage)[: config.evaluate.rows]
    if not rows:
        raise BadData(f"{parameters['data']}: the evaluation split is empty; raise data.eval_fraction or add rows")
    uri = tracking_uri(config)
    registry = Registry(uri, config.registered_model)
    champion = opponent(registry, parameters["version"])
    step.layout.scratch.mkdir(parents=True, exist_ok=True)
    scored = _score_all(step, rows, registry, champion)
    decision = decide(scored["candidate"].rewards, scored["champion"].rewards, config.evaluate, config.seed)
    if decision.promoted:
        promote(registry, parameters["version"], champion)
    metrics = _metrics(config, scored, decision)
    record = _record(step, rows, scored, decision, champion, metrics)
    step.store.write(EVALUATION, json.dumps(record, indent=1, sort_keys=True).encode())
    registry.tag(parameters["version"], {key: f"{metrics[key]:.6g}" for key in ("eval/exact_match", "eval/promoted")})
    _publish(step, Tracker(uri, parameters["tracking_run"]), registry, metrics, record["rows"])
    step.finish({"promoted": str(decision.promoted).lower()}, metrics)
    print(f"promoted: {str(decision.promoted).lower()}; {decision.reason}", flush=True)


def _score_all(step: Step, rows: list[Row], registry: Registry, champion: Version | None) -> dict[str, Scores]:
    """Scores of candidate, baseline and champion; weights that play two parts are scored once."""
    config, parameters, work = step.config, step.parameters, step.layout.scratch
    places = {"candidate": parameters["model"], "baseline": parameters["baseline"]}
    places["champion"] = model_uri(registry, champion) if champion else places["baseline"]
    scored: dict[str, Scores] = {}
    for part, place in places.items():
        if place in list(places.values())[: len(scored)]:
            scored[part] = scored[next(other for other in scored if places[other] == place)]
            continue
        try:
            scored[part] = score_uri(place, rows, config, Path(work))
        except BadData as error:
            if part != "champion" or champion is None:
                raise
            raise BadData(
                f"the champion ({registry.name} version {champion.number}) cannot be scored: {error};"
                " restore its folder, or remove the alias champion to start from the baseline"
            ) from error
    return scored


def _interval(scores: np.ndarray, config: RunConfig) -> Interval:
    return bootstrap_interval(scores, config.evaluate.bootstrap_samples, config.evaluate.confidence, config.seed)


def _metrics(config: RunConfig, scored: dict[str, Scores], decision: Decision) -> dict[str, float]:
    after = _interval(scored["candidate"].rewards, config)
    before = _interval(scored["baseline"].rewards, config)
    return {
        "eval/exact_match": after.mean,
        "eval/exact_match_low": after.low,
        "eval/exact_match_high": after.high,
        "eval/exact_match_before": before.mean,
        "eval/exact_match_before_low": before.low,
        "eval/exact_match_before_high": before.high,
        "eval/champion_exact_match": float(scored["champion"].rewards.mean()),
        "eval/difference": decision.difference.mean,
        "eval/difference_low": decision.difference.low,
        "eval/difference_high": decision.difference.high,
        "eval/rows": float(len(scored["candidate"].rewards)),
        "eval/promoted": float(decision.promoted),
    }


def _record(
    step: Step,
    rows: list[Row],
    scored: dict[str, Scores],
    decision: Decision,
    champion: Version | None,
    metrics: dict[str, float],
) -> dict[str, Any]:
    """What `evaluation.json` holds: the metrics, the decision and the samples before and after."""
    before, after = scored["baseline"], scored["candidate"]
    samples = [
        {
            "prompt": row.prompt,
            "answer": row.answer,
            "before": before.completions[number],
            "after": after.completions[number],
            "before_reward": float(before.rewards[number]),
            "after_reward": float(after.rewards[number]),
        }
        for number, row in enumerate(rows[: step.config.tracking.sample_rows])
    ]
    return {
        "confidence": step.config.evaluate.confidence,
        "margin": step.config.evaluate.margin,
        "champion_version": champion.number if champion else None,
        "version": step.parameters["version"],
        "model": step.parameters["model"],
        "promoted": decision.promoted,
        "reason": decision.reason,
        "metrics": metrics,
        "rows": samples,
    }


def _publish(
    step: Step, tracker: Tracker, registry: Registry, metrics: dict[str, float], samples: list[dict[str, Any]]
) -> None:
    """Log to MLflow and rebuild the report, which goes to the store, to MLflow and to KFP."""
    train_step = int(registry.get(step.parameters["version"]).tags.get("train_step", "0"))
    now = time.time()
    tracker.log_metrics([(key, value, train_step, now) for key, value in metrics.items()])
    tracker.log_samples(samples, step.config.tracking.sample_rows, "evaluation_samples")
    report = build_report(step.layout, current="evaluate")
    step.store.write("report.html", report)
    tracker.log_text("report.html", report.decode())
    step.write_artifact("report", report)


if __name__ == "__main__":
    run_step("evaluate", evaluate)
