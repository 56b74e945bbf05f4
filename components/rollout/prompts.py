"""Which prompt a group is about: a function of its id alone, so that the data cursor is the count of issued groups."""

from __future__ import annotations

import numpy as np

from components.stage_data.rows import Row


class PromptOrder:
    """A seeded shuffle of the rows, another one each epoch."""

    def __init__(self, rows: list[Row], seed: int) -> None:
        self.rows = rows
        self.seed = seed
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def row(self, group: int) -> Row:
        """The row of group `group` (ids start at 1)."""
        epoch, place = divmod(group - 1, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        return self.rows[self._order[place]]
