"""What a collective transfer costs: its time beside raw copies of the same bytes, and what generation loses to it.

Measured with a real SGLang server, through the engine that a rollout worker has; everything in turn in one process tree.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from components.broadcast.collective import Sender
from components.broadcast.session import Described
from components.experience.deliveries import Target
from components.rollout.engine import Collective, Completion, Request, UpdateMode
from components.rollout.sglang_engine import SGLangEngine
from components.warm_start.tokenizer import character_tokenizer
from components.weights.geometry import read_geometry
from components.weights.policy import new_policy, save_policy
from components.weights.proof import difference, engine_checksums
from configs.failure import Failure
from configs.run import ModelConfig, RunConfig

WORKER = "rollout-0"
MODES: tuple[UpdateMode, ...] = ("in_place", "retract", "abort")
GROUPS, GROUP, TOKENS = 4, 4, 200
"""Requests in flight during an update: groups, completions of each, and tokens of each."""
WINDOW_S, UPDATES = 6.0, 6
"""Seconds of generation without updates, and as many with so many updates: the difference is what those cost."""
LIMIT_S = 120.0

# The other end of a plain gloo pair: receives messages of the sizes given, for ever.
RECEIVER = """
import json, sys, torch, torch.distributed as dist
sizes = json.loads(sys.argv[2])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
room = [torch.empty(size, dtype=torch.uint8) for size in sizes]
while True:
    for message in room:
        dist.broadcast(message, 0)
    dist.barrier()
