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
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from configs.failure import BadConfig
from configs.kernels import DeepEPConfig, KernelsConfig

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


def make_ready(kernels: KernelsConfig) -> None:
    """What a rank that may use DeepEP must do before its process's first NCCL communicator.

    The environment is set, which NCCL reads once, and deep_ep imported where there is a GPU: later its own check of mapped
    files would take NCCL's network plugin (libnccl-net-ofi.so) for a second NCCL. What stands in the way is told when
    DeepEP is opened, or is the reason why `auto` leaves it out.

    Raises:
        BadConfig: `kernels.dispatch` is deep_ep, and NCCL_GIN_TYPE is not what `kernels.deep_ep.gin` says, or deep_ep does
            not start.
    """
    if kernels.dispatch not in ("auto", "deep_ep"):
        return
    # Images without torch look at the rules of this module, too.
    import torch

    try:
        prepare(kernels.deep_ep)
        if torch.cuda.is_available() and importlib.util.find_spec("deep_ep") is not None and len(mapped_nccl()) < 2:
            _import()
    except BadConfig:
        if kernels.dispatch == "deep_ep":
            raise


def prepare(config: DeepEPConfig, variables: MutableMapping[str, str] = os.environ) -> None:
    """Set what NCCL and DeepEP read once; call it, or `make_ready`, before the process's first NCCL communicator.

    Raises:
        BadConfig: NCCL_GIN_TYPE says otherwise already.
    """
    # By default DeepEP takes PyTorch's communicator, which does not exist before its first use: a null pointer. SGLang sets
    # 0 as well.
    variables.setdefault("EP_REUSE_NCCL_COMM", "0")
    if config.gin == "environment":
        return
    wanted = GIN_TYPES[config.gin]
    # NCCL takes an empty variable for one that is not set.
    if not variables.get("NCCL_GIN_TYPE"):
        variables["NCCL_GIN_TYPE"] = wanted
    if variables["NCCL_GIN_TYPE"] != wanted:
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


def can_size_itself(library: ModuleType, across_nodes: bool) -> bool:
    """Whether DeepEP can read the speeds from which it computes a number of multiprocessors.

    It takes 0 for a link that it cannot read, as upstream does on EFA. `get_theoretical_num_sms` divides by the network's
    as soon as there are two nodes, and takes the fewest multiprocessors there are if NVLink's is 0 (deep_ep/utils/envs.py,
    buffers/elastic.py). Builds differ in how they read them, so the library itself is asked.
    """
    envs = getattr(getattr(library, "utils", None), "envs", None)
    asked = ("get_nvlink_gbs", "get_rdma_gbs") if across_nodes else ("get_nvlink_gbs",)
    return all(hasattr(envs, name) and getattr(envs, name)() > 0 for name in asked)


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
    library = _import()
    if found.elastic and not hasattr(library, "ElasticBuffer"):
        raise BadConfig(
            f"deep_ep at {library.__file__} has no ElasticBuffer although its files tell so; install it anew"
        )
    return library


def _import() -> ModuleType:
    try:
        with _own_check_only():
            return importlib.import_module("deep_ep")
    except (ImportError, AssertionError, OSError) as error:
        spec = importlib.util.find_spec("deep_ep")
        words = " ".join(str(error).split())
        raise BadConfig(
            f"deep_ep at {spec.origin if spec else '?'} does not start ({words}); see docs/transport.md"
        ) from None


@contextmanager
def _own_check_only(file: Path = Path("/proc/self/maps")) -> Iterator[None]:
    """Silence deep_ep's check of mapped files while it is imported, if it would mistake a plugin for a second NCCL.

    `check_nccl_so` compares all files with libnccl in their names (deep_ep/__init__.py); `mapped_nccl` looked at those that
    are NCCL itself. That it also compares NCCL with the one deep_ep was linked to is lost then; NCCL compares versions.
    """
    mapped = set(re.findall(r"/\S*libnccl\S*", file.read_text())) if file.exists() else set()
    name = "EP_SUPPRESS_NCCL_CHECK"
    if len(mapped) < 2 or name in os.environ or len(mapped_nccl()) > 1:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


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
