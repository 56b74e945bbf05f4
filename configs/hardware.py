"""HardwareProfile: one node type, its GPUs, its network, and what Kubernetes lets a pod have of it.

Figures of the EC2 types are Karpenter's generated instance-type tables; a laptop's are what the tests need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from configs.document import Document, read_yaml, validated
from configs.failure import BadConfig

HARDWARE = Path(__file__).parent / "hardware"

# EFA interfaces a type has, from the EC2 documentation "EFA accelerated instance types".
EFA_INTERFACES = {
    "p4d.24xlarge": 4,
    "p5.48xlarge": 32,
    "p5e.48xlarge": 32,
    "p5en.48xlarge": 16,
    "p6-b200.48xlarge": 8,
    "p6-b300.48xlarge": 16,
}
# Types whose GPUs may start EFA transfers themselves (EFA-GDA), from aws-ofi-nccl doc/gin-getting-started.md.
GPU_INITIATED_EFA = ("p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge")


class HardwareProfile(Document):
    """One node type."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the profile: that of its file in configs/hardware."""
    description: str
    instance_type: str = ""
    """EC2 instance type; empty for a machine that is not one."""
    gpu: str = ""
    """GPU model; empty without GPUs."""
    gpus: int = Field(default=0, ge=0)
    """GPUs a node."""
    gpu_memory_mib: int = Field(default=0, ge=0)
    """Memory of one GPU in MiB."""
    efa_interfaces: int = Field(default=0, ge=0)
    """Interfaces a pod may request as `vpc.amazonaws.com/efa`."""
    efa_gda: bool = False
    """Whether the GPUs may start EFA transfers themselves (NCCL GIN type 5)."""
    network_gbit_s: float = Field(default=0, ge=0)
    """Sum over the node's interfaces, in Gbit/s."""
    vcpu: int = Field(ge=1)
    memory_gib: float = Field(gt=0)
    """Memory of the node in GiB."""
    allocatable_cpu_millicores: int = Field(ge=1)
    """CPU that pods of one node may request together, in thousandths of a core."""
    allocatable_memory_mib: int = Field(ge=1)
    """Memory that pods of one node may request together, in MiB."""
    hugepages_mib: int = Field(default=0, ge=0)
    """Memory the node sets aside as 2 MiB pages (`hugepages-2Mi`), in MiB."""
    shared_memory_gib: float = Field(default=0, ge=0)
    """Size of the memory volume at /dev/shm that a training or rollout pod gets, in GiB; 0 keeps the default."""
    capacity_types: tuple[Literal["on-demand", "spot", "reserved"], ...] = ()
    """Ways this type is bought, as in the label `karpenter.sh/capacity-type`; empty for an owned machine."""

    @model_validator(mode="after")
    def _figures_agree(self) -> HardwareProfile:
        for mistake in (*self._node_mistakes(), *self._efa_mistakes()):
            raise ValueError(mistake)
        return self

    def _node_mistakes(self) -> list[str]:
        mistakes = []
        if self.allocatable_cpu_millicores > self.vcpu * 1000:
            mistakes.append(
                f"allocatable_cpu_millicores {self.allocatable_cpu_millicores} exceeds the node's {self.vcpu} vCPU;"
                " the kubelet keeps some for itself, so give less"
            )
        if self.allocatable_memory_mib > self.memory_gib * 1024:
            mistakes.append(
                f"allocatable_memory_mib {self.allocatable_memory_mib} exceeds the node's {self.memory_gib} GiB;"
                " the kubelet keeps some for itself, so give less"
            )
        if self.hugepages_mib % 2:
            mistakes.append(f"hugepages_mib {self.hugepages_mib} is odd, but a page has 2 MiB; give an even number")
        if bool(self.gpus) != bool(self.gpu_memory_mib) or bool(self.gpus) != bool(self.gpu):
            mistakes.append("gpu, gpus and gpu_memory_mib belong together; give all three or none")
        return mistakes

    def _efa_mistakes(self) -> list[str]:
        mistakes = []
        known = EFA_INTERFACES.get(self.instance_type)
        if known is not None and self.efa_interfaces != known:
            mistakes.append(
                f"efa_interfaces is {self.efa_interfaces}, but {self.instance_type} has {known}; set {known}"
            )
        if self.efa_interfaces and not self.instance_type:
            mistakes.append("efa_interfaces is set, but only EC2 instances have EFA; set instance_type or drop it")
        if self.efa_interfaces and self.gpus and self.efa_interfaces % self.gpus:
            mistakes.append(
                f"efa_interfaces {self.efa_interfaces} cannot be shared evenly by {self.gpus} GPUs;"
                " every GPU needs its own rails"
            )
        if self.efa_gda and self.instance_type not in GPU_INITIATED_EFA:
            mistakes.append(
                f"efa_gda is set, but {self.instance_type or 'this machine'} has no GPU-initiated EFA"
                f" (only {', '.join(GPU_INITIATED_EFA)}); drop it"
            )
        return mistakes


