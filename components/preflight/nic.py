"""Byte counters of the node's interfaces: RDMA devices and plain network interfaces, before and after an exchange.

In a pod the kernel shows an RDMA device without its hw_counters (drivers/infiniband/core/sysfs.c makes them for the full
device only, not for the one that another network namespace sees), so they are also asked for over RDMA netlink. Where
that gives nothing either they are unreadable, which is not the same as 0 bytes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

SYS = Path("/sys/class")
DEVICES = Path("/dev/infiniband")
AMAZON = "0x1d0f"
"""PCI vendor of an EFA device."""
RDMA_COUNTERS = ("tx_bytes", "rx_bytes", "rdma_write_bytes", "rdma_read_bytes", "send_bytes", "recv_bytes")
"""Of EFA's hw_counters: bytes over the wire in either direction, and those of writes, reads and sends that began here."""
NETLINK = ("rdma", "-j", "statistic", "show")
"""iproute2's command: a list with an object a port (`ifname`, `port`, and the counters by name)."""
ASK_S = 10.0
WRAP = 2**32
"""Older releases of it print the lower 32 bits of a counter."""
MARGIN = 0.1
"""Share of the bytes that counters may miss: they are read while headers and other traffic come and go."""


class Counters(msgspec.Struct, frozen=True):
    """Bytes since the devices were brought up, or their growth between two looks."""

    rdma: dict[str, dict[str, int]]
    """By RDMA device and counter, summed over its ports; an empty one where they cannot be read."""
    plain: dict[str, int]
    """Sent, by network interface (`eth0`, `lo`)."""

    def since(self, before: Counters) -> Counters:
        """Growth since an earlier look; what was not there before, or was reset since, counts from zero."""
        rdma = {
            device: {
                name: _growth(value, before.rdma.get(device, {}).get(name, 0), WRAP) for name, value in now.items()
            }
            # What could not be read then may have had any value.
            if before.rdma.get(device, now)
            else {}
            for device, now in self.rdma.items()
        }
        return Counters(rdma, {name: _growth(value, before.plain.get(name, 0)) for name, value in self.plain.items()})

    @property
    def readable(self) -> bool:
        """Whether there are RDMA devices, and each tells its bytes."""
        return bool(self.rdma) and all(self.rdma.values())

    @property
    def rdma_bytes(self) -> int:
        """Bytes the RDMA devices carried away or fetched.

        The wire's own count holds all; where a driver leaves RDMA out of it, those that began here do.
        """
        return sum(
            max(
                each.get("tx_bytes", 0),
                sum(each.get(name, 0) for name in ("rdma_write_bytes", "rdma_read_bytes", "send_bytes")),
            )
            for each in self.rdma.values()
        )

    def carrier(self, sent: int) -> str:
        """The plain interface that carried at least `sent` bytes, less the margin; empty if none did."""
        name, most = max(self.plain.items(), key=lambda item: item[1], default=("", 0))
        return name if sent and most >= sent * (1 - MARGIN) else ""


def read_counters(root: Path = SYS, devices: Path = DEVICES, command: Sequence[str] = NETLINK) -> Counters:
    """Read the counters of the EFA devices this process may use, and of all plain interfaces.

    Args:
        root: As /sys/class. It shows the node's devices, also those that are another pod's.
        devices: As /dev/infiniband, which holds a file for each device that is this pod's.
        command: Asks the kernel for the counters of devices that show none there; it may be missing.
    """
    mine = _mine(root, devices)
    rdma = {path.name: _device(path) for path in _entries(root / "infiniband") if path.name in mine and is_efa(path)}
    if not all(rdma.values()):
        told = _over_netlink(command)
        rdma = {name: counters or told.get(name, {}) for name, counters in rdma.items()}
    plain = {path.name: _number(path / "statistics" / "tx_bytes") for path in _entries(root / "net")}
    return Counters(rdma, {name: value for name, value in plain.items() if value is not None})


def efa_devices(root: Path = SYS) -> list[str]:
    """Names of the node's EFA devices."""
    return [path.name for path in _entries(root / "infiniband") if is_efa(path)]


def is_efa(device: Path) -> bool:
    """Whether /sys/class/infiniband/DEVICE is an EFA: by its driver, else by its PCI vendor."""
    driver = device / "device" / "driver"
    if driver.is_symlink():
        return driver.readlink().name == "efa"
    vendor = device / "device" / "vendor"
    return vendor.exists() and vendor.read_text().strip() == AMAZON


def _mine(root: Path, devices: Path) -> set[str]:
    """RDMA devices with a uverbs file in this pod."""
    found = set()
    for verbs in _entries(root / "infiniband_verbs"):
        name = verbs / "ibdev"
        if name.exists() and (devices / verbs.name).exists():
            found.add(name.read_text().strip())
    return found


def _device(path: Path) -> dict[str, int]:
    total: dict[str, int] = {}
    for folder in sorted(path.glob("ports/*/hw_counters")):
        for name in RDMA_COUNTERS:
            if (value := _number(folder / name)) is not None:
                total[name] = total.get(name, 0) + value
    return total


def _over_netlink(command: Sequence[str]) -> dict[str, dict[str, int]]:
    """What the kernel tells of each RDMA device; nothing if the command is missing, may not ask, or prints something else."""
    program = shutil.which(command[0])
    if program is None:
        return {}
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=ASK_S, check=False)
        ports: Any = json.loads(done.stdout) if done.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {}
    total: dict[str, dict[str, int]] = {}
    for port in (each for each in (ports if isinstance(ports, list) else []) if isinstance(each, dict)):
        counters = total.setdefault(str(port.get("ifname")), {})
        for name in RDMA_COUNTERS:
            if isinstance(value := port.get(name), int):
                counters[name] = counters.get(name, 0) + value
    return total


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        # An interface may go away between the listing and the reading, and some counters cannot be read.
        return None


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _growth(now: int, before: int, wrap: int = 0) -> int:
    if now >= before:
        return now - before
    return now + wrap - before if before < wrap and before - now > wrap // 2 else now
