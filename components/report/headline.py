"""The numbers at the top of the report, added up as the loop does it, so that the page and `tandem run --json` agree."""

from __future__ import annotations

from typing import Any, NamedTuple

from components.report.history import History

HOUR_S = 3600.0


class Tile(NamedTuple):
    """One headline number."""

    label: str
    value: str
    note: str = ""


class Groups(NamedTuple):
    """Where the run's groups went."""

    issued: int
    durable: int
    dropped: int
    in_flight: int
    reasons: dict[str, int]


def exact_match(history: History) -> tuple[float | None, float | None, str]:
    """Exact match before and after, and how the second was measured."""
    metrics = history.evaluation.get("metrics", {})
    if metrics:
        level = history.evaluation.get("confidence", 0.95)
        low, high = metrics["eval/exact_match_low"], metrics["eval/exact_match_high"]
        note = f"{level:.0%} interval {low:.3f}–{high:.3f}, {metrics['eval/rows']:,.0f} held-out prompts"
        return metrics["eval/exact_match_before"], metrics["eval/exact_match"], note
    if not history.evaluations:
        return None, None, "not evaluated"
    first, last = min(history.evaluations), max(history.evaluations)
    note = f"measured in the loop at version {last}"
    return history.evaluations[first], history.evaluations[last] if last > first else None, note


def groups(history: History) -> Groups | None:
    """The audit of a loop that ended, else the accounting at the last look; None before the first."""
    if history.audit:
        counted, reasons = history.audit, history.audit["dropped_by_reason"]
        issued, durable, dropped = (counted[f"groups_{name}"] for name in ("issued", "durable", "dropped"))
    elif history.queue:
        last = history.queue[-1]
        issued, durable, dropped = (int(last.get(name, 0)) for name in ("issued", "durable", "dropped"))
        reasons = {}
    else:
        return None
    return Groups(issued, durable, dropped, issued - durable - dropped, reasons)


def tiles(history: History) -> list[Tile]:
    """Headline numbers in reading order; those without data are left out, exact match never."""
    before, after, note = exact_match(history)
    found = [Tile("Exact match, greedy", f"{_fraction(before)} → {_fraction(after)}", note)]
    accounting = groups(history)
    verified = accounting.durable // history.batch_groups if accounting else 0
    verified = history.audit.get("durable_updates", verified)
    figures = history.figures.metrics(verified)
    if history.metrics and figures["wall_s"]:
        hourly = figures["updates_per_hour"]
        found.append(
            Tile("Verified updates per hour", f"{hourly:,.0f}", f"{verified:,} updates in a durable checkpoint")
        )
    if figures["wall_s"]:
        found.append(Tile("Wall time of the loop", duration(figures["wall_s"]), _updates(history)))
    if figures["rollout_tokens_per_s"]:
        rate = figures["rollout_tokens_per_s"]
        found.append(Tile("Rollout tokens per second", f"{rate:,.0f}", f"{history.figures.tokens:,} tokens generated"))
    if lags := history.staleness:
        mean = sum(lag * count for lag, count in lags.items()) / lags.total()
        found.append(Tile("Staleness, mean", f"{mean:.2f}", f"at most {max(lags)} versions"))
    if history.figures.training_s:
        waited = figures["train_wait_fraction"]
        found.append(Tile("Training waited", f"{waited:.1%}", "share of its time without a batch"))
    if accounting is not None:
        found.append(Tile("Groups issued", f"{accounting.issued:,}", _accounting(accounting)))
    if history.metrics or history.restarts:
        roles = ", ".join(sorted({str(event.get("restarted", "?")) for event in history.restarts}))
        found.append(Tile("Restarts", str(len(history.restarts)), roles or "no role died"))
    return found


def duration(seconds: float) -> str:
    """Seconds as `48 s`, `6 min 02 s` or `3 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < HOUR_S:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def step_rows(history: History, current: str) -> list[dict[str, Any]]:
    """The pipeline's steps for the table; `current` is the step that is writing the report."""
    rows = []
    for marker in history.markers:
        status = "done" if marker.step == current and marker.status == "running" else marker.status
        took = duration(marker.ended - marker.started) if marker.ended else "–"
        rows.append({"step": marker.step, "status": status, "took": took, "sentence": marker.sentence})
    return rows


def _fraction(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _updates(history: History) -> str:
    return f"{len(history.metrics):,} policy updates" if history.metrics else "no policy update"


def _accounting(accounting: Groups) -> str:
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(accounting.reasons.items()))
    dropped = f"{accounting.dropped:,} dropped" + (f" ({reasons})" if reasons else "")
    return f"{accounting.durable:,} durable, {dropped}, {accounting.in_flight:,} in flight"
