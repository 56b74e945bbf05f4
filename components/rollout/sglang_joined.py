"""A server that somebody else runs: where it is, and when it is there."""

from __future__ import annotations

import asyncio
import os
import socket
import time

from components.rollout.sglang_client import LOOK_S, ServerError, SGLangClient
from configs.failure import BadConfig, ServiceGone
from configs.sglang import SGLangConfig

KEY = "SGLANG_ADMIN_KEY"
"""Variable with the admin key of joined servers."""
AGAIN_S = 1.0
"""Seconds between tries."""


class JoinedServer:
    """The server of one worker among those that `sglang.urls` or `sglang.service` names.

    Attributes:
        worker: Name of the worker, `rollout-<number>`; the number chooses.
    """

    def __init__(self, config: SGLangConfig, worker: str) -> None:
        self.worker = worker
        self._config = config

    async def connect(self) -> SGLangClient:
        """Wait until it answers, and end what a worker before left running on it.

        Raises:
            BadConfig: there is none for this worker, or it refuses the key.
            ServiceGone: it did not answer within `sglang.ready_s`.
        """
        end, last = time.monotonic() + self._config.ready_s, ""
        while time.monotonic() < end:
            client = None
            try:
                client = SGLangClient(await self._address(), os.environ.get(KEY, ""))
                await client.server_info(LOOK_S)
                await client.abort()
                return client
            except (ServerError, OSError) as error:
                last = str(error)
                if client is not None:
                    await client.close()
                if isinstance(error, ServerError) and error.status in (401, 403):
                    raise BadConfig(
                        f"the SGLang server at {client.url if client else ''} refuses this worker's key; set {KEY} to"
                        " its admin key"
                    ) from None
            await asyncio.sleep(AGAIN_S)
        raise ServiceGone(f"{self.worker}: no SGLang server answered within {self._config.ready_s:g} s: {last}")

    async def _address(self) -> str:
        number = int(self.worker.rpartition("-")[2])
        if urls := self._config.urls:
            if number >= len(urls):
                raise BadConfig(
                    f"{self.worker} has no server: sglang.urls names {len(urls)}; name one a worker, or lower"
                    " rollout.workers"
                )
            return urls[number].rstrip("/")
        host, _, port = self._config.service.partition(":")
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        addresses = sorted({str(entry[4][0]) for entry in found})
        if number >= len(addresses):
            raise OSError(f"{self._config.service} has {len(addresses)} addresses, too few for {self.worker}")
        address = addresses[number]
        return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