class PodRequest(Document):
    """What one pod of a role asks of its node."""

    gpus: int = Field(default=0, ge=0)
    efa_interfaces: int = Field(default=0, ge=0)
    cpu_millicores: int = Field(default=0, ge=0)
    memory_mib: int = Field(default=0, ge=0)
    hugepages_mib: int = Field(default=0, ge=0)
    one_zone: bool = False
    """Whether all pods of the gang are held in one availability zone."""


def objections(profile: HardwareProfile, request: PodRequest) -> list[str]:
    """Why a pod with `request` would stay pending, or run without EFA, on a node of `profile`.

    Returns:
        One sentence an objection; empty when the request fits. Sources: the Kubernetes documentation on huge pages,
        the EC2 documentation on EFA, and Karpenter's allocatable figures.
    """
    found = []
    limits = (
        ("GPUs", request.gpus, profile.gpus),
        ("EFA interfaces", request.efa_interfaces, profile.efa_interfaces),
        ("millicores of CPU", request.cpu_millicores, profile.allocatable_cpu_millicores),
        ("MiB of memory", request.memory_mib, profile.allocatable_memory_mib),
        ("MiB of 2 MiB pages", request.hugepages_mib, profile.hugepages_mib),
    )
    for what, asked, had in limits:
        if asked > had:
            found.append(
                f"{asked} {what} asked, but {profile.name} gives {had} a node, so the pod would stay pending; ask less"
            )
    if request.hugepages_mib and not (request.cpu_millicores or request.memory_mib):
        found.append("hugepages are asked without CPU or memory, which Kubernetes refuses; ask for one of them as well")
    if request.efa_interfaces and not request.hugepages_mib:
        found.append("EFA is asked without hugepages, which libfabric's EFA provider maps; ask for 5120 MiB")
    if request.efa_interfaces and not request.one_zone:
        found.append(
            "EFA does not cross availability zones; hold the gang in one with a pod affinity or placement group"
        )
    if (
        request.gpus
        and profile.efa_interfaces
        and request.efa_interfaces
        not in (
            0,
            request.gpus * profile.efa_interfaces // profile.gpus,
        )
    ):
        found.append(
            f"{request.gpus} GPUs own {request.gpus * profile.efa_interfaces // profile.gpus} EFA interfaces on"
            f" {profile.name}, but {request.efa_interfaces} are asked; ask for the GPUs' own"
        )
    return found


def load_hardware(name: str) -> HardwareProfile:
    """Read configs/hardware/<name>.yaml.

    Raises:
        BadConfig: there is no such profile, or its file is not valid.
    """
    known = sorted(path.stem for path in HARDWARE.glob("*.yaml"))
    if name not in known:
        raise BadConfig(f"hardware '{name}' is unknown; choose one of {', '.join(known)}")
    return validated(HardwareProfile, read_yaml(HARDWARE / f"{name}.yaml"), f"configs/hardware/{name}.yaml")
