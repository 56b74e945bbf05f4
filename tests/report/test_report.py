import html.parser
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from components.report.headline import duration
from components.report.history import read_history
from components.report.page import build_report, sample_rows
from tests.report.synthetic import events, layout_at, write_marker, write_run


def whole_page(folder: Path) -> str:
    layout = layout_at(folder)
    write_run(layout, events(120))
    return build_report(layout).decode()


def test_the_page_of_a_whole_run_stands_alone_and_shows_every_part(tmp_path: Path) -> None:
    page = whole_page(tmp_path)
    assert len(page.encode()) < 1_000_000
    assert "0.272 → 0.963" in page and "interval 0.945–0.979" in page
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Promotion", "Learning curve", "Iteration timeline", "Utilisation", "Staleness", "Queue depth",
        "Group accounting", "Samples before and after", "Pipeline steps", "Build",
    ]  # fmt: skip
    assert page.count("<svg") == 5 and page.count('role="img" aria-label="') == 5
    assert "<script" not in page and "<link" not in page and "@import" not in page
    addresses = set(re.findall(r"https?://[^\"'\s<]+", page))
    assert addresses <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert not re.search(r'(src|href)="(?!#)', page)


def test_ids_are_unique_references_resolve_and_every_figure_is_xml(tmp_path: Path) -> None:
    page = whole_page(tmp_path)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page))
    assert {one or other for one, other in used} <= set(ids)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_figures_take_colours_and_fonts_from_the_page(tmp_path: Path) -> None:
    page = whole_page(tmp_path)
    assert "prefers-color-scheme: dark" in page
    figures = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}\b", figures)
    assert "DejaVu" not in figures and "generating" in figures


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    assert whole_page(tmp_path / "one") == whole_page(tmp_path / "two").replace("/two", "/one")


def test_a_run_that_failed_before_the_loop_says_so(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    write_marker(layout, "preflight", 2.0)
    write_marker(layout, "stage_data", 0.5, status="failed", exit_code=65, sentence="data.jsonl line 3: <b> is no JSON")
    page = build_report(layout).decode()
    assert "The run failed in stage_data." in page and "line 3: &lt;b&gt; is no JSON" in page
    assert "No policy update is recorded, and no role reported any work" in page
    assert "left no build manifest" in page
    assert "<svg" not in page


def test_a_run_without_anything_still_has_a_page(tmp_path: Path) -> None:
    page = build_report(layout_at(tmp_path)).decode()
    assert "– → –" in page and "not evaluated" in page


def test_a_cut_last_line_and_foreign_lines_are_left_aside(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    write_run(layout, events(20))
    whole = read_history(layout)
    with layout.events.open("a") as file:
        file.write(
            'not JSON\n[1]\n{"event":"span","role":"train"}\n{"event":"mystery","time":1.0}\n{"time":1,"event":"st'
        )
    cut = read_history(layout)
    assert cut.metrics == whole.metrics and cut.unreadable == 4
    assert "4 records of the run could not be read" in build_report(layout).decode()


def test_a_resumed_run_counts_a_repeated_step_once(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    found = events(30)
    repeated = [event for event in found if event["event"] == "step" and event["version"] > 25]
    write_run(layout, found + repeated)
    history = read_history(layout)
    assert sorted(history.metrics) == list(range(1, 31))
    assert sum(history.staleness.values()) == 30 * 32


def test_what_the_policy_wrote_is_escaped(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    write_run(layout, events(20))
    layout.store.delete("evaluation.json")
    page = build_report(layout).decode()
    assert "&lt;b&gt;64&lt;/b&gt;" in page and "<b>64</b>" not in page


def test_samples_that_changed_come_first(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    write_run(layout, events(20))
    rows = sample_rows(read_history(layout))
    assert len(rows) == 40
    assert all(row["before_right"] != row["after_right"] for row in rows[:20])
    assert any(not row["before_right"] and not row["after_right"] for row in rows)


def test_the_page_and_the_loop_tell_the_same_figures(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    write_run(layout, events(50))
    metrics = read_history(layout).figures.metrics(verified_updates=50)
    page = build_report(layout).decode()
    assert f"{metrics['updates_per_hour']:,.0f}" in page and f"{metrics['rollout_tokens_per_s']:,.0f}" in page
    assert "50 updates in a durable checkpoint" in page and "The audit balances." in page


def test_before_the_audit_the_last_look_at_the_queue_counts(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    write_run(layout, events(50))
    layout.store.delete("audit.json")
    page = build_report(layout).decode()
    assert "in flight at the last look" in page and "50 updates in a durable checkpoint" in page


def test_the_curves_of_a_long_run_are_decimated(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    write_run(layout, events(3000, workers=4))
    assert len(build_report(layout)) < 1_000_000


def test_tags_are_balanced(tmp_path: Path) -> None:
    open_tags: list[str] = []
    void = {"meta", "br", "use"}

    class Checker(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in void:
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert tag in void or open_tags.pop() == tag

    Checker().feed(whole_page(tmp_path))
    assert open_tags == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.25, "4.2 s"), (48.2, "48 s"), (362, "6 min 02 s"), (11100, "3 h 05 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium to render the page")
def test_a_browser_renders_every_figure_without_errors(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(whole_page(tmp_path))
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        (tmp_path / "report.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("<svg") == 5


def test_a_prompt_without_a_sample_from_before_gets_no_verdict(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    rows = [{"prompt": "1+1=", "completion": "", "answer": "2", "reward": 0.0}]
    sample = {"time": 1.0, "role": "rl_loop", "event": "samples", "stage": "after", "rows": rows, "version": 9}
    write_run(layout, [*events(20), sample])
    layout.store.delete("evaluation.json")
    row = next(row for row in sample_rows(read_history(layout)) if row["prompt"] == "1+1=")
    assert (row["before"], row["before_right"]) == ("–", None)
    assert (row["after"], row["after_right"]) == ("(empty)", False)
