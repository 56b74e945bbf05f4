"""A collective transfer at its receiving end: an SGLang server joins the group and takes the tensors in buckets."""

from __future__ import annotations

from contextlib import suppress

from components.broadcast.session import buckets
from components.experience.deliveries import Target
from components.rollout.engine import Collective
from components.rollout.sglang_client import ServerError, SGLangClient


async def receive(
    client: SGLangClient, source: Collective, target: Target, worker: str, joined: str, flush: bool, limit_s: float
) -> str:
    """Receive a version; returns the name of the group the server is in then.

    Args:
        joined: Name of the group that the server is in now, or empty.
        flush: Whether the server forgets its keys and values.
        limit_s: Seconds for joining, and for every bucket.

    Raises:
        ServerError: the server refuses or fails, or a rank of the group did not come; its memory may hold parts of two
            versions.
    """
    session = source.session
    if worker not in session.ranks:
        raise ServerError(0, f"session {session.name} has no place for {worker}")
    place = session.place(worker)
    if joined != place.group:
        if joined:
            with suppress(ServerError):
                await client.leave(joined)
        await client.join(session.address, session.port, place, session.backend, limit_s)
    await client.begin()
    messages = buckets(source.tensors, session.bucket_bytes)
    for number, message in enumerate(messages, 1):
        last = number == len(messages)
        label = target.label if last else ""
        await client.update_from_distributed(message, place.group, label, flush and last, limit_s)
    await client.end()
    return place.group
