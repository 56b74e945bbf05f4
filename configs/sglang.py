"""SGLangConfig: the servers that `rollout.engine: sglang` generates with."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from configs.address import WebAddress
from configs.document import Document
from configs.hardware import HardwareProfile

RESERVED = ("--host", "--port", "--api-key", "--admin-api-key", "--config", "--model-path", "--model", "--dtype")
"""Arguments that decide who reaches a server and what it holds."""


def _check_server(url: str) -> None:
    """Refuse what is no address of a server.

    Raises:
        ValueError: it has no host, no valid port, or a path.
    """
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0) and parts.path in ("", "/")
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"urls: {url} is no address of a server; write it as http://host:port")


class SGLangConfig(Document):
    """One SGLang server a rollout worker: started by the worker, or joined where one already runs."""

    urls: tuple[WebAddress, ...] = ()
    """Servers that already run, one a worker in order; empty: every worker starts its own. Their admin key is read from
    SGLANG_ADMIN_KEY."""
    service: str = Field(default="", pattern=r"^$|^[a-z0-9.-]+:[0-9]+$")
    """Kubernetes headless service (`name:port`) whose addresses are such servers, one a worker; instead of `urls`."""
    python: str = ""
    """Python interpreter of the environment that holds SGLang; empty takes TANDEM_SGLANG_PYTHON, else .venv-sglang of the
    working directory if there is one, else the worker's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPUs that the hardware profile names, and the CPU if it names none."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one server (`--tp-size`)."""
    expert_parallel: int = Field(default=1, ge=1)
    """GPUs the experts are spread over (`--ep-size`); the stack's expert_backend carries their tokens."""
    data_parallel_attention: int = Field(default=1, ge=1)
    """Attention replicas within a server (`--dp-size` with `--enable-dp-attention`); 1 leaves it out."""
    deepep_mode: Literal["auto", "normal", "low_latency"] = "auto"
    """DeepEP's kernels (`--deepep-mode`), for expert_backend deepep."""
    deepep_v2_mode: Literal["direct", "hybrid"] = "hybrid"
    """DeepEP V2's kernels (`--deepep-v2-mode`): `direct` is for one node only."""
    memory_fraction: float = Field(default=0.85, gt=0, lt=1)
    """Share of a GPU's memory for weights and keys and values (`--mem-fraction-static`)."""
    max_total_tokens: int = Field(default=0, ge=0)
    """Tokens whose keys and values the server holds (`--max-total-tokens`); 0 takes 20,000 on a CPU and, on a GPU, what its
    memory allows."""
    requests_in_flight: int = Field(default=512, ge=1)
    """Requests a worker has open at its server, at most."""
    routed_experts: bool = False
    """Whether the server returns the experts that its router chose (`--enable-return-routed-experts`)."""
    ready_s: float = Field(default=600.0, gt=0)
    """Seconds a server may take to start."""
    request_s: float = Field(default=600.0, gt=0)
    """Seconds a running request may go without a new token before its server counts as hung."""
    max_restarts: int = Field(default=3, ge=0)
    """Times a worker takes up its server again, with growing pauses where it has to start it, before it ends itself; counted
    from the last completion that was finished."""
    extra_arguments: tuple[str, ...] = ()
    """More arguments for `python -m sglang.launch_server`."""

    @model_validator(mode="after")
    def _parts_agree(self) -> SGLangConfig:
        for url in self.urls:
            _check_server(url)
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError("urls names a server twice, but a server holds one worker's weights; name one a worker")
        given = [argument.partition("=")[0] for argument in self.extra_arguments]
        if reserved := [argument for argument in given if argument in RESERVED]:
            raise ValueError(f"extra_arguments holds {reserved[0]}, which the worker sets itself; leave it out")
        if self.urls and self.service:
            raise ValueError("urls and service are both set; give one of them")
        if self.tensor_parallel % self.data_parallel_attention:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} is not a multiple of data_parallel_attention"
                f" {self.data_parallel_attention}; choose a multiple"
            )
        return self

    def device_on(self, hardware: HardwareProfile) -> Literal["cpu", "cuda"]:
        """Where the servers compute on nodes of `hardware`."""
        if self.device == "auto":
            return "cuda" if hardware.gpus else "cpu"
        return self.device
