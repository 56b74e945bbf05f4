"""A bare SGLang server, driven over HTTP without the engine: what the two ends of a transfer agree on is SGLang's own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from components.broadcast.session import Described, Session, buckets
from components.experience.redis_server import free_port
from components.rollout.sglang_server import find_python
from configs.sglang import SGLangConfig

SHIM = Path(__file__).parents[2] / "images" / "sglang_shim"
START_S = 500.0


class RawServer:
    """One server on the CPU that has `folder` loaded."""

    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
        self.log = log
        environment = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(SHIM),
        }
        command = [find_python(SGLangConfig()), "-m", "sglang.launch_server", "--model-path", str(folder)]
        options = "--device cpu --host 127.0.0.1 --dtype float32 --max-total-tokens 4000 --skip-server-warmup"
        self.process = subprocess.Popen(
            [*command, *options.split(), "--port", str(port), *arguments],
            env=os.environ | environment, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def wait(self) -> RawServer:
        """Wait until it serves."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(httpx.TransportError):
                if self.http.get("/model_info").status_code == 200:
                    return self
            time.sleep(0.5)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def post(self, path: str, limit_s: float = 60.0, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body, timeout=limit_s)

    def checksums(self) -> dict[str, str]:
        (rank,) = self.post("/weights_checker", action="checksum").json()["ranks"]
        return rank["checksums"]

    def join(self, session: Session, worker: str, limit_s: float = 60.0) -> httpx.Response:
        place = session.place(worker)
        return self.post(
            "/init_weights_update_group", limit_s, master_address=session.address, master_port=session.port,
            rank_offset=place.rank, world_size=place.world, group_name=place.group, backend=session.backend,
        )  # fmt: skip

    def take(
        self, session: Session, worker: str, message: list[Described], label: str = "", limit_s: float = 60.0
    ) -> httpx.Response:
        """Receive one message; `label` marks the last one."""
        names, dtypes, shapes = (list(part) for part in zip(*message, strict=True))
        body = {"weight_version": label} if label else {}
        return self.post(
            "/update_weights_from_distributed", limit_s, names=names, dtypes=dtypes, shapes=shapes,
            group_name=session.place(worker).group, flush_cache=bool(label), load_format="flattened_bucket", **body,
        )  # fmt: skip

    def receive(self, session: Session, worker: str, tensors: list[Described], label: str) -> list[int]:
        """Join and take a whole version; the status of every answer."""
        answers = [self.join(session, worker), self.post("/begin_weight_update")]
        messages = buckets(tensors, session.bucket_bytes)
        for number, message in enumerate(messages, 1):
            answers.append(self.take(session, worker, message, label if number == len(messages) else ""))
        answers.append(self.post("/end_weight_update"))
        return [answer.status_code for answer in answers]

    def signal(self, number: signal.Signals) -> None:
        """Signal every process of the server."""
        for process in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
            process.send_signal(number)

    def stop(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
