"""Progress of a transfer, for a person at a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextlib.contextmanager
def transfer_progress(label: str, total: int | None = None) -> Iterator[Callable[[int], None] | None]:
    """Show bytes, rate and time left on stderr while inside; nothing where stderr is no terminal.

    Args:
        label: What is moved.
        total: Bytes in all, if known.

    Yields:
        What `Store.upload` and `Store.download` take as `on_bytes`.
    """
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda moved: progress.advance(task, moved)
