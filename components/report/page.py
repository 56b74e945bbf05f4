"""The run on one self-contained HTML page: no network, no scripts, the same bytes for the same inputs."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jinja2

from components.report import figures, headline
from components.report.history import History, read_history
from components.storage.layout import RunLayout

SAMPLES = 40
"""Rows of the samples table, at most."""
CHARACTERS = 300
"""Characters of a prompt or completion shown, at most."""


def build_report(layout: RunLayout, current: str = "") -> bytes:
    """Build the report of a run, whatever state it is in.

    Args:
        layout: Where the run's files lie.
        current: The step that is building the report, shown as done though its marker still says `running`.

    Returns:
        UTF-8 HTML, under 1 MB.

    Raises:
        BadData: a document of the run is not JSON.
    """
    return render(read_history(layout), current)


def render(history: History, current: str = "") -> bytes:
    """The page of a history."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(
        resources.files("components.report").joinpath("template.html").read_text("utf-8")
    )
    steps = headline.step_rows(history, current)
    page = template.render(
        history=history,
        tiles=headline.tiles(history),
        steps=steps,
        failed=next((row for row in steps if row["status"] == "failed"), None),
        groups=headline.groups(history),
        figures={
            "learning": figures.learning_curve(history),
            "timeline": figures.timeline(history),
            "utilisation": figures.utilisation(history),
            "staleness": figures.staleness(history),
            "queue": figures.queue_depth(history),
        },
        facts=_facts(history),
        samples=sample_rows(history),
        manifest=json.dumps(history.manifest, indent=2, sort_keys=True, ensure_ascii=False),
    )
    return page.encode()


def sample_rows(history: History) -> list[dict[str, Any]]:
    """Rows of the samples table: the step `evaluate`'s, else the loop's samples of the same prompts.

    The rows that changed come first, then the still wrong ones, so that the table shows what was learned and what not.
    """
    rows = history.evaluation.get("rows") or _paired(history)
    shown = [
        {
            "prompt": _short(row["prompt"]),
            "answer": _short(row.get("answer", "")),
            "before": _short(row.get("before")),
            "after": _short(row.get("after")),
            "before_right": _right(row.get("before_reward")),
            "after_right": _right(row.get("after_reward")),
        }
        for row in rows
    ]
    changed = [row for row in shown if {row["before_right"], row["after_right"]} == {True, False}]
    wrong = [row for row in shown if row not in changed and not row["after_right"]]
    right = [row for row in shown if row not in changed and row["after_right"]]
    share = SAMPLES // 2
    chosen = changed[:share] + wrong[: share // 2] + right[: share // 2]
    spare = list(changed[share:] + wrong[share // 2 :] + right[share // 2 :])
    return chosen + spare[: SAMPLES - len(chosen)]


def _paired(history: History) -> list[dict[str, Any]]:
    """The loop's samples by prompt, the first kept as before and the last as after."""
    rows: dict[str, dict[str, Any]] = {}
    for sample in history.samples:
        row = rows.setdefault(sample["prompt"], {"prompt": sample["prompt"], "answer": sample.get("answer", "")})
        stage = "before" if sample["stage"] == "before" else "after"
        row[stage], row[f"{stage}_reward"] = sample.get("completion"), sample.get("reward")
    return list(rows.values())


def _right(reward: float | None) -> bool | None:
    """Whether a completion was rewarded; None when there is no completion."""
    return None if reward is None else reward > 0


def _short(text: str | None) -> str:
    if not text:
        return "–" if text is None else "(empty)"
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…"


def _facts(history: History) -> dict[str, str]:
    """Sentences for the figures' alternative texts and captions."""
    before, after, _ = headline.exact_match(history)
    rewards = [
        metrics["rollout/raw_reward"]
        for _, metrics in sorted(history.metrics.items())
        if "rollout/raw_reward" in metrics
    ]
    learning = ""
    if rewards:
        ends = max(1, len(rewards) // 20)
        first, last = sum(rewards[:ends]) / ends, sum(rewards[-ends:]) / ends
        learning = f"Mean reward went from {first:.2f} to {last:.2f} over {len(rewards)} updates"
    if before is not None and after is not None:
        learning += f"; exact match from {before:.3f} to {after:.3f}"
    total = sum(history.staleness.values())
    lags = (
        ", ".join(f"{history.staleness[lag] / total:.0%} at {lag}" for lag in sorted(history.staleness))
        if total
        else ""
    )
    return {"learning": learning.strip("; "), "staleness": f"Groups by staleness: {lags}" if lags else ""}
