"""Generates groups: holds a proven version of the policy, leases tickets, samples, hands in."""

from __future__ import annotations

import asyncio

from components.role import Role, run_role
from components.rollout.engine import Engine
from components.rollout.worker import Worker
from components.weights.geometry import read_geometry


def open_engine(role: Role) -> tuple[Engine, int]:
    """The engine that the configuration names, and its ranks in collective transfers."""
    config, start = role.config, role.start
    if config.rollout.engine == "sglang":
        from components.rollout.sglang_engine import SGLangEngine

        role.layout.logs.mkdir(parents=True, exist_ok=True)
        engine = SGLangEngine(config, start, role.layout.logs / f"{role.worker}-sglang.log", role.worker)
        for note in engine.notes:
            role.emit("note", sentence=note)
        return engine, engine.ranks if config.collective else 0
    import os

    import torch

    from components.rollout.in_process import InProcessEngine
    from components.rollout.torch_policy import TorchPolicy

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    file = start / "config.json"
    return InProcessEngine(TorchPolicy.empty(read_geometry(file, str(file)))), 0


def rollout(role: Role) -> None:
    """Generate groups until told to leave."""
    engine, ranks = open_engine(role)
    asyncio.run(Worker(role, engine, ranks).run())


if __name__ == "__main__":
    run_role("rollout", rollout)
