"""Work on many tensors at once: copying, hashing and compressing let other threads run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SERIAL = 1 << 25
"""Bytes up to which starting threads costs more than they save."""
_MOST = 8
"""Threads, at most: more of them wait for the memory."""


@contextlib.contextmanager
def on_cores(size: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` that works on several cores where there are that many bytes to do.

    Leaving early drops what has not begun.

    Args:
        size: Bytes of all the work together.
    """
    threads = min(_MOST, len(os.sched_getaffinity(0)))
    if size <= SERIAL or threads == 1:
        yield map
        return
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
