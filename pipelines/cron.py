"""Times of a schedule: a cron expression and a timezone, checked before a controller gets them, which would stay silent."""

from __future__ import annotations

import re
import zoneinfo
from typing import NamedTuple

from configs.failure import BadConfig

NICKNAMES = ("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly")
EVERY = re.compile(r"@every (?=\d)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    """What may stand for `low` and those after it."""


FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day", 1, 31),
    _Field("month", 1, 12, MONTHS),
    _Field("weekday", 0, 7, WEEKDAYS),
)


def check_cron(cron: str) -> str:
    """A cron expression of five fields, or a nickname such as `@daily`, as the controllers take it.

    Raises:
        BadConfig: they would not take it, or it would start runs more often than once a minute.
    """
    fields = cron.split()
    if fields and fields[0].startswith("@"):
        return _nickname(" ".join(fields).lower())
    if len(fields) != 5:
        raise BadConfig(
            f"--cron '{cron}' has {len(fields)} fields, not five; write minute hour day month weekday: \"0 3 * * 1\""
        )
    found = [_values(kind, text) for kind, text in zip(FIELDS, fields, strict=True)]
    if re.search(r"(?<![/\d])7", fields[4]):
        # Sunday by its other number, which the controllers do not know.
        fields[4] = ",".join(str(day) for day in sorted({day % 7 for day in found[4]}))
    return " ".join(fields)


def check_timezone(timezone: str) -> str:
    """The name of a timezone; empty stays empty.

    Raises:
        BadConfig: there is none of that name.
    """
    try:
        if timezone:
            zoneinfo.ZoneInfo(timezone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        # Some machines hold no list of timezones at all; the controllers bring their own.
        if _known("Europe/Berlin"):
            raise BadConfig(
                f"--timezone '{timezone}' is no timezone; give an IANA name, such as Europe/Berlin or UTC"
            ) from None
    return timezone


def _known(timezone: str) -> bool:
    try:
        zoneinfo.ZoneInfo(timezone)
    except zoneinfo.ZoneInfoNotFoundError:
        return False
    return True


def _nickname(cron: str) -> str:
    if cron in NICKNAMES:
        return cron
    found = EVERY.fullmatch(cron)
    hours, minutes, seconds = (int(number or 0) for number in found.groups()) if found else (0, 0, 0)
    if hours * 3600 + minutes * 60 + seconds < 60:
        raise BadConfig(
            f"--cron '{cron}' is no time; write {', '.join(NICKNAMES)}, or @every with a minute or more: \"@every 1h30m\""
        )
    return cron


def _values(kind: _Field, text: str) -> set[int]:
    """What a field fits: a list of `*`, numbers and ranges, each with a step or without."""
    values = set[int]()
    for part in text.split(","):
        span, slash, step = part.partition("/")
        start, dash, end = span.partition("-")
        if span in ("*", "?"):
            low, high = kind.low, kind.high
        else:
            low = _number(kind, start, part)
            high = _number(kind, end, part) if dash else kind.high if slash else low
        every = int(step) if step.isascii() and step.isdigit() else 0 if slash else 1
        if low > high or not 1 <= every <= kind.high:
            raise _mistake(kind, part)
        values.update(range(low, high + 1, every))
    return values


def _number(kind: _Field, text: str, part: str) -> int:
    if text.upper() in kind.names:
        return kind.low + kind.names.index(text.upper())
    if not (text.isascii() and text.isdigit()) or not kind.low <= int(text) <= kind.high:
        raise _mistake(kind, part)
    return int(text)


def _mistake(kind: _Field, part: str) -> BadConfig:
    return BadConfig(
        f"--cron: '{part}' is no {kind.name}; write numbers from {kind.low} to {kind.high}, ranges (2-4), lists (2,4), steps"
        " (*/2) or *"
    )
