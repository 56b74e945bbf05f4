"""The sending end of collective transfers: rank 0 of process groups whose other ranks are SGLang's.

SGLang's end (`/init_weights_update_group`, `/update_weights_from_distributed`) is a client of a TCPStore and a process
group made by torch's own helper, so this end is made by the same; no default process group is involved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from socket import create_server
from typing import TYPE_CHECKING, Any, NamedTuple

from components.broadcast.session import Session, buckets
from configs.failure import BadConfig, ServiceGone

if TYPE_CHECKING:
    import torch

LIFE = timedelta(days=1)
"""How long the store waits for anything by itself; every wait here has a limit of its own."""


class Message(NamedTuple):
    """A broadcast under way."""

    work: Any
    bucket: torch.Tensor


class Sender:
    """Rank 0 of one session.

    Engines fail one by one: an engine that does not come, dies or stands still costs a wait of one limit, once, and the
    others get everything. (With nccl they share a group, and fail together.)

    Attributes:
        session: Tells engines where to come; it may be published as soon as the sender exists.
        workers: Ranks of the engines that are in, or may still come.
        lost: Why the others are no longer in, by worker.
    """

    def __init__(self, name: str, backend: str, address: str, workers: Mapping[str, int], bucket_bytes: int) -> None:
        """Listen, on a port that is free; does not wait for anyone.

        Args:
            name: Unique name of the session.
            backend: `gloo` or `nccl`.
            address: Host under which the engines reach this process; it listens there only.
            workers: Ranks of each worker's engine.
            bucket_bytes: Size of a message.

        Raises:
            BadConfig: `address` is none of this machine's.
        """
        from torch.distributed import TCPStore

        # By itself the store would listen on every interface; it asks nobody for a key.
        try:
            socket = create_server((address, 0))
        except OSError as error:
            raise BadConfig(
                f"collective transfer: this process cannot listen on {address} ({error}); set weights.transfer to pull, or"
                " give this host an address that the engines reach"
            ) from None
        port = socket.getsockname()[1]
        self._store: Any = TCPStore(
            address, port, None, True, LIFE, wait_for_workers=False, master_listen_fd=socket.detach()
        )
        self.session = Session(name, address, port, backend, dict(workers), bucket_bytes)
        self.workers = dict(workers)
        self.lost: dict[str, str] = {}
        self._groups: dict[str, Any] = {}

    def join(self, limit_s: float) -> set[str]:
        """Wait for the engines that are not in yet.

        Returns:
            The workers whose engines are in.

        Raises:
            ServiceGone: none came within `limit_s` seconds.
        """
        names = {self.session.place(worker).group for worker in self.workers} - self._groups.keys()
        worlds = {self.session.place(worker).group: self.session.place(worker).world for worker in self.workers}
        with ThreadPoolExecutor(max(1, len(names))) as threads:
            for name, group in threads.map(lambda name: (name, self._meet(name, worlds[name], limit_s)), names):
                if isinstance(group, str):
                    self._lose(name, f"did not join within {limit_s:g} s ({group})")
                else:
                    self._groups[name] = group
        return self._remaining()

    def send(self, tensors: Mapping[str, torch.Tensor], limit_s: float) -> set[str]:
        """Send tensors in order, in the buckets of `session.buckets`, each bucket as one message of bytes.

        The other end has to receive them with `load_format: flattened_bucket`.

        Args:
            limit_s: Seconds an engine may take for one bucket, the load of the one before included.

        Returns:
            The workers whose engines took everything; what they made of it they have to prove.

        Raises:
            ServiceGone: no engine took everything.
        """
        described = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()
        ]
        before: dict[str, Message] = {}
        for names in buckets(described, self.session.bucket_bytes):
            bucket = self._flat([tensors[name] for name, _, _ in names])
            # The next bucket is put together while this one travels.
            self._await(before, limit_s)
            before = {name: self._start(name, bucket, limit_s) for name in list(self._groups)}
        self._await(before, limit_s)
        return self._remaining()

    def close(self) -> None:
        """End the groups and the store; engines that wait in them fail at once."""
        for name in list(self._groups):
            _end(self._groups.pop(name))
        self.workers.clear()
        self._store = None

    def _meet(self, name: str, world: int, limit_s: float) -> Any:
        """The process group once all its ranks came; a sentence if they did not."""
        from torch.distributed import Backend, PrefixStore
        from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

        limit = timedelta(seconds=limit_s)
        store = PrefixStore(name, self._store.clone())
        store.set_timeout(limit)
        try:
            group, _ = _new_process_group_helper(
                world, 0, [], Backend(self.session.backend), store, group_name=GroupName(name), timeout=limit
            )
        except RuntimeError as error:
            return str(error).splitlines()[0]
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        return group

    def _flat(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Tensors as one row of bytes, where the backend takes them from."""
        import torch

        place = "cuda" if self.session.backend == "nccl" else "cpu"
        return torch.cat([tensor.detach().to(place).reshape(-1).view(torch.uint8) for tensor in tensors])

    def _start(self, name: str, bucket: torch.Tensor, limit_s: float) -> Message:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        # gloo itself gives up then: a group can be ended only once nothing runs in it.
        options.timeout = timedelta(seconds=limit_s)
        return Message(self._groups[name].broadcast([bucket], options), bucket)

    def _await(self, messages: dict[str, Message], limit_s: float) -> None:
        """Wait until messages are out; what does not take its own within the limit is lost."""
        end = time.monotonic() + limit_s
        for name, message in messages.items():
            if name not in self._groups:
                continue
            try:
                message.work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError as error:
                self._lose(name, f"did not take a message within {limit_s:g} s ({str(error).splitlines()[0]})")

    def _lose(self, name: str, why: str) -> None:
        for worker in [worker for worker in self.workers if self.session.place(worker).group == name]:
            del self.workers[worker]
            self.lost[worker] = why
        if (group := self._groups.pop(name, None)) is not None:
            _end(group)

    def _remaining(self) -> set[str]:
        if not self.workers:
            sentences = "; ".join(f"{worker} {why}" for worker, why in sorted(self.lost.items()))
            raise ServiceGone(f"collective transfer {self.session.name}: no engine is left ({sentences})")
        return set(self.workers)


def _end(group: Any) -> None:
    """Close a group's connections, in a thread: a message that is stuck holds that up until its limit."""
    from torch.distributed import destroy_process_group

    def end(held: list[Any]) -> None:
        # Unknown to torch where this process ended all its groups at once.
        with suppress(ValueError):
            destroy_process_group(held[0])
        held.clear()

    threading.Thread(target=end, args=([group],), daemon=True).start()
