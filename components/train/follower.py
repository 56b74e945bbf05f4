"""A training rank other than the first: it follows rank 0's orders and speaks to neither Redis nor the loop."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from components.role import ended_by, role_arguments, start_policy
from components.storage.layout import RunLayout
from components.train.checkpoint import restore
from components.train.gang import Gang, lost, meet, meeting_point
from components.train.orders import follow
from components.train.ranks import Ranks
from components.weights.policy import policy_tokenizer
from configs.run import RunConfig


class Leaving:
    """Whether this process was told to leave."""

    def __init__(self) -> None:
        self.told = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave)

    def __call__(self) -> bool:
        return self.told

    def _leave(self, number: int, frame: Any) -> None:
        self.told = True


def main() -> None:
    """Train as one of the ranks, until rank 0 lets go; the exit code is then rank 0's."""
    arguments = role_arguments("train")
    leaving = Leaving()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = RunConfig.from_json(arguments.config.read_text(), str(arguments.config))
    layout = RunLayout(config)
    if "LOCAL_RANK" not in os.environ:
        with Gang(config, layout, sys.argv[1:]) as gang:
            code = _follow(config, layout, arguments.checkpoint, gang.ranks, leaving)
            gang.let_go()
        sys.exit(code)
    ranks = Ranks.on_node(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    try:
        store = meeting_point(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), config)
        meet(ranks, store, config)
        code = _follow(config, layout, arguments.checkpoint, ranks, leaving)
    except RuntimeError as error:
        raise lost(error, ranks) or error from None
    sys.exit(code)


def _follow(config: RunConfig, layout: RunLayout, checkpoint: str, ranks: Ranks, leaving: Leaving) -> int:
    if ranks.local == 0:
        start_policy(layout, checkpoint)
    ranks.wait()
    start = start_policy(layout, checkpoint)
    trainer, _ = restore(layout, config, start, ranks)
    return follow(trainer, policy_tokenizer(start), layout, leaving)


if __name__ == "__main__":
    ended_by(main)
