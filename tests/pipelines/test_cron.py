"""Times of a schedule: what the controllers take passes, what they would silently drop is refused at the door."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.failure import BadConfig
from pipelines.cron import check_cron, check_timezone
from tests.pipelines.command import tandem
from tests.pipelines.submitted import BUCKET, QUICKSTART, images_file


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (" 0 3 * *  1 ", "0 3 * * 1"),
        ("*/15 0-23/2 1,15 jan-MAR mon", "*/15 0-23/2 1,15 jan-MAR mon"),
        ("59 23 31 12 6", "59 23 31 12 6"),
        ("0 0 * * 7", "0 0 * * 0"),
        ("0 0 * * 5-7", "0 0 * * 0,5,6"),
        ("0 0 * * */7", "0 0 * * */7"),
        ("5/10 * ? * *", "5/10 * ? * *"),
        ("@hourly", "@hourly"),
        ("@every  1h30m", "@every 1h30m"),
    ],
)
def test_times_that_controllers_take(given: str, taken: str) -> None:
    assert check_cron(given) == taken


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "has 0 fields"),
        ("0 0 3 * * 1", "has 6 fields, not five"),
        ("60 * * * *", "'60' is no minute; write numbers from 0 to 59"),
        ("* 24 * * *", "is no hour"),
        ("* * 0 * *", "is no day"),
        ("* * * 13 *", "is no month"),
        ("* * * * 8", "is no weekday"),
        ("5-1 * * * *", "'5-1' is no minute"),
        ("*/0 * * * *", "no minute"),
        ("*/ * * * *", "no minute"),
        ("*/90 * * * *", "no minute"),
        ("1,, * * * *", "'' is no minute"),
        ("- * * * *", "no minute"),
        ("-1 * * * *", "no minute"),
        ("² * * * *", "no minute"),
        ("x * * * *", "no minute"),
        ("* * * MON *", "no month"),
        ("@often", "is no time"),
        ("@every", "is no time"),
        ("@every 5s", "a minute or more"),
        ("@every 1 h", "is no time"),
    ],
)
def test_times_that_controllers_drop(given: str, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        check_cron(given)


@pytest.mark.parametrize("given", ["Mars/Olympus", "Europe", "../etc/passwd", "/etc/passwd", "a\0b", "+01:00"])
def test_timezones_that_do_not_exist(given: str) -> None:
    assert [check_timezone(name) for name in ("", "UTC", "Europe/Berlin")] == ["", "UTC", "Europe/Berlin"]
    with pytest.raises(BadConfig, match="is no timezone"):
        check_timezone(given)


def test_the_command_refuses_them_before_it_looks_for_a_cluster(tmp_path: Path) -> None:
    run = ("schedule", str(QUICKSTART), "-s", BUCKET, "--images", str(images_file(tmp_path)))
    for more, words in (
        (("--cron", "61 * * * *"), "'61' is no minute"),
        (("--cron", "@daily", "--timezone", "Mars/Olympus"), "'Mars/Olympus' is no timezone"),
    ):
        done = tandem(tmp_path, *run, *more, KUBECONFIG=str(tmp_path / "none"))
        assert (done.code, done.err.startswith("tandem: "), words in done.err) == (64, True, True), done.err
