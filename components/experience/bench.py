"""`tandem bench queue`: groups through the experience streams beside redis-benchmark's XADD on the same server."""

from __future__ import annotations

import csv
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from components.experience.deliveries import Target
from components.experience.experience import Experience
from components.experience.group import Group, Sample, encode_group
from components.experience.redis_server import RedisServer
from configs.failure import BadConfig
from configs.run import RunConfig

BATCH = 256
"""Groups a call of a worker hands in."""
GROUP_SIZE = 8
TOKENS = 16
ROUNDS = 3


def measure(groups: int) -> dict[str, Any]:
    """Groups a second, each with its accounting, beside bare XADD of the same payload, in turn on one server.

    Args:
        groups: Groups a round.

    Raises:
        BadConfig: there is no redis-benchmark.
    """
    binary = shutil.which("redis-benchmark")
    if binary is None:
        raise BadConfig("bench queue needs redis-benchmark; install it (Debian: apt-get install redis-tools)")
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        try:
            payload = encode_group(_group(1))
            rounds = [_round(server, binary, payload, groups, number) for number in range(ROUNDS)]
        finally:
            server.stop()
    best = {key: max(one[key] for one in rounds) for key in rounds[0]}
    return {
        "groups": groups,
        "batch": BATCH,
        "payload_bytes": len(payload),
        **best,
        "ratio": best["hand_in_groups_per_s"] / best["xadd_per_s"],
        "ratio_lifecycle": best["lifecycle_groups_per_s"] / best["xadd_per_s"],
    }


def _round(server: RedisServer, binary: str, payload: bytes, groups: int, number: int) -> dict[str, float]:
    config = RunConfig.model_validate(
        {
            "name": f"bench-{number}",
            "train": {"batch_groups": BATCH, "steps": groups // BATCH + 1},
            "loop": {"max_staleness": 10**6},
        }
    )
    experience = Experience(server.url, config)
    experience.open()
    held = Target(0, "bench")
    experience.verify("bench", held)
    calls = groups // BATCH
    tickets = [experience.lease("bench", held, BATCH) for _ in range(calls)]
    made = [[(ticket, _group(ticket.group)) for ticket in part] for part in tickets]
    start = time.perf_counter()
    for part in made:
        experience.hand_in(part)
    handed_in = time.perf_counter() - start
    start = time.perf_counter()
    for step in range(1, calls + 1):
        delivered = experience.deliver("bench", BATCH)
        for item in delivered:
            for sample in item.group.samples:
                sample.reward = 1.0
        experience.score(delivered)
        experience.take(step)
        experience.commit(step)
    rest = time.perf_counter() - start
    xadd = _xadd(binary, server, payload, calls * BATCH)
    experience.redis.flushall()
    return {
        "hand_in_groups_per_s": calls * BATCH / handed_in,
        "lifecycle_groups_per_s": calls * BATCH / (handed_in + rest),
        "xadd_per_s": xadd,
    }


def _xadd(binary: str, server: RedisServer, payload: bytes, count: int) -> float:
    """redis-benchmark's requests a second for XADD of the payload: 50 clients, no pipelining, its defaults."""
    done = subprocess.run(
        [binary, "-p", str(server.port), "-n", str(count), "--csv", "XADD", "bench:xadd", "*", "g", "1", "p", "x" * len(payload)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    *_, row = csv.reader(done.stdout.splitlines())
    return float(row[1])


def _group(number: int) -> Group:
    tokens, logprobs = np.arange(TOKENS), np.zeros(TOKENS)
    samples = [Sample.of(tokens, logprobs, 0, "stop") for _ in range(GROUP_SIZE)]
    return Group(number, f"row-{number}", np.arange(8, dtype="<i4").tobytes(), "answer", samples)
