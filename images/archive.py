"""Images as one OCI archive: a tar file in which a layer that several images share lies once."""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from images.buildah import Buildah

# buildah compresses what it writes to a folder, whatever it is told; gzip would take most of the time of a build.
FAST = ("--compression-format", "zstd", "--compression-level", "1")


def write_archive(buildah: Buildah, references: Mapping[str, str], folder: Path) -> Path:
    """Write the images to `folder`, unless an archive of the same images is there; older archives there go.

    `ctr images import` and other OCI tools read it; images keep the names in `references`.

    Args:
        buildah: Storage that holds the images.
        references: Name of each image by its kind; immutable, so that equal names mean equal images.
        folder: Where the archive goes; made if missing.

    Returns:
        The archive, `images-<12 hex>.tar`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(set(references.values()))
    archive = folder / f"images-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:12]}.tar"
    if archive.exists():
        return archive
    for old in folder.glob("images-*.tar"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="layout-", dir=folder) as place:
        layout = Path(place)
        for name in names:
            buildah.push(name, f"oci:{layout}:{name}", *FAST)
        _name_for_containerd(layout)
        draft = archive.with_suffix(".part")
        with tarfile.open(draft, "w") as tar:
            for path in (layout / "oci-layout", layout / "index.json", layout / "blobs"):
                tar.add(path, path.name)
    draft.rename(archive)
    return archive


def _name_for_containerd(layout: Path) -> None:
    """Say each image's full name where containerd looks for it; the OCI annotation beside it may be a mere tag."""
    path = layout / "index.json"
    index = json.loads(path.read_text())
    for manifest in index["manifests"]:
        annotations = manifest["annotations"]
        annotations["io.containerd.image.name"] = annotations["org.opencontainers.image.ref.name"]
    path.write_text(json.dumps(index))
