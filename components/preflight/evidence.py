"""Evidence of how traffic between two pods went: what was wanted, what NCCL said, what the counters and the hosts show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from components.preflight.fabric_checks import MIB, Host
from components.preflight.nccl_log import Findings
from components.preflight.nic import MARGIN, Counters

MARK = "transport-report "
"""What comes before the report in rank 0's output."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be proven."""

    efa: bool
    """Whether traffic must go over EFA."""
    gin: Literal["none", "proxy", "efa-gda"] = "none"
    """How transfers are to be started for DeepEP; `none` also where DeepEP is not used."""
    deep_ep_gin: Literal["environment", "proxy", "efa-gda"] = "environment"
    """`kernels.deep_ep.gin`, which the exchange applies to its environment as training does."""
    deep_ep_build: str = "none"
    interfaces: int = 0
    """EFA interfaces each pod asked for."""
    gpus: int = 0
    """GPUs a pod."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One pod's part in the exchange."""

    pod: str
    node: str
    """The machine; pods of one machine share it."""
    sent: int
    """Bytes it sent to the other pod."""
    moved: Counters
    """Growth of its counters meanwhile."""
    host: Host


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known after the exchange."""

    wanted: Wanted
    findings: Findings
    nodes: tuple[Node, ...]
    unheard: tuple[int, ...] = ()
    """Ranks whose own log does not tell what they use."""
    without_channel: tuple[int, ...] = ()
    """Ranks whose own log names no channel between nodes."""

    @property
    def over_efa(self) -> bool:
        """Whether NCCL says that it used libfabric's EFA, and nothing else."""
        return self.findings.networks == ("Libfabric",) and self.findings.providers == ("efa",)


class Problem(msgspec.Struct, frozen=True):
    """A fallback that took place."""

    key: str
    sentence: str
    fails: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an exchange proved, as its pods write it and preflight reads it."""

    carried_by: str
    """`efa`, `tcp (eth0)` with the interface, or `unknown`."""
    evidence: Evidence
    problems: tuple[Problem, ...]
    """Those that fail the run first."""
    seconds: float = 0.0
    """Time of the exchange itself; 0 if it did not end."""
    gib_s: float = 0.0
    """Bytes a pod sent in a second, in GiB."""

    @property
    def proven(self) -> bool:
        """Whether what was wanted is shown."""
        return not any(problem.fails for problem in self.problems)


def when(holds: bool, detail: object = "") -> str | None:
    """The detail where the sign holds, else None."""
    return str(detail) if holds else None


def listed(ranks: tuple[int, ...]) -> str:
    """Ranks in words."""
    return ", ".join(str(rank) for rank in ranks)


def asked(evidence: Evidence) -> bool:
    """Whether EFA has to be there, by demand or by request."""
    return evidence.wanted.efa or evidence.wanted.interfaces > 0


def on(evidence: Evidence, holds: Callable[[Host], bool]) -> str | None:
    """Names of the pods whose host has a property."""
    return ", ".join(node.pod for node in evidence.nodes if holds(node.host)) or None


def too_few(evidence: Evidence) -> str | None:
    """The pod whose EFA devices did not carry what it sent, in words; of devices that tell nothing this is not known."""
    for node in evidence.nodes:
        if node.sent and node.moved.readable and node.moved.rdma_bytes < node.sent * (1 - MARGIN):
            return (
                f"{node.moved.rdma_bytes / MIB:.1f} MiB of the {node.sent / MIB:.1f} MiB that pod {node.pod} sent passed its"
                f" {len(node.moved.rdma)} EFA devices"
            )
    return None


def unreadable(evidence: Evidence) -> str | None:
    """Names of the pods whose EFA devices tell no bytes, if their log says that they used them."""
    names = [node.pod for node in evidence.nodes if not node.moved.readable]
    return ", ".join(names) or None if evidence.over_efa else None


def tells(findings: Findings) -> bool:
    """Whether one rank's log names what it uses: a network, and libfabric's provider where it is that."""
    return bool(findings.networks) and ("Libfabric" not in findings.networks or bool(findings.providers))


def carriers(evidence: Evidence) -> str | None:
    """Pods whose bytes went over a plain interface, with its name."""
    found = [
        f"{node.pod} ({name})"
        for node in evidence.nodes
        # Bytes that the EFA devices account for did not go elsewhere.
        if node.moved.rdma_bytes < node.sent * (1 - MARGIN) and (name := node.moved.carrier(node.sent))
    ]
    return ", ".join(found) or None


def differences(evidence: Evidence) -> str | None:
    """The first thing in which ranks differ."""
    found = evidence.findings
    for values in (found.networks, found.providers, found.protocols, found.gdrdma, found.nics):
        if len(values) > 1:
            return " and ".join(str(value) for value in values)
    return None


def variable(evidence: Evidence, name: str, harmless: tuple[str, ...] = ()) -> str | None:
    """Values other than the harmless ones that pods have in a variable."""
    values = {node.host.environment.get(name, "") for node in evidence.nodes} - {"", *harmless}
    return ", ".join(sorted(values)) or None


def gin_types(evidence: Evidence) -> set[int]:
    """Types of GIN that the environment or NCCL's log names."""
    told = {node.host.environment.get("NCCL_GIN_TYPE", "") for node in evidence.nodes} - {""}
    return {int(value) for value in told if value.isdigit()} | set(evidence.findings.gin_types)
