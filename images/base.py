"""The base image, made from Debian packages where no registry is at hand."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from configs.failure import BadConfig
from images.buildah import Buildah
from images.tools import require

SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
SECURITY_MIRROR = "http://deb.debian.org/debian-security"
PACKAGES = ("ca-certificates", "libstdc++6", "python3")
_UNREAD = ("doc", "info", "lintian", "locale", "man")
"""Folders of /usr/share that no program reads; the copyright notices in `doc` stay."""


def bootstrap(buildah: Buildah, mirror: str = MIRROR, security_mirror: str = SECURITY_MIRROR) -> str:
    """Make the base image with mmdebstrap, unless it is there for this list of packages.

    Args:
        buildah: Storage for the image.
        mirror: Debian mirror; the host's own list of sources may name some that hold no Debian.
        security_mirror: Mirror of Debian's security updates.

    Returns:
        The image's name.

    Raises:
        BadConfig: mmdebstrap is not installed, or failed.
    """
    sources = (f"deb {mirror} {SUITE} main", f"deb {security_mirror} {SUITE}-security main")
    key = hashlib.sha256("\n".join((*sources, *PACKAGES, *_UNREAD)).encode()).hexdigest()[:12]
    name = f"localhost/tandem/base:{key}"
    if buildah.has(name):
        return name
    require("mmdebstrap", "mmdebstrap")
    archive = buildah.folder / f"base-{key}.tar"
    _debootstrap(archive, sources, buildah.folder / "base.log")
    buildah.import_rootfs(archive, name)
    archive.unlink()
    return name


def _debootstrap(archive: Path, sources: tuple[str, ...], log: Path) -> None:
    with log.open("wb") as sink:
        code = subprocess.run(
            ["mmdebstrap", "--variant=minbase", "--format=tar", f"--include={','.join(PACKAGES)}",
             "--aptopt=Acquire::Languages \"none\"", *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in _UNREAD),
             "--dpkgopt=path-include=/usr/share/doc/*/copyright",
             "--customize-hook=rm -rf \"$1\"/var/lib/apt/lists/* \"$1\"/var/cache/* \"$1\"/var/log/*",
             SUITE, str(archive), *sources],
            stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        ).returncode  # fmt: skip
    if code:
        archive.unlink(missing_ok=True)
        lines = log.read_text(errors="replace").strip().splitlines() or ["it left no words"]
        raise BadConfig(f"mmdebstrap failed: {lines[-1]} (all of it: {log}); name a mirror that answers with --mirror")
