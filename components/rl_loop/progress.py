"""Whether the loop moves: groups handed on and versions made, not mere liveness."""

from __future__ import annotations

import time
from collections.abc import Callable

from components.experience.experience import Experience
from configs.failure import ServiceGone
from configs.run import RunConfig


class ProgressWatch:
    """Ends a run in which nothing moves, and says whose fault it is.

    Args:
        config: Of the run; `loop.no_progress_s` is the limit.
        experience: The run's groups.
        last_words: What a worker said last.
    """

    def __init__(self, config: RunConfig, experience: Experience, last_words: Callable[[str], str]) -> None:
        self.config = config
        self.experience = experience
        self._last_words = last_words
        self._progress: tuple[int, ...] = ()
        self._occupation = ""
        self._moved = self._changed = self._occupied = time.monotonic()

    def note(self, progress: tuple[int, ...], waiting: bool = False) -> None:
        """Note the run's progress.

        Args:
            progress: Counts of groups and the version.
            waiting: Whether a role has not started yet, which has limits of its own.

        Raises:
            ServiceGone: nothing has moved for `loop.no_progress_s` seconds, though training was at nothing that takes
                time; names the role that stopped. Or training has been at such a thing for `loop.checkpoint_s`.
        """
        limit, now = self.config.loop.no_progress_s, time.monotonic()
        longest = limit
        occupied = self._is_occupied(now)
        if progress != self._progress or waiting or occupied:
            self._progress, self._moved, self._changed = progress, now, now
            return
        if self.config.rollout.engine == "sglang":
            # A server that starts takes its own time: the clock of the groups begins once one serves. Servers that come
            # and go must not put it off for ever.
            longest = 2 * limit + self.config.sglang.ready_s
            if not self.experience.held_versions():
                self._moved = now
        if now - self._moved > limit or now - self._changed > longest:
            role, why = self._stopped()
            raise ServiceGone(
                f"no progress for {now - self._changed:.0f} s: {role} stopped ({why}); its last words:"
                f" {self._last_words(role)}"
            )

    def _is_occupied(self, now: float) -> bool:
        """Whether training is at something that moves nothing, within the limit for that."""
        occupation, limit = self.experience.occupation(), self.config.loop.checkpoint_s
        if occupation != self._occupation:
            self._occupation, self._occupied = occupation, now
        if occupation and now - self._occupied > limit:
            raise ServiceGone(
                f"train is {occupation}, longer than the {limit:.0f} s of loop.checkpoint_s; raise it, or see what holds"
                f" training up; its last words: {self._last_words('train')}"
            )
        return bool(occupation)

    def _stopped(self) -> tuple[str, str]:
        """Which role holds the run up, from where the groups stand."""
        stages, announced, target = self.experience.stages(), self.experience.announced(), self.experience.target()
        if announced is None:
            return "train", "it published no version"
        if target != announced:
            return "broadcast", f"version {announced.version} was published but not offered to the engines"
        taken = self.experience.counters().get("trained", 0) // self.config.train.batch_groups
        if taken > announced.version:
            return "train", f"it has the groups of version {announced.version + 1} and did not make it"
        if stages["scored"] >= self.config.train.batch_groups:
            return "train", f"{stages['scored']} scored groups wait for it"
        if stages["generated"]:
            return "reward", f"{stages['generated']} generated groups wait for it"
        if not self.experience.counters():
            return "rollout-0", "it has not leased a group yet: it starts, loads or evaluates"
        return self.experience.holder() or "rollout-0", f"{stages['running']} groups are leased and none was handed in"
