"""What DeepEP needs around it, and what is known not to work: rules as code, each with its reason.

Sources: deep_ep 2.1.0 itself (deepseek-ai/DeepEP), aws-ofi-nccl doc/gin-getting-started.md, the fork
amazon-contributing/DeepEP and AWS's published runs of it (awsome-distributed-ai, deepep-v2-benchmark).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from configs.failure import BadConfig
from configs.kernels import DeepEPConfig

GIN_TYPES = {"proxy": "2", "efa-gda": "5"}
"""NCCL_GIN_TYPE."""
LEGACY_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Groups for which V1 has settings (deep_ep/buffers/legacy.py)."""
DEVICES = Path("/sys/class/infiniband")

Api = Literal["elastic", "legacy"]


class Library(NamedTuple):
    """An installed deep_ep."""

    file: str
    """Where it lies. Three packages own this name: DeepEP, SGLang's build of it, UCCL's wrapper of V1's interface."""
    elastic: bool
    """Whether it has V2's ElasticBuffer."""
    ibgda: bool
    """Whether V1 makes InfiniBand's GPU-initiated transfers, as stock DeepEP does."""
    unordered: bool
    """Whether V2's kernels allow for data that arrives out of order: Amazon's fork."""


class Around(NamedTuple):
    """What surrounds this process."""

    variables: Mapping[str, str]
    nodes: int
    ranks: int
    efa: bool
    """Whether the node has EFA devices."""
    nccl: tuple[str, ...]
    """Files of NCCL that are mapped."""


def prepare(config: DeepEPConfig, variables: MutableMapping[str, str] = os.environ) -> None:
    """Set what NCCL and DeepEP read once; call it before the process's first NCCL communicator.

    Raises:
        BadConfig: NCCL_GIN_TYPE says otherwise already.
    """
    # By default DeepEP takes PyTorch's communicator, which does not exist before its first use: a null pointer. SGLang sets
    # 0 as well.
    variables.setdefault("EP_REUSE_NCCL_COMM", "0")
    if config.gin == "environment":
        return
    wanted = GIN_TYPES[config.gin]
    if variables.setdefault("NCCL_GIN_TYPE", wanted) != wanted:
        raise BadConfig(
            f"kernels.deep_ep.gin is {config.gin} (NCCL_GIN_TYPE={wanted}), but NCCL_GIN_TYPE is"
            f" {variables['NCCL_GIN_TYPE']}; unset one of them"
        )
    if config.gin == "efa-gda":
        # NCCL's own kernels use signals that EFA-GDA does not have.
        variables.setdefault("NCCL_SYM_GIN_KERNELS_ENABLE", "0")


def choose_api(config: DeepEPConfig, library: Library) -> Api:
    """The interface to use: as asked, else V2 where it is."""
    if config.api == "auto":
        return "elastic" if library.elastic else "legacy"
    return config.api


def objections(api: Api, library: Library, around: Around) -> Iterator[str]:
    """Why DeepEP would fail, hang or be silently wrong here; one sentence each."""
    if len(around.nccl) > 1:
        yield (
            f"two copies of NCCL are mapped ({' and '.join(around.nccl)}), which deep_ep refuses (deep_ep/__init__.py);"
            " uninstall the one that torch brought, or preload the other"
        )
    if api == "elastic" and not library.elastic:
        yield (
            f"deep_ep at {library.file} has no ElasticBuffer, so it is V1 or UCCL's wrapper; install DeepEP 2 or set"
            " kernels.deep_ep.api to legacy"
        )
        return
    yield from _of_legacy(library, around) if api == "legacy" else _of_elastic(library, around)


def _of_legacy(library: Library, around: Around) -> Iterator[str]:
    if around.ranks not in LEGACY_RANKS:
        yield (
            f"DeepEP V1 has no settings for {around.ranks} ranks (deep_ep/buffers/legacy.py); choose train.expert_parallel"
            f" among {', '.join(map(str, LEGACY_RANKS))}, or kernels.deep_ep.api elastic"
        )
    if around.nodes > 1 and around.efa and library.ibgda:
        yield (
            "DeepEP V1 sets NVSHMEM_IB_ENABLE_IBGDA=1 between nodes, which EFA does not have (deep_ep/buffers/legacy.py); set"
            " kernels.deep_ep.api to elastic"
        )


