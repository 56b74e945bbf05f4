"""What the cluster needs of this machine: Debian packages, root, a bridge with the node's address, a packet filter."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
from pathlib import Path

import platformdirs

from configs.failure import BadConfig
from tests.cluster import layout

PACKAGES = {
    "runc": "runc",
    "nft": "nftables",
    "ip": "iproute2",
    "mount": "mount",
    "git": "git",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
}
"""Programs (or files, by their path) and the Debian packages that bring them: the node's, then those of images.build."""
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
APT_LIMIT_S = 600
FILTER = "tandem_test"


def equip() -> None:
    """Install the packages that are missing.

    Raises:
        BadConfig: Not root, or no way to install a package.
    """
    if os.geteuid():
        raise BadConfig(
            "the test cluster starts containers and a bridge, which needs root; run it with sudo or as root"
        )
    _install_packages()


def prepare() -> None:
    """Set up the network of the node; does nothing that is done already.

    Raises:
        BadConfig: The addresses are taken.
    """
    layout.SOCKETS.mkdir(mode=0o700, exist_ok=True)
    # Volumes that the kubelet mounts must appear inside containers that share its folders.
    _command("mount", "--make-rshared", "/")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    _make_bridge()
    _filter_packets()


def undo() -> None:
    """Take the bridge, the packet filters and everything mounted below the cluster's folders away."""
    _unmount()
    # A pod's network can outlive its processes, held by whoever entered it; its end here carries the pods' gateway.
    pods = ipaddress.ip_network(layout.POD_SUBNET)
    for address, device in _addresses():
        if device.startswith("veth") and ipaddress.ip_address(address) in pods:
            _command("ip", "link", "del", device, check=False)
    _command("ip", "link", "del", layout.BRIDGE, check=False)
    _command("nft", "delete", "table", "inet", FILTER, check=False)
    for family in ("ip", "ip6"):
        _command("nft", "delete", "table", family, "kube-proxy", check=False)
    _remove_cgroups()


def program(name: str) -> str:
    """Path of a program of the system, found even where sbin is not on PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SEARCH_PATH}") or ""


def busybox() -> Path:
    """A static busybox for containers, taken from its Debian package without installing it."""
    folder = platformdirs.user_cache_path(layout.NAME) / "busybox"
    binary = folder / "bin" / "busybox"
    if not binary.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if not _apt("download", "busybox-static", folder=folder):
            _apt("update")
            if not _apt("download", "busybox-static", folder=folder):
                raise BadConfig("the package busybox-static cannot be downloaded; check apt's sources")
        (package,) = folder.glob("*.deb")
        _command("dpkg-deb", "-x", str(package), str(folder))
        package.unlink()
    return binary


def _there(name: str) -> bool:
    return Path(name).exists() if name.startswith("/") else bool(program(name))


def _install_packages() -> None:
    missing = sorted({package for name, package in PACKAGES.items() if not _there(name)})
    if not missing:
        return
    if not program("apt-get"):
        raise BadConfig(f"{', '.join(missing)}: missing, and there is no apt-get here; install them with your system")
    install = ("install", "--yes", "--no-install-recommends", *missing)
    if not _apt(*install):
        _apt("update")
        if not _apt(*install):
            raise BadConfig(f"`apt-get install {' '.join(missing)}` failed; run it by hand to see why")


def _apt(*arguments: str, folder: Path = Path("/")) -> bool:
    command = ["apt-get", "--quiet", "-o", "DPkg::Lock::Timeout=300", "-o", "APT::Sandbox::User=root", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=APT_LIMIT_S, check=False)
    return done.returncode == 0


def _make_bridge() -> None:
    """A bridge without ports: where no dummy device can be made, it carries an address as well."""
    held = _addresses()
    if (layout.NODE_ADDRESS, layout.BRIDGE) in held:
        return
    ours = [ipaddress.ip_network(each) for each in (layout.POD_SUBNET, layout.SERVICE_SUBNET, layout.NODE_ADDRESS)]
    for address, device in held:
        if device != layout.BRIDGE and any(ipaddress.ip_address(address) in network for network in ours):
            raise BadConfig(f"{device} has the address {address}, which the test cluster uses; stop what made it")
    _command("ip", "link", "add", layout.BRIDGE, "type", "bridge", check=False)
    _command("ip", "address", "replace", f"{layout.NODE_ADDRESS}/32", "dev", layout.BRIDGE)
    _command("ip", "link", "set", layout.BRIDGE, "up")


def _addresses() -> list[tuple[str, str]]:
    """Addresses of this machine with their devices; all pods' ends here share one address."""
    links = json.loads(_command("ip", "-json", "address"))
    return [(entry["local"], link["ifname"]) for link in links for entry in link["addr_info"]]


def _filter_packets() -> None:
    """Keep other machines out: Linux answers for an address of any interface on every interface."""
    ours = f"{{ {layout.NODE_ADDRESS}, {layout.POD_SUBNET}, {layout.SERVICE_SUBNET} }}"
    inside = f'iifname {{ "lo", "{layout.BRIDGE}" }} accept; iifname "veth*" accept; ip daddr {ours} drop;'
    rules = f"""
        add table inet {FILTER}
        delete table inet {FILTER}
        table inet {FILTER} {{
            chain input {{ type filter hook input priority -10; policy accept; {inside} }}
            chain forward {{ type filter hook forward priority -10; policy accept; {inside} }}
        }}
    """
    _command("nft", "-f", "-", text=rules)


def _unmount() -> None:
    prefixes = (f"{layout.STATE}/", f"{layout.SOCKETS}/")
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((path for path in mounted if path.startswith(prefixes)), reverse=True):
        _command("umount", "--lazy", path, check=False)


def _remove_cgroups() -> None:
    for top in (*Path("/sys/fs/cgroup").glob("*/kubepods"), *Path("/sys/fs/cgroup").glob("kubepods")):
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                pass


def _command(name: str, *arguments: str, text: str = "", check: bool = True) -> str:
    done = subprocess.run(
        [program(name) or name, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    if check and done.returncode:
        raise BadConfig(f"`{name} {' '.join(arguments)}` failed: {done.stderr.strip()[-300:]}")
    return done.stdout
