"""The report's figures as inline SVG: real text in the page's font, colours from the page's CSS variables."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from components.report.history import History

INK, MUTED, GRID, PAPER = "#1a1b1c", "#6b6c6d", "#dcdddf", "#fefdfc"
BLUE, ORANGE, GREEN, PURPLE = "#2a6fb1", "#d9822b", "#2e8b57", "#8256a8"
RED, TEAL, GREY = "#c44a4b", "#1b8a94", "#b8babd"
VARIABLES = {
    INK: "--ink", MUTED: "--muted", GRID: "--line", PAPER: "--paper", BLUE: "--blue", ORANGE: "--orange",
    GREEN: "--green", PURPLE: "--purple", RED: "--red", TEAL: "--teal", GREY: "--grey",
}  # fmt: skip
KINDS = {
    "generate": ("generate", BLUE),
    "train": ("train", GREEN),
    "reward": ("reward", ORANGE),
    "publish": ("broadcast, load, verify", PURPLE),
    "load": ("broadcast, load, verify", PURPLE),
    "verify": ("broadcast, load, verify", PURPLE),
    "checkpoint": ("checkpoint", RED),
    "evaluate": ("evaluate", TEAL),
    "wait": ("wait", GREY),
}
"""Label and colour of each kind of span."""
POINTS = 600
"""Points of a curve, at most."""
WINDOW = 8
"""Policy updates the timeline shows."""
MAX_BARS = 1500
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "tandem", "font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED,
    "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True, "path.simplify": True,
    "figure.facecolor": "none", "axes.facecolor": "none", "figure.constrained_layout.use": True,
}  # fmt: skip


def learning_curve(history: History) -> str | None:
    """Mean reward of each batch and exact match on held-out prompts, by version."""
    rewards = {
        version: metrics["rollout/raw_reward"]
        for version, metrics in sorted(history.metrics.items())
        if "rollout/raw_reward" in metrics
    }
    if not rewards and not history.evaluations:
        return None
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas(3.3)
        if rewards:
            x, y = _decimated(list(rewards), list(rewards.values()))
            axes.plot(x, y, color=BLUE, linewidth=0.8, alpha=0.35)
            axes.plot(x, _smoothed(y), color=BLUE, linewidth=2, label="mean reward of the batch, sampled (smoothed)")
        if history.evaluations:
            versions = sorted(history.evaluations)
            scores = [history.evaluations[version] for version in versions]
            axes.plot(
                versions,
                scores,
                "o-",
                color=ORANGE,
                linewidth=1.6,
                markersize=4.5,
                label="exact match, greedy, held out",
            )
        axes.set_xlabel("policy version")
        axes.margins(x=0.02)
        _legend(axes)
        return _svg(figure, "learning")


def timeline(history: History) -> str | None:
    """What each role did over a few updates in the middle of the run."""
    window = _window(history)
    spans = [span for span in history.spans if span["end"] > window[0] and span["start"] < window[1]] if window else []
    if window is None or not spans:
        return None
    roles = _roles(spans)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas(0.95 + 0.42 * len(roles))
        for row, role in enumerate(roles):
            for colour, bars in _bars([span for span in spans if span["role"] == role], window).items():
                axes.broken_barh(bars, (row - 0.36, 0.72), color=colour, linewidth=0)
        for time in history.step_times.values():
            if window[0] <= time <= window[1]:
                axes.axvline(time - window[0], color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.set_yticks(range(len(roles)), roles)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_ylim(len(roles) - 0.5, -0.5)
        axes.set_xlim(0, window[1] - window[0])
        axes.set_xlabel("seconds; a dashed line is a new version")
        axes.grid(axis="y", visible=False)
        _kinds_legend(axes, spans)
        return _svg(figure, "timeline")


def utilisation(history: History) -> str | None:
    """How each role spent the whole loop."""
    if not history.spans:
        return None
    total = history.figures.metrics(0)["wall_s"]
    if total <= 0:
        return None
    roles = _roles(history.spans)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas(0.95 + 0.42 * len(roles))
        for row, role in enumerate(roles):
            left = 0.0
            for colour, share in _shares(history.spans, role, total).items():
                axes.barh(row, share, left=left, height=0.6, color=colour, linewidth=0)
                if share >= 0.08:
                    axes.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", color=PAPER, fontsize=9)
                left += share
        axes.set_yticks(range(len(roles)), roles)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_ylim(len(roles) - 0.5, -0.5)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel("share of the loop's wall time; the rest is idle")
        axes.grid(axis="y", visible=False)
        _kinds_legend(axes, history.spans)
        return _svg(figure, "utilisation")


def staleness(history: History) -> str | None:
    """Groups trained on, by how many versions old they were."""
    if not history.staleness:
        return None
    lags = list(range(max(history.staleness) + 1))
    counts = [history.staleness[lag] for lag in lags]
    total = sum(counts)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas(3.0, width=5.4)
        bars = axes.bar([str(lag) for lag in lags], counts, color=BLUE, width=0.62)
        if len(lags) <= 8:
            axes.bar_label(bars, [f"{count / total:.0%}" for count in counts], padding=3, color=INK)
        axes.set_xlabel("versions behind the policy trained")
        axes.set_ylabel("groups")
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.15)
        return _svg(figure, "staleness")


def queue_depth(history: History) -> str | None:
    """Groups at each stage between ticket and checkpoint, over time."""
    if len(history.queue) < 2:
        return None
    stages = {
        "running": ("generating", BLUE),
        "generated": ("awaiting reward", ORANGE),
        "scored": ("awaiting training", GREEN),
    }
    start = history.queue[0]["time"]
    seconds = [sample["time"] - start for sample in history.queue]
    unit, label = (60.0, "minutes") if seconds[-1] > 300 else (1.0, "seconds")
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas(3.0, width=5.4)
        for stage, (name, colour) in stages.items():
            values = [float(sample.get(stage, 0)) for sample in history.queue]
            x, y = _decimated([second / unit for second in seconds], values, POINTS // 4)
            axes.plot(x, y, color=colour, linewidth=1.4, label=name)
        axes.set_xlabel(f"{label} since the loop began")
        axes.set_ylabel("groups")
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        _legend(axes)
        return _svg(figure, "queue")


def _canvas(height: float, width: float = 9.4) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _legend(axes: Axes, **options: Any) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=8, frameon=False, borderaxespad=0.2, handlelength=1.2,
        columnspacing=1.4, **options,
    )  # fmt: skip


def _kinds_legend(axes: Axes, spans: list[dict[str, Any]]) -> None:
    present = {span["kind"] for span in spans}
    shown = dict(KINDS[kind] for kind in KINDS if kind in present)
    _legend(axes, handles=[Patch(color=colour, label=label) for label, colour in shown.items()])


def _roles(spans: list[dict[str, Any]]) -> list[str]:
    """Roles in the order of the data's way through the loop."""
    way = ("rollout", "reward", "train", "broadcast")
    found = {span["role"] for span in spans}
    return sorted(found, key=lambda role: (next((n for n, name in enumerate(way) if role.startswith(name)), 9), role))


