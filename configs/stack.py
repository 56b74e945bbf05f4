"""Stack: a tested set of versions and the images that hold it, with the known clashes between them as sentences."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from packaging.version import Version
from pydantic import Field

from configs.document import Document, read_yaml, validated
from configs.failure import BadConfig
from configs.hardware import HardwareProfile

STACKS = Path(__file__).parent / "stacks"

# The one torch each SGLang release pins, from the metadata of its wheels.
TORCH_OF_SGLANG = {
    "0.5.9": "2.9.1",
    "0.5.17": "2.11.0",
    "0.5.18": "2.13.0",
    "0.5.19": "2.13.0",
    "0.5.20": "2.13.0",
    "0.5.21": "2.13.0",
    "0.5.22": "2.14.1",
    "0.5.23": "2.14.1",
}
# What each EFA installer is known to bring, from AWS's EFA changelog; a field it says nothing of is left out.
EFA_INSTALLERS = {
    "1.49.0": {"libfabric": "2.4.0amzn5.0"},
    "1.50.0": {
        "libfabric": "2.6.0amzn1.0",
        "efa_driver": "3.3.0",
        "rdma_core": "64",
        "aws_ofi_nccl": "1.21.1",
    },
    "1.51.0": {"libfabric": "2.7", "efa_driver": "3.3.1", "aws_ofi_nccl": "1.22.0"},
}
ADMITTED = r"^$|^[0-9][0-9A-Za-z.+-]*$"


def _version(what: str) -> str:
    return Field(default="", pattern=ADMITTED, description=f"Version of {what}; empty when the stack has none.")


class Images(Document):
    """Container images, by tag or digest."""

    control: str = Field(min_length=1)
    """Steps and roles without torch: preflight, stage_data, adopt_checkpoint, rl_loop, release; reward, broadcast, Redis."""
    train: str = Field(min_length=1)
    """Steps and roles with torch: warm_start, publish_checkpoint, evaluate; train."""
    rollout: str = Field(min_length=1)
    """Generation engines."""


class Stack(Document):
    """Versions that were tested together."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the stack: that of its file in configs/stacks."""
    description: str
    python: str = _version("Python")
    cuda: str = _version("the CUDA toolkit")
    torch: str = _version("PyTorch")
    transformers: str = _version("transformers")
    sglang: str = _version("SGLang")
    slime: str = _version("Slime, the training framework")
    deep_ep: str = _version("DeepEP, the expert-parallel transport")
    nccl: str = _version("NCCL that is loaded, which need not be the one torch brings")
    gdrcopy: str = _version("GDRCopy")
    efa_installer: str = _version("the EFA installer")
    efa_driver: str = _version("the EFA kernel module on the nodes")
    libfabric: str = _version("libfabric")
    aws_ofi_nccl: str = _version("the aws-ofi-nccl plugin")
    rdma_core: str = _version("rdma-core")
    sglang_build: Literal["stock", "slime"] = "stock"
    """Whether SGLang is the released wheel or carries Slime's patch (image slimerl/sglang)."""
    deep_ep_build: Literal["none", "sgl-deep-ep", "upstream", "amazon"] = "none"
    """Where `deep_ep` comes from: SGLang's wheel, deepseek-ai/DeepEP, or the fork amazon-contributing/DeepEP."""
    deep_ep_commit: str = Field(default="", pattern=r"^$|^[0-9a-f]{40}$")
    """Commit that `deep_ep` is built from; empty for a released wheel."""
    expert_backend: Literal["none", "deepep", "deepep_v2"] = "none"
    """SGLang's `--moe-a2a-backend`; `deepep_v2` is DeepEP's ElasticBuffer."""
    gin: Literal["none", "proxy", "efa-gda"] = "none"
    """Who starts a transfer for DeepEP V2: nobody, a CPU proxy (NCCL_GIN_TYPE 2), the GPU over EFA (type 5)."""
    images: Images

    @property
    def digest(self) -> str:
        """SHA-256 of the stack's content, independent of the layout of its file."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def incompatibilities(stack: Stack, hardware: HardwareProfile | None = None) -> list[str]:
    """Known reasons why the versions of `stack` do not work together, or not on `hardware`.

    Returns:
        One sentence a reason, each with its source; empty for a coherent stack.
    """
    found = [*_of_sglang(stack), *_of_deep_ep(stack), *_of_gin(stack), *_of_efa(stack)]
    return found + (list(_of_hardware(stack, hardware)) if hardware else [])


def _of_sglang(stack: Stack) -> Iterator[str]:
    pinned = TORCH_OF_SGLANG.get(stack.sglang)
    if pinned and stack.torch != pinned:
        yield (
            f"sglang {stack.sglang} pins torch {pinned}, but the stack has torch {stack.torch or 'none'}"
            f" (metadata of the sglang wheel); take torch {pinned} or another sglang"
        )
    if stack.expert_backend == "deepep_v2" and below(stack.sglang, "0.5.19"):
        yield (
            f"sglang {stack.sglang or '(none)'} has no deepep_v2 backend, which first ships in 0.5.19 (its server"
            " arguments); take sglang 0.5.19 or later"
        )
    if stack.slime and stack.sglang_build != "slime":
        yield (
            f"slime {stack.slime} runs on a patched sglang (docker/Dockerfile and docker/patch of its tag), but"
            " sglang_build is stock; set sglang_build to slime"
        )
    if stack.sglang and not below(stack.sglang, "0.5.18") and stack.deep_ep_build == "none":
        yield (
            f"sglang {stack.sglang} depends on sgl-deep-ep (metadata of the wheel), but deep_ep_build is none; name the"
            " deep_ep that is installed"
        )


def _of_deep_ep(stack: Stack) -> Iterator[str]:
    if stack.expert_backend != "none" and not stack.deep_ep:
        yield f"expert_backend {stack.expert_backend} needs deep_ep, but the stack has none; give its version"
        return
    if stack.expert_backend == "deepep_v2" and below(stack.deep_ep, "2"):
        yield (
            f"deep_ep {stack.deep_ep} has no ElasticBuffer, which deepep_v2 calls (deep_ep/buffers/elastic.py since"
            " 2.0); take deep_ep 2 or later"
        )
    if stack.deep_ep and not below(stack.deep_ep, "2"):
        if below(stack.torch, "2.10"):
            yield (
                f"deep_ep {stack.deep_ep} needs torch 2.10 or later, but the stack has {stack.torch or 'none'}"
                " (its README); take a newer torch"
            )
        if below(stack.nccl, "2.30.4"):
            yield (
                f"deep_ep {stack.deep_ep} needs NCCL 2.30.4 or later, but the stack loads {stack.nccl or 'none'}"
                " (its README); build a newer NCCL and uninstall the one torch brings"
            )
    if stack.expert_backend == "deepep" and stack.efa_installer:
        yield (
            "expert_backend deepep uses DeepEP's V1 Buffer, which sets NVSHMEM_IB_ENABLE_IBGDA=1 and cannot run on EFA"
            " (deep_ep/buffers/legacy.py); use deepep_v2"
        )


def _of_gin(stack: Stack) -> Iterator[str]:
    if stack.gin == "none":
        if stack.expert_backend == "deepep_v2" and stack.efa_installer:
            yield (
                "expert_backend deepep_v2 crosses nodes through NCCL GIN, but gin is none (DeepEP asserts 'NCCL GIN is"
                " unavailable'); set gin to proxy or efa-gda"
            )
        return
    if below(stack.nccl, "2.31.2-1"):
        yield (
            f"GIN on EFA needs NCCL 2.31.2-1 or later, but the stack loads {stack.nccl or 'none'} (aws-ofi-nccl"
            " doc/gin-getting-started.md); build that NCCL"
        )
    if below(stack.aws_ofi_nccl, "1.21"):
        yield (
            f"GIN needs aws-ofi-nccl 1.21 or later, but the stack has {stack.aws_ofi_nccl or 'none'} (its tags);"
            " take a newer plugin"
        )
    if stack.gin != "efa-gda":
        return
    if below(stack.efa_installer, "1.50"):
        yield (
            f"gin efa-gda (type 5) needs EFA installer 1.50 or later, but the stack has {stack.efa_installer or 'none'}"
            " (awsome-distributed-ai, deepep-v2-benchmark); take a newer one or set gin to proxy"
        )
    if stack.deep_ep_build != "amazon":
        yield (
            f"gin efa-gda delivers out of order and without strong signals, which the kernels of {stack.deep_ep_build}"
            " deep_ep assume (aws-ofi-nccl doc/gin-getting-started.md); use deep_ep_build amazon or gin proxy"
        )
    for what, have, floor in (("EFA driver", stack.efa_driver, "3.3.0"), ("GDRCopy", stack.gdrcopy, "2.5")):
        if below(have, floor):
            yield (
                f"gin efa-gda needs {what} {floor} or later, but the stack has {have or 'none'} (aws-ofi-nccl"
                " doc/gin-getting-started.md); take a newer one"
            )


def _of_efa(stack: Stack) -> Iterator[str]:
    brings = EFA_INSTALLERS.get(stack.efa_installer, {})
    for field, expected in brings.items():
        have = getattr(stack, field)
        if have and not have.startswith(expected):
            yield (
                f"EFA installer {stack.efa_installer} brings {field} {expected}, but the stack names {have} (AWS's EFA"
                f" changelog); name {expected} or another installer"
            )


def _of_hardware(stack: Stack, hardware: HardwareProfile) -> Iterator[str]:
    if stack.efa_installer and not hardware.efa_interfaces:
        yield (
            f"stack {stack.name} is built for EFA, but hardware {hardware.name} has no EFA interface;"
            " choose another stack or other hardware"
        )
    if stack.gin == "efa-gda" and hardware.efa_interfaces and not hardware.efa_gda:
        yield (
            f"gin efa-gda does not work on {hardware.instance_type} (aws-ofi-nccl doc/gin-getting-started.md); set"
            " gin to proxy or choose p5en or p6-b200"
        )
    if stack.cuda and not hardware.gpus:
        yield f"stack {stack.name} needs CUDA, but hardware {hardware.name} has no GPU; choose stack cpu"
    if hardware.gpu == "B200" and stack.cuda and below(stack.cuda, "12.8"):
        yield f"B200 needs CUDA 12.8 or later, but the stack has {stack.cuda} (CUDA release notes); take a newer CUDA"


def below(version: str, floor: str) -> bool:
    """Whether `version` is absent or older than `floor`; a vendor suffix such as amzn1.0 is not looked at."""
    release = re.match(r"[0-9.]+(-[0-9]+)?", version)
    return release is None or Version(release.group().rstrip(".")) < Version(floor)


def known_stacks() -> list[str]:
    """Names of the stacks in configs/stacks."""
    return sorted(path.stem for path in STACKS.glob("*.yaml"))


def load_stack(name: str) -> Stack:
    """Read configs/stacks/<name>.yaml.

    Raises:
        BadConfig: there is no such stack, or its file is not valid.
    """
    if name not in known_stacks():
        raise BadConfig(f"stack '{name}' is unknown; choose one of {', '.join(known_stacks())}")
    return validated(Stack, read_yaml(STACKS / f"{name}.yaml"), f"configs/stacks/{name}.yaml")
