"""What a host shows, on trees in the shape of /sys, /proc and /dev."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from components.preflight.fabric_checks import (
    count_efa_domains,
    direct_access,
    efa_domains,
    efa_driver,
    huge_pages_mib,
    look_at_host,
    plugin_offers_gda,
    uverbs,
)
from components.preflight.nic import Counters, efa_devices, read_counters


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def add_device(root: Path, number: int, counters: dict[str, int], vendor: str = "0x1d0f", given: bool = True) -> None:
    """An RDMA device with two ports; `given` puts its file into the pod.

    Without counters it is what a pod's network namespace shows: ports, but no hw_counters in them.
    """
    device = root / "sys/class/infiniband" / f"rdmap{number}"
    for port in (1, 2):
        write(device / f"ports/{port}/state", "4: ACTIVE\n")
    for name, value in counters.items():
        for port in (1, 2):
            write(device / f"ports/{port}/hw_counters/{name}", f"{value}\n")
    write(device / "device/vendor", f"{vendor}\n")
    write(root / f"sys/class/infiniband_verbs/uverbs{number}/ibdev", f"rdmap{number}\n")
    if given:
        write(root / f"dev/infiniband/uverbs{number}", "")


def counters_of(root: Path, *command: str) -> Counters:
    return read_counters(root / "sys/class", root / "dev/infiniband", command or ("no-such-program",))


def printing(text: str, code: int = 0) -> tuple[str, ...]:
    """A program that prints something."""
    return sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"


def netlink(number: int, **counters: int) -> dict[str, object]:
    """A port as `rdma -j statistic show` prints it."""
    return {"ifname": f"rdmap{number}", "port": 1, **counters, "lifespan": 12}


def test_counters_are_those_of_this_pods_efa_devices(tmp_path: Path) -> None:
    add_device(tmp_path, 0, {"tx_bytes": 100, "rdma_write_bytes": 7, "lifespan": 12})
    add_device(tmp_path, 1, {"tx_bytes": 100}, given=False)  # another pod's
    add_device(tmp_path, 2, {"tx_bytes": 100}, vendor="0x15b3")  # another maker's
    write(tmp_path / "sys/class/net/eth0/statistics/tx_bytes", "5\n")
    write(tmp_path / "sys/class/net/odd/statistics/tx_bytes", "not a number")
    assert counters_of(tmp_path) == Counters({"rdmap0": {"tx_bytes": 200, "rdma_write_bytes": 14}}, {"eth0": 5})
    assert efa_devices(tmp_path / "sys/class") == ["rdmap0", "rdmap1"]
    assert counters_of(tmp_path / "nothing") == Counters({}, {})


def test_a_pod_sees_no_counter_files_and_asks_over_netlink(tmp_path: Path) -> None:
    add_device(tmp_path, 0, {})
    add_device(tmp_path, 1, {}, given=False)
    write(tmp_path / "sys/class/net/eth0/statistics/tx_bytes", "5\n")

    def asked(tx: int, second: int) -> Counters:
        ports = [netlink(0, tx_bytes=tx), netlink(0, tx_bytes=second), netlink(1, tx_bytes=9), {"ifname": "rdmap0"}]
        return counters_of(tmp_path, *printing(json.dumps(ports)))

    before = asked(100, 7)
    assert before == Counters({"rdmap0": {"tx_bytes": 107}}, {"eth0": 5}) and before.readable
    assert asked(160, 7).since(before).rdma_bytes == 60


@pytest.mark.parametrize(
    "command",
    [
        ("no-such-program",),
        printing("Failed to open NETLINK_RDMA socket", 1),
        printing("[]"),
        printing("{}"),
        printing("3"),
        printing("no JSON"),
        printing('[{"ifname": "rdmap0", "port": 1}, 5]'),
    ],
)
def test_counters_that_nobody_tells_are_not_0_bytes(command: tuple[str, ...], tmp_path: Path) -> None:
    add_device(tmp_path, 0, {})
    found = counters_of(tmp_path, *command)
    assert found.rdma == {"rdmap0": {}} and not found.readable and not found.since(found).readable
    # What can be read only afterwards has not grown by all that was ever sent.
    later = Counters({"rdmap0": {"tx_bytes": 10**12}}, {})
    assert later.since(found) == Counters({"rdmap0": {}}, {})
    assert not Counters({}, {}).readable and not Counters({"a": {"tx_bytes": 1}, "b": {}}, {}).readable


def test_a_counter_that_ran_over_goes_on() -> None:
    before, after = (Counters({"a": {"tx_bytes": value}}, {}) for value in (2**32 - 100, 50))
    assert after.since(before).rdma_bytes == 150


def test_a_driver_link_decides_before_the_vendor(tmp_path: Path) -> None:
    add_device(tmp_path, 0, {"tx_bytes": 1}, vendor="0x0000")
    (tmp_path / "sys/class/infiniband/rdmap0/device/driver").symlink_to("../../../../bus/pci/drivers/efa")
    assert efa_devices(tmp_path / "sys/class") == ["rdmap0"]


@pytest.mark.parametrize(
    ("grown", "moved"),
    [
        ({"tx_bytes": 50}, 100),
        ({"rdma_write_bytes": 30, "rdma_read_bytes": 20}, 100),  # a driver that leaves RDMA out of tx_bytes
        ({"tx_bytes": 60, "rdma_write_bytes": 50}, 120),
        ({"rx_bytes": 50}, 0),
        ({}, 0),
    ],
)
def test_growth_counts_what_was_sent_once(grown: dict[str, int], moved: int, tmp_path: Path) -> None:
    base = dict.fromkeys(("tx_bytes", "rx_bytes", "rdma_write_bytes", "rdma_read_bytes"), 1000)
    add_device(tmp_path, 0, base)
    before = counters_of(tmp_path)
    add_device(tmp_path, 0, {name: value + grown.get(name, 0) for name, value in base.items()})
    assert counters_of(tmp_path).since(before).rdma_bytes == moved


def test_a_reset_counter_counts_from_zero() -> None:
    assert Counters({}, {"eth0": 7}).since(Counters({}, {"eth0": 1000})).plain == {"eth0": 7}


def test_the_interface_that_carried_the_bytes_is_named() -> None:
    grown = Counters({}, {"lo": 10, "eth0": 1000, "eth1": 20})
    assert grown.carrier(1000) == "eth0" and grown.carrier(1099) == "eth0"
    assert grown.carrier(1200) == "" and grown.carrier(0) == "" and Counters({}, {}).carrier(5) == ""


FI_INFO = """\
provider: efa
    fabric: efa-direct
    domain: rdmap85s0-rdm
    version: 206.0
    type: FI_EP_RDM
