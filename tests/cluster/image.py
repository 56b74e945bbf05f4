"""Container images of single static programs, written as OCI archives and handed to containerd as a stream."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from configs.failure import BadData, ServiceGone
from tests.cluster import layout
from tests.cluster.binaries import PARTS
from tests.cluster.host import SEARCH_PATH

PREFIX = f"localhost/{layout.NAME}"
PAUSE = f"{PREFIX}/pause:{PARTS['pause'].key}"
NAMESPACE = "k8s.io"
IMPORT_LIMIT_S = 600
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclasses.dataclass(frozen=True)
class ProgramImage:
    """An image with one layer.

    Attributes:
        reference: Name and tag; the tag must change with the content.
        program: The static program on this machine.
        place: Where it lies in the image.
        links: Further names beside it.
        user: Number of the user it runs as.
    """

    reference: str
    program: Path
    place: str
    links: tuple[str, ...] = ()
    user: int = 65532


def present() -> set[str]:
    """References of the images that containerd holds."""
    return set(_ctr("images", "ls", "-q").split())


def import_programs(images: Sequence[ProgramImage]) -> None:
    """Import those that are missing."""
    held = present()
    for image in images:
        if image.reference not in held:
            with tempfile.TemporaryFile(dir=layout.STATE) as archive:
                _write_archive(image, archive)
                archive.seek(0)
                _ctr("images", "import", "--local", "-", stdin=archive)


def import_archive(archive: Path) -> list[str]:
    """Import an OCI or Docker archive; returns the references that came with it.

    Raises:
        BadData: The file is not such an archive, or names no image.
    """
    try:
        with archive.open("rb") as content:
            printed = _ctr("images", "import", "--local", "-", stdin=content)
    except OSError as error:
        raise BadData(f"{archive}: cannot be read ({error.strerror})") from None
    names = re.findall(r"^unpacking (\S+) \(", printed, flags=re.MULTILINE)
    if not names:
        raise BadData(f"{archive}: containerd found no named image in it: {printed.strip()[-300:]}")
    return names


def _ctr(*arguments: str, stdin: IO[bytes] | None = None) -> str:
    command = [str(PARTS["containerd"].binary("ctr")), "-a", str(layout.CONTAINERD_SOCKET), "-n", NAMESPACE]
    done = subprocess.run(
        [*command, *arguments],
        stdin=stdin or subprocess.DEVNULL,
        capture_output=True,
        timeout=IMPORT_LIMIT_S,
        check=False,
    )
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip()[-500:]
        raise ServiceGone(f"`ctr {' '.join(arguments)}` failed: {words}")
    return done.stdout.decode()


def remove_containers() -> None:
    """Kill and delete every container, as far as containerd answers."""
    for kind, force in (("tasks", ("--force",)), ("containers", ())):
        try:
            found = _ctr(kind, "ls", "-q").split()
            if found:
                _ctr(kind, "rm", *force, *found)
        except ServiceGone:
            pass


def _write_archive(image: ProgramImage, archive: IO[bytes]) -> None:
    """An OCI layout as a tar; the layer stays uncompressed, since it travels no further than a socket."""
    with tempfile.TemporaryFile(dir=layout.STATE) as layer:
        _write_layer(image, layer)
        size = layer.tell()
        layer.seek(0)
        layer_digest = hashlib.file_digest(layer, "sha256").hexdigest()
        layer.seek(0)
        place = f"/{image.place.lstrip('/')}"
        process = {"Entrypoint": [place], "User": f"{image.user}:{image.user}", "Env": [f"PATH={SEARCH_PATH}"]}
        configuration = _json(
            {
                "architecture": _architecture(),
                "os": "linux",
                "config": process,
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
            }
        )
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": _descriptor(_CONFIG, configuration),
                "layers": [{"mediaType": _LAYER, "digest": f"sha256:{layer_digest}", "size": size}],
            }
        )
        named = {"io.containerd.image.name": image.reference}
        index = _json({"schemaVersion": 2, "manifests": [{**_descriptor(_MANIFEST, manifest), "annotations": named}]})
        with tarfile.open(fileobj=archive, mode="w") as output:
            _add(output, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            _add(output, "index.json", index)
            for content in (configuration, manifest):
                _add(output, f"blobs/sha256/{hashlib.sha256(content).hexdigest()}", content)
            entry = tarfile.TarInfo(f"blobs/sha256/{layer_digest}")
            entry.size = size
            output.addfile(entry, layer)


def _write_layer(image: ProgramImage, layer: IO[bytes]) -> None:
    place = image.place.lstrip("/")
    with tarfile.open(fileobj=layer, mode="w") as output:
        for folder, mode in (("tmp", 0o1777), ("bin", 0o755)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            output.addfile(entry)
        entry = tarfile.TarInfo(place)
        entry.size, entry.mode = image.program.stat().st_size, 0o755
        with image.program.open("rb") as content:
            output.addfile(entry, content)
        for name in image.links:
            link = tarfile.TarInfo(str(Path(place).parent / name))
            link.type, link.linkname = tarfile.SYMTYPE, f"/{place}"
            output.addfile(link)
    layer.flush()


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


def _json(content: object) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _descriptor(kind: str, content: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}


def _add(output: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    output.addfile(entry, io.BytesIO(content))
