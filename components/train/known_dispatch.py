"""How a run's tokens travel to their experts, chosen once: another way adds in another order, so a step that is repeated after
a crash would come to other bits."""

from __future__ import annotations

import os

import msgspec

from components.storage.layout import RunLayout
from components.train.ranks import Ranks
from configs.run import RunConfig
from kernels.dispatch.choose import Choice

KEY = "dispatch.json"
"""In the run's store."""


class Known(msgspec.Struct):
    """A choice, and what it was made for: with other ranks it is made anew."""

    dispatch: str
    ranks: int
    expert_parallel: int
    ranks_per_node: int
    wire: str


def with_known_dispatch(config: RunConfig, layout: RunLayout, ranks: Ranks) -> RunConfig:
    """The configuration, with what `kernels.dispatch: auto` came to before in this run. Collective."""
    if not _is_chosen(config, ranks):
        return config
    store = layout.store
    kept = ranks.spread(store.read(KEY) if ranks.rank == 0 and store.exists(KEY) else b"")
    if not kept:
        return config
    known = msgspec.json.decode(kept, type=Known)
    if known != _known(known.dispatch, config, ranks):
        return config
    kernels = config.kernels.model_copy(update={"dispatch": known.dispatch})
    return config.model_copy(update={"kernels": kernels})


def keep_dispatch(choice: Choice | None, config: RunConfig, layout: RunLayout, ranks: Ranks) -> None:
    """Keep a choice that was just made."""
    if choice is not None and ranks.rank == 0 and _is_chosen(config, ranks):
        layout.store.write(KEY, msgspec.json.encode(_known(choice.dispatcher.name, config, ranks)))


def _is_chosen(config: RunConfig, ranks: Ranks) -> bool:
    return not ranks.alone and config.train.expert_parallel > 1 and config.kernels.dispatch == "auto"


def _known(dispatch: str, config: RunConfig, ranks: Ranks) -> Known:
    width = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks.size)))
    return Known(dispatch, ranks.size, config.train.expert_parallel, width, config.kernels.wire)
