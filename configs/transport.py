"""TransportConfig: what must carry the traffic between nodes, and how hard preflight looks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.document import Document


class TransportConfig(Document):
    """The proof of the transport, made before the loop starts on a cluster."""

    expect: Literal["auto", "efa", "any"] = "auto"
    """What must be proven: `efa` fails the run unless traffic really went over EFA; `auto` is `efa` when training has several
    nodes and its pods ask for EFA interfaces; `any` only reports what was found."""
    exchange_mib: int = Field(default=256, ge=1)
    """Bytes that each of the two nodes sends in the proof's exchange, in MiB."""
    start_s: float = Field(default=900.0, gt=0)
    """Seconds in which the two pods of the proof must run, once a queue has admitted them."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds the exchange may take, from the start of its processes."""
