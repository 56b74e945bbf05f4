"""What a pod must bring for EFA and GPU-initiated transfers: devices, memory, limits, libraries, environment."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kernels.dispatch.deep_ep_environment import mapped_nccl

ASK_S = 30.0
"""Seconds fi_info may take: it opens every device."""
EFA_PROGRAMS = "/opt/amazon/efa/bin"
"""Where the EFA installer puts fi_info; another one in the path may belong to a libfabric without EFA."""
NO_DATA = ("-61", "No data available")
"""What fi_info says when no provider fits (FI_ENODATA)."""
MIB = 2**20
PLUGIN = Path("/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so")
"""Where the EFA installer puts the plugin; NCCL_NET_PLUGIN names another one."""
GDA_TABLE = b"ncclGinPlugin_v14"
"""Symbol of a plugin that offers GPU-initiated EFA to NCCL 2.31."""
WATCHED = (
    "FI_EFA_USE_DEVICE_RDMA",
    "FI_PROVIDER",
    "NCCL_GIN_TYPE",
    "NCCL_PROTO",
    "RDMAV_FORK_SAFE",
    "EP_REUSE_NCCL_COMM",
    "EP_HYBRID_KERNEL",
)
"""Variables that decide, or spoil, how traffic travels."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod has."""

    fi_info: int | None = None
    """EFA domains that libfabric sees; None if fi_info is missing or cannot tell."""
    uverbs: tuple[str, ...] = ()
    """Files in /dev/infiniband through which RDMA devices are used."""
    huge_pages_mib: int = 0
    """Free huge pages, in MiB."""
    shared_memory_mib: int | None = None
    """Size of /dev/shm; None if there is none."""
    memlock_mib: int | None = None
    """Memory the process may lock; None for no limit."""
    gdrdrv: bool = False
    """Whether GDRCopy's device is there."""
    direct: str = ""
    """How an interface reaches GPU memory: `peermem`, `dmabuf` or not at all."""
    efa_driver: str = ""
    """Version of the EFA kernel module."""
    nccl_libraries: tuple[str, ...] = ()
    """Files named libnccl.so that this process has mapped."""
    plugin_gda: bool | None = None
    """Whether the plugin's library offers GPU-initiated EFA; None without the library."""
    environment: dict[str, str] = {}
    """The watched variables that are set."""


def look_at_host(root: Path = Path("/"), environment: Mapping[str, str] | None = None, limit_s: float = ASK_S) -> Host:
    """Everything below, for this process.

    Args:
        root: Folder that holds dev, proc, sys and opt.
        environment: Of this process if None.
        limit_s: Seconds fi_info may take.
    """
    variables = os.environ if environment is None else environment
    return Host(
        fi_info=count_efa_domains(limit_s=limit_s),
        uverbs=uverbs(root / "dev/infiniband"),
        huge_pages_mib=huge_pages_mib(root / "proc/meminfo"),
        shared_memory_mib=shared_memory_mib(root / "dev/shm"),
        memlock_mib=memlock_mib(),
        gdrdrv=(root / "dev/gdrdrv").exists(),
        direct=direct_access(root),
        efa_driver=efa_driver(root / "sys/module/efa/version"),
        nccl_libraries=mapped_nccl(root / "proc/self/maps"),
        plugin_gda=plugin_offers_gda(variables, root / PLUGIN.relative_to("/")),
        environment={name: variables[name] for name in WATCHED if variables.get(name)},
    )


def count_efa_domains(
    command: Sequence[str] = ("fi_info", "-p", "efa"), folder: str = EFA_PROGRAMS, limit_s: float = ASK_S
) -> int | None:
    """EFA domains libfabric lists; 0 if it says that there are none, None if fi_info is not installed, hangs or fails."""
    program = shutil.which(command[0], path=folder) or shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return 0 if any(words in done.stdout + done.stderr for words in NO_DATA) else None
    return len(efa_domains(done.stdout))


def efa_domains(text: str) -> set[str]:
    """Domains of the provider `efa` in what fi_info prints; one is listed once for each of its endpoint types."""
    found, provider = set(), ""
    for line in text.splitlines():
        key, _, value = line.strip().partition(":")
        if key == "provider":
            provider = value.strip().lower()
        elif key == "domain" and provider == "efa":
            found.add(re.sub(r"-(rdm|dgrm|direct)$", "", value.strip()))
    return found


def uverbs(folder: Path = Path("/dev/infiniband")) -> tuple[str, ...]:
    """Names of the pod's RDMA device files."""
    return tuple(sorted(path.name for path in folder.glob("uverbs*")))


def huge_pages_mib(file: Path = Path("/proc/meminfo")) -> int:
    """Free huge pages of the default size, in MiB."""
    text = file.read_text() if file.exists() else ""
    free = re.search(r"^HugePages_Free:\s+(\d+)", text, re.MULTILINE)
    size = re.search(r"^Hugepagesize:\s+(\d+) kB", text, re.MULTILINE)
    return int(free[1]) * int(size[1]) // 1024 if free and size else 0


def shared_memory_mib(folder: Path = Path("/dev/shm")) -> int | None:
    """Size of the memory file system, in MiB."""
    return shutil.disk_usage(folder).total // MIB if folder.is_dir() else None


def memlock_mib() -> int | None:
    """Memory this process may lock, in MiB; None for no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit // MIB


def direct_access(root: Path = Path("/")) -> str:
    """How an interface can reach GPU memory: NVIDIA's peer memory module, or dmabuf (its open kernel module)."""
    if (root / "sys/module/nvidia_peermem").is_dir():
        return "peermem"
    version = root / "proc/driver/nvidia/version"
    return "dmabuf" if version.exists() and "Open Kernel Module" in version.read_text() else ""


def efa_driver(file: Path = Path("/sys/module/efa/version")) -> str:
    """Version of the loaded EFA module (`3.3.0g`); empty without one."""
    return file.read_text().strip() if file.exists() else ""


def plugin_offers_gda(environment: Mapping[str, str], default: Path = PLUGIN) -> bool | None:
    """Whether the plugin that NCCL will load has the table of GPU-initiated EFA; None if it is not found."""
    named = environment.get("NCCL_GIN_PLUGIN") or environment.get("NCCL_NET_PLUGIN", "")
    library = Path(named) if named.startswith("/") else default
    return GDA_TABLE in library.read_bytes() if library.exists() else None
