"""What training is at while no group moves and no version is made, told to the loop for as long as it lasts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from components.experience.experience import Experience
from configs.failure import ServiceGone

BEAT_S = 1.0
LAST_S = 30.0
"""Seconds one beat counts: what keeps this process's other threads from running may keep the beat from being sent."""


@contextmanager
def occupied(experience: Experience, what: str) -> Iterator[None]:
    """Tell the loop, until the context ends, that training is at something that moves nothing; it waits for
    `loop.checkpoint_s` (`components.rl_loop.progress`). What takes less than a second is not told.

    Args:
        experience: The run's.
        what: In words, as after "training is".
    """
    ended = threading.Event()
    # Beginning anew after a crash is another occupation.
    since = f"{what} since {time.strftime('%H:%M:%S')}"

    def beat() -> None:
        while not ended.wait(BEAT_S):
            # That Redis is gone is noticed by whoever needs it.
            with contextlib.suppress(ServiceGone):
                experience.occupy(since, LAST_S)

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
