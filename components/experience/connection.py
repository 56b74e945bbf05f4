"""A run's part of a Redis: its keys, its scripts, and what happens when Redis is away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

import redis
from redis.backoff import ConstantBackoff, ExponentialBackoff, NoBackoff
from redis.retry import Retry

from configs.failure import ServiceGone
from configs.run import RunConfig

SCRIPTS = ("lease", "renew", "keep", "pass", "drop", "take", "commit")


class RunRedis:
    """The structures of one run in a Redis.

    Raises:
        ServiceGone: from any method, when Redis has not answered for about ten seconds.
    """

    def __init__(self, url: str, config: RunConfig) -> None:
        self.config = config
        self.redis = redis.Redis.from_url(
            url,
            password=os.environ.get("REDIS_PASSWORD"),
            socket_timeout=10,
            socket_connect_timeout=5,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), retries=8),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
        )
        self._prefix = f"tandem:{{{config.name}}}:"
        self._scripts = {name: self.redis.register_script(_source(name)) for name in SCRIPTS}

    def hurry(self) -> None:
        """From now on fail within a second instead of ten when Redis is away: this process is told to leave, and a Redis
        that leaves as well does not come back."""
        self.redis.set_retry(Retry(ConstantBackoff(0.2), 2))

    def key(self, name: str) -> str:
        """The Redis key of one of the run's structures."""
        return self._prefix + name

    def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        return self._do(self._scripts[script], keys=[self.key(key) for key in keys], args=arguments)

    def _do(self, command: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise ServiceGone(f"Redis does not answer ({error}); see the log redis.log of the run") from None


def wait_until_loaded(connection: RunRedis, limit_s: float, each: Callable[[], None] = lambda: None) -> None:
    """Wait until Redis answers and has read its append-only file.

    Args:
        connection: Whose Redis.
        limit_s: Seconds to wait.
        each: Called at every look; raises to end the wait.

    Raises:
        ServiceGone: it has not within that time.
    """
    end = time.monotonic() + limit_s
    client = redis.Redis(connection_pool=connection.redis.connection_pool, retry=Retry(NoBackoff(), retries=0))
    while True:
        each()
        try:
            client.ping()
            return
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if time.monotonic() > end:
                raise ServiceGone(f"Redis was not ready within {limit_s:.0f} s ({error}); see redis.log") from None
            time.sleep(0.05)


def _source(name: str) -> str:
    return resources.files("components.experience").joinpath(f"scripts/{name}.lua").read_text()