def _of_elastic(library: Library, around: Around) -> Iterator[str]:
    if around.nodes == 1:
        return
    variables = around.variables
    if variables.get("EP_DISABLE_GIN", "0") != "0":
        yield "EP_DISABLE_GIN is set, but DeepEP V2 crosses nodes by nothing else; unset it"
    if variables.get("NCCL_GIN_TYPE") != GIN_TYPES["efa-gda"]:
        return
    if not library.unordered:
        # Upstream publishes a tail and takes for granted that what was written before it has landed.
        yield (
            f"NCCL_GIN_TYPE is 5, under which data arrives out of order, but the kernels of deep_ep at {library.file} rely on"
            " order and would be silently wrong; install the fork amazon-contributing/DeepEP, or set kernels.deep_ep.gin to"
            " proxy"
        )
    if variables.get("EP_HYBRID_KERNEL", "unordered") != "unordered":
        yield (
            f"EP_HYBRID_KERNEL is {variables['EP_HYBRID_KERNEL']}, but with NCCL_GIN_TYPE=5 data arrives out of order and"
            " results would be silently wrong; unset it"
        )
    if variables.get("NCCL_SYM_GIN_KERNELS_ENABLE") != "0":
        yield (
            "NCCL_GIN_TYPE is 5, but NCCL_SYM_GIN_KERNELS_ENABLE is not 0, so NCCL's own kernels would use signals that EFA"
            " does not have; set it to 0"
        )


def can_size_itself(variables: Mapping[str, str] = os.environ, devices: Path = DEVICES) -> bool:
    """Whether DeepEP can read the network's speed.

    It asks `ibstat` about EP_NIC_NAME (mlx5_0) and takes 0 for an interface that is not there, as on EFA; then
    `get_theoretical_num_sms` divides by it as soon as there are two nodes (deep_ep/utils/envs.py, buffers/elastic.py).
    """
    return (devices / variables.get("EP_NIC_NAME", "mlx5_0")).exists()


def load(config: DeepEPConfig, nodes: int, ranks: int) -> ModuleType:
    """Import deep_ep for a group, after all that is known to go wrong was looked at.

    Raises:
        BadConfig: it is not installed, refuses to start, or cannot work here.
    """
    prepare(config)
    around = Around(os.environ, nodes, ranks, _has_efa(), mapped_nccl())
    spec = importlib.util.find_spec("deep_ep")
    if spec is None or spec.origin is None:
        raise BadConfig("kernels.dispatch is deep_ep, but package deep_ep is not installed; use an image that has it")
    found = describe(Path(spec.origin).parent)
    for objection in objections(choose_api(config, found), found, around):
        raise BadConfig(objection)
    try:
        library = importlib.import_module("deep_ep")
    except (ImportError, AssertionError, OSError) as error:
        words = " ".join(str(error).split())
        raise BadConfig(f"deep_ep at {spec.origin} does not start ({words}); see docs/transport.md") from None
    if found.elastic and not hasattr(library, "ElasticBuffer"):
        raise BadConfig(
            f"deep_ep at {library.__file__} has no ElasticBuffer although its files tell so; install it anew"
        )
    return library


def describe(folder: Path) -> Library:
    """What the package in a folder is, from its files: to import it has effects that cannot be undone."""
    legacy = folder / "buffers" / "legacy.py"
    older = folder / "buffer.py"
    text = next((file.read_text() for file in (legacy, older) if file.exists()), "")
    unordered = any(b"EP_HYBRID_KERNEL" in file.read_bytes() for file in folder.glob("_C*.so"))
    return Library(
        file=str(folder),
        elastic=(folder / "buffers" / "elastic.py").exists(),
        ibgda="NVSHMEM_IB_ENABLE_IBGDA" in text,
        unordered=unordered,
    )


def mapped_nccl(file: Path = Path("/proc/self/maps")) -> tuple[str, ...]:
    """Files of NCCL itself, plugins apart, that a process has mapped."""
    text = file.read_text() if file.exists() else ""
    return tuple(sorted({found[0] for line in text.splitlines() if (found := re.search(r"/\S*/libnccl\.so\S*", line))}))


def _has_efa(devices: Path = DEVICES) -> bool:
    drivers = (device / "device" / "driver" for device in (devices.iterdir() if devices.is_dir() else ()))
    return any(driver.is_symlink() and driver.readlink().name == "efa" for driver in drivers)
