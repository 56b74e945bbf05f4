"""The bill of materials of an image, in CycloneDX: Python packages from its lock, Debian packages from its records."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL


class Package(NamedTuple):
    """One package in an image."""

    kind: str
    """Type of its package URL: pypi, deb."""
    name: str
    version: str
    namespace: str = ""


def bill_of_materials(image: str, version: str, packages: list[Package]) -> str:
    """The bill as JSON.

    Args:
        image: Reference of the image.
        version: Version of the project.
        packages: What is in it.
    """
    bom = Bom()
    bom.metadata.component = Component(name=image, version=version, type=ComponentType.CONTAINER)
    for package in sorted(packages):
        url = PackageURL(package.kind, package.namespace or None, package.name, package.version)
        bom.components.add(
            Component(
                name=package.name, version=package.version, purl=url, bom_ref=str(url), type=ComponentType.LIBRARY
            )
        )
    return JsonV1Dot6(bom).output_as_string(indent=2)


def packages_in(root: Path) -> list[Package]:
    """Packages installed in the root file system of an image: distributions of its environment, Debian packages."""
    metadata = sorted(root.glob("opt/tandem/environment/lib/python3.*/site-packages/*.dist-info/METADATA"))
    found = [Package("pypi", *_name_and_version(path.read_text(errors="replace"), "Name")) for path in metadata]
    status = root / "var/lib/dpkg/status"
    for entry in status.read_text(errors="replace").split("\n\n") if status.exists() else []:
        if "\nStatus: install ok installed" in entry:
            found.append(Package("deb", *_name_and_version(entry, "Package"), _distribution(root)))
    return found


def _name_and_version(record: str, name: str) -> tuple[str, str]:
    fields = dict(line.split(": ", 1) for line in record.partition("\n\n")[0].splitlines() if ": " in line)
    return fields[name], fields["Version"]


def _distribution(root: Path) -> str:
    release = root / "etc/os-release"
    lines = release.read_text().splitlines() if release.exists() else []
    return next((line.removeprefix("ID=").strip('"') for line in lines if line.startswith("ID=")), "")