"""


def measure(layers: int, hidden: int, rounds: int, bucket_mib: int) -> dict[str, Any]:
    """Times (medians, seconds) and tokens of an update.

    Args:
        layers: Layers of the policy, in float32; every layer has 8 experts as wide as `hidden`.
        hidden: Its hidden size.
        rounds: Times each is measured.
        bucket_mib: Size of a message.

    Returns:
        `collective_memory_copy_s` and `collective_copy_s` (the same bytes copied in memory, and broadcast in the same
        messages through a plain gloo pair into another process), `collective_s` (into the server: received and loaded),
        `checksum_s`, `pause_s` (from before the pause until after the resume, proof included), and for every mode the tokens
        that an update loses.
    """
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "model": {"hidden_size": hidden, "num_hidden_layers": layers, "moe_intermediate_size": hidden,
                      "context_length": 512},
            "rollout": {"engine": "sglang"},
            "weights": {"transfer": "collective", "bucket_mib": bucket_mib, "transfer_timeout_s": LIMIT_S,
                        "verify_timeout_s": LIMIT_S},
        }
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        start = Path(folder) / "policy"
        versions = _versions(start, config.model)
        copies = _copies(versions[0], rounds, bucket_mib << 20)
        bench = Update(config, start, Path(folder) / "sglang.log", versions)
        updates = asyncio.run(bench.measure(rounds))
    size = sum(tensor.nbytes for tensor in versions[0].values())
    shape = {"collective_bytes": size, "collective_tensors": len(versions[0]),
             "collective_messages": -(-size // (bucket_mib << 20)), "layers": layers, "hidden": hidden,
             "experts": config.model.num_experts, "in_flight": GROUPS * GROUP}  # fmt: skip
    ratios = {"ratio_collective": updates["collective_s"] / copies["collective_copy_s"]}
    return shape | copies | updates | ratios


def _versions(folder: Path, model: ModelConfig) -> list[dict[str, torch.Tensor]]:
    """Two versions by checkpoint name, in the order in which they are sent; the first is in `folder`."""
    from safetensors.torch import load_file

    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz")
    save_policy(new_policy(model, tokenizer.get_vocab_size(), 0), tokenizer, folder)
    first = dict(sorted(load_file(folder / "model.safetensors").items()))
    return [first, {name: tensor + 1e-3 for name, tensor in first.items()}]


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _copies(tensors: dict[str, torch.Tensor], rounds: int, bucket: int) -> dict[str, float]:
    """Raw copies of the same bytes: within memory, and into another process in the same messages."""
    import torch.distributed as dist

    row = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    parts = list(row.split(bucket))
    room = torch.empty_like(row)
    memory = [_timed(lambda: room.copy_(row)) for _ in range(rounds + 1)][1:]
    with tempfile.NamedTemporaryFile() as meeting:
        where = f"file://{meeting.name}"
        sizes = json.dumps([len(part) for part in parts])
        receiver = subprocess.Popen([sys.executable, "-c", RECEIVER, where, sizes], stderr=subprocess.DEVNULL)
        try:
            dist.init_process_group("gloo", init_method=where, rank=0, world_size=2)

            def once() -> None:
                for part in parts:
                    dist.broadcast(part, 0)
                dist.barrier()

            network = [_timed(once) for _ in range(rounds + 1)][1:]
            dist.destroy_process_group()
        finally:
            receiver.kill()
            receiver.wait()
    return {"collective_memory_copy_s": statistics.median(memory), "collective_copy_s": statistics.median(network)}


class Update:
    """Updates of one server, by turns with two versions."""

    def __init__(self, config: RunConfig, start: Path, log: Path, versions: list[dict[str, torch.Tensor]]) -> None:
        self.engine = SGLangEngine(config, start, log, WORKER)
        self.versions = versions
        self.sender = Sender("bench", "gloo", "127.0.0.1", {WORKER: 1}, config.weights.bucket_mib << 20)
        geometry = read_geometry(start / "config.json", "config.json")
        self.expected = [
            engine_checksums({name: t.view(torch.uint8).numpy() for name, t in each.items()}, geometry, "cpu")
            for each in versions
        ]
        self.described: list[Described] = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in versions[0].items()
        ]
        self.number = 0
        self.tokens = 0

    async def measure(self, rounds: int) -> dict[str, Any]:
        await self.engine.open()
        try:
            await self._update("retract")  # forms the group
            quiet = [await self._update("retract") for _ in range(rounds)]
            lost: dict[UpdateMode, list[tuple[float, float]]] = {mode: [] for mode in MODES}
            for _ in range(rounds):
                for mode in MODES:
                    lost[mode].append(await self._busy_update(mode))
        finally:
            self.sender.close()
            await self.engine.close()
        median = statistics.median
        figures: dict[str, Any] = {
            name: median(times)
            for name, times in zip(("collective_s", "checksum_s", "pause_s"), zip(*quiet, strict=True), strict=True)
        }
        for mode in MODES:
            found = lost[mode]
            figures[f"pause_{mode}_s"] = median(pause for pause, _ in found)
            figures[f"tokens_lost_{mode}"] = median(tokens for _, tokens in found)
        return figures

    async def _load(self, mode: UpdateMode) -> float:
        """Send the next version; returns the seconds."""
        self.number += 1
        tensors = self.versions[self.number % 2]
        start = time.perf_counter()
        source = Collective(self.sender.session, self.described)
        load = asyncio.create_task(self.engine.load(Target(self.number, "bench"), source, mode))
        await asyncio.to_thread(self.sender.join, LIMIT_S)
        await asyncio.to_thread(self.sender.send, tensors, LIMIT_S)
        await load
        return time.perf_counter() - start

    async def _update(self, mode: UpdateMode) -> tuple[float, float, float]:
        """One whole update; seconds of the transfer, of the checksums, and of the pause."""
        start = time.perf_counter()
        await self.engine.pause(mode)
        loaded = await self._load(mode)
        checked = time.perf_counter()
        held = await self.engine.held()
        checked = time.perf_counter() - checked
        if wrong := difference(self.expected[self.number % 2], held.checksums):
            raise Failure(f"the engine {wrong}")
        await self.engine.resume()
        return loaded, checked, time.perf_counter() - start

    async def _busy_update(self, mode: UpdateMode) -> tuple[float, float]:
        """Updates with requests in flight; seconds of a pause, and tokens that were not generated for it."""
        streams = [asyncio.create_task(self._generate(group)) for group in range(GROUPS)]
        try:
            await asyncio.sleep(1.0)
            before = self.tokens
            await asyncio.sleep(WINDOW_S)
            undisturbed, before = self.tokens - before, self.tokens
            start, pauses = time.perf_counter(), []
            for number in range(UPDATES):
                await asyncio.sleep(start + number * WINDOW_S / UPDATES - time.perf_counter())
                pauses.append((await self._update(mode))[2])
            await asyncio.sleep(start + WINDOW_S - time.perf_counter())
            return statistics.median(pauses), (undisturbed - (self.tokens - before)) / UPDATES
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await self.engine.abort()

    async def _generate(self, group: int) -> None:
        """Generate for ever; completions that an update aborts are taken up again."""
        begun = [Completion.empty() for _ in range(GROUP)]
        while True:
            counted = sum(len(each.tokens) for each in begun)
            request = Request(group, list(range(3, 11)), begun, TOKENS)
            async for completions in self.engine.generate(request):
                found = sum(len(each.tokens) for each in completions)
                self.tokens += found - counted
                counted = found
            begun = [
                each.until(len(each.tokens)) if each.finish == "abort" else Completion.empty() for each in completions
            ]
