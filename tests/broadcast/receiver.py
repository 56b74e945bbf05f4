"""The receiving end as SGLang has it: `python -m tests.broadcast.receiver <session as JSON> <worker> <sizes as JSON>`.

Prints a checksum of every message it got, and how it ended.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, rendezvous

from components.broadcast.session import Session


def main(session: Session, worker: str, sizes: list[int]) -> None:
    place = session.place(worker)
    limit = timedelta(minutes=30)
    store, _, _ = next(rendezvous(f"tcp://{session.address}:{session.port}", place.rank, place.world, timeout=limit))
    group, _ = _new_process_group_helper(
        place.world, place.rank, [], Backend(session.backend), PrefixStore(place.group, store),
        group_name=GroupName(place.group), timeout=limit,
    )  # fmt: skip
    options = dist.BroadcastOptions()
    for size in sizes:
        message = torch.empty(size, dtype=torch.uint8)
        try:
            group.broadcast([message], options).wait()
        except RuntimeError:
            print("left alone", flush=True)
            return
        print(xxhash.xxh3_64_hexdigest(message.numpy().data), flush=True)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Session), sys.argv[2], json.loads(sys.argv[3]))
