"""A worker that starts a server and is killed: `python -m tests.sglang.orphan <policy folder> <log>` prints the server's pid."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from components.rollout.sglang_engine import SGLangEngine
from components.rollout.sglang_server import SGLangServer
from configs.run import RunConfig


async def main() -> None:
    engine = SGLangEngine(RunConfig(), Path(sys.argv[1]), Path(sys.argv[2]), "rollout-0")
    await engine.open()
    assert isinstance(engine._server, SGLangServer)
    print(engine._server.pid, flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