provider: efa
    fabric: efa
    domain: rdmap85s0-dgrm
provider: EFA
    fabric: efa
    domain: rdmap86s0-rdm
provider: tcp
    fabric: 10.0.0.0/16
    domain: eth0
"""


def test_fi_info_lists_domains_once() -> None:
    assert efa_domains(FI_INFO) == {"rdmap85s0", "rdmap86s0"}


def test_fi_info_may_be_absent_or_find_nothing(tmp_path: Path) -> None:
    assert count_efa_domains(("no-such-program",)) is None
    assert count_efa_domains(printing(FI_INFO)) == 2
    assert count_efa_domains(printing("fi_getinfo: -61 (No data available)", 61)) == 0
    # A program that fails for another reason does not say that there is no EFA.
    assert count_efa_domains(printing("error while loading shared libraries", 127)) is None


def test_the_installers_fi_info_comes_before_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, text in (("amazon", FI_INFO), ("path", "")):
        file = tmp_path / folder / "fi_info"
        write(file, f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    assert count_efa_domains(folder=str(tmp_path / "amazon")) == 2
    assert count_efa_domains(folder=str(tmp_path / "none")) == 0


def test_a_gpu_node_with_all_it_needs(tmp_path: Path) -> None:
    write(tmp_path / "dev/infiniband/uverbs0", "")
    write(tmp_path / "dev/gdrdrv", "")
    (tmp_path / "dev/shm").mkdir()
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    write(tmp_path / "sys/module/efa/version", "3.3.0g\n")
    write(
        tmp_path / "proc/meminfo", "HugePages_Total:    2560\nHugePages_Free:     2500\nHugepagesize:       2048 kB\n"
    )
    libraries = ["/opt/nccl/lib/libnccl.so.2.31.2"] * 2 + ["/opt/amazon/lib/libnccl-net-ofi.so"]
    write(tmp_path / "proc/self/maps", "".join(f"7f00-7f01 r-xp 0 08:01 5    {name}\n" for name in libraries))
    write(tmp_path / "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so", "\x7fELF ncclGinPlugin_v14 ")
    host = look_at_host(tmp_path, {"NCCL_PROTO": "Simple", "HOME": "/root", "FI_PROVIDER": ""})
    assert host.uverbs == ("uverbs0",) and host.gdrdrv and host.direct == "peermem" and host.efa_driver == "3.3.0g"
    assert host.huge_pages_mib == 5000 and host.nccl_libraries == ("/opt/nccl/lib/libnccl.so.2.31.2",)
    assert host.plugin_gda is True and host.environment == {"NCCL_PROTO": "Simple"} and host.shared_memory_mib


def test_a_bare_node_shows_that_all_is_missing(tmp_path: Path) -> None:
    host = look_at_host(tmp_path, {})
    assert (host.uverbs, host.gdrdrv, host.direct, host.efa_driver) == ((), False, "", "")
    assert (host.huge_pages_mib, host.shared_memory_mib, host.nccl_libraries, host.plugin_gda) == (0, None, (), None)


def test_dmabuf_needs_the_open_module(tmp_path: Path) -> None:
    version = tmp_path / "proc/driver/nvidia/version"
    write(version, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05")
    assert direct_access(tmp_path) == "dmabuf"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05")
    assert direct_access(tmp_path) == ""


def test_the_plugin_that_the_environment_names_is_looked_at(tmp_path: Path) -> None:
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    write(old, "ncclGinPlugin_v13")
    write(new, "ncclGinPlugin_v14")
    assert plugin_offers_gda({"NCCL_NET_PLUGIN": str(old)}, new) is False
    assert plugin_offers_gda({"NCCL_NET_PLUGIN": str(old), "NCCL_GIN_PLUGIN": str(new)}) is True
    assert plugin_offers_gda({"NCCL_NET_PLUGIN": "ofi"}, new) is True  # a name, which the loader finds


def test_this_machine_can_be_looked_at() -> None:
    assert uverbs(Path("/nowhere")) == () and efa_driver(Path("/nowhere")) == "" and huge_pages_mib() >= 0
    assert "lo" in read_counters().plain