def _window(history: History) -> tuple[float, float] | None:
    """Start and end of the timeline: some consecutive updates in the middle, else everything there is."""
    times = [history.step_times[version] for version in sorted(history.step_times)]
    if len(times) > WINDOW:
        first = (len(times) - WINDOW) // 2
        if times[first + WINDOW] > times[first]:
            return times[first], times[first + WINDOW]
    if not history.spans:
        return None
    return min(span["start"] for span in history.spans), max(span["end"] for span in history.spans)


def _bars(spans: list[dict[str, Any]], window: tuple[float, float]) -> dict[str, list[tuple[float, float]]]:
    """Start and width of each bar by colour, in seconds from the window's start; bars that touch are joined."""
    joint = (window[1] - window[0]) / MAX_BARS
    bars: dict[str, list[tuple[float, float]]] = {}
    for span in sorted(spans, key=lambda span: (span["kind"] != "wait", span["start"])):
        colour = KINDS.get(span["kind"], ("", GREY))[1]
        start = max(span["start"], window[0]) - window[0]
        end = min(span["end"], window[1]) - window[0]
        row = bars.setdefault(colour, [])
        if row and 0 <= start - sum(row[-1]) < joint:
            start = row.pop()[0]
        row.append((start, max(end - start, joint)))
    return bars


def _shares(spans: list[dict[str, Any]], role: str, total: float) -> dict[str, float]:
    """Share of the loop by colour, working kinds first, waiting last."""
    shares: dict[str, float] = {}
    for kind, (_, colour) in KINDS.items():
        took = sum(span["end"] - span["start"] for span in spans if span["role"] == role and span["kind"] == kind)
        if took > 0:
            shares[colour] = shares.get(colour, 0.0) + took / total
    return shares


def _decimated(x: Sequence[float], y: Sequence[float], points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """A curve with at most `points` points, each the mean of its bin."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    if len(xs) <= points:
        return xs, ys
    edges = np.linspace(0, len(xs), points + 1).astype(int)
    counts = np.diff(edges)
    return np.add.reduceat(xs, edges[:-1]) / counts, np.add.reduceat(ys, edges[:-1]) / counts


def _smoothed(y: np.ndarray) -> np.ndarray:
    """Centred moving mean over a thirtieth of the curve."""
    width = max(1, len(y) // 30) | 1
    padded = np.pad(y, width // 2, mode="edge")
    return np.convolve(padded, np.full(width, 1 / width), mode="valid")


def _svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for inlining: ids made unique, fonts and colours left to the page."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Type": None, "Format": None}
    )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'font-family: [^;"]+', "font-family: var(--sans)", svg)
    svg = re.sub(
        r'<svg [^>]*?(viewBox="[^"]+")[^>]*>',
        r'<svg \1 xmlns:xlink="http://www.w3.org/1999/xlink" aria-hidden="true">',
        svg,
        count=1,
    )
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg
