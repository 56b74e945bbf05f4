"""Builds the images of a stack: `python -m images.build --stack cpu --bootstrap-base`.

An image whose inputs are what they were is not built again. References are immutable: the digest after a push, else a
tag made of the image's own digest. They go to images/built.json, which `tandem submit` reads.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click

from configs.failure import BadConfig, Failure
from configs.stack import load_stack
from images.archive import write_archive
from images.base import MIRROR, SECURITY_MIRROR, bootstrap
from images.bill import bill_of_materials, packages_in
from images.buildah import Buildah
from images.check import check
from images.recipe import KINDS, Recipe, recipe, snapshot
from images.tools import find_uv, uv_cache

BUILT = Path(__file__).parent / "built.json"
RECORDS = Path(__file__).parent / "built"
"""Bills of materials and the manifest of the last build."""
# Where a site's certificates and uv's cache are mounted while an image is built.
_CERTIFICATES = "/tmp/certificates.pem"
_UV_CACHE = "/root/.cache/uv"
_SINCE_LABELS = {"VERSION": "org.opencontainers.image.version", "REVISION": "org.opencontainers.image.revision"}
"""Build arguments that are no inputs, and the labels they become."""


class Built(NamedTuple):
    """One image that is there."""

    recipe: Recipe
    reference: str
    labels: dict[str, str]
    """What its labels say, by build argument; INPUTS_DIGEST is over everything it is made of."""
    size: int
    """Bytes of all its layers, uncompressed."""
    seconds: float
    fresh: bool
    """Whether it was built now."""


def build_image(buildah: Buildah, wanted: Recipe, context: Path) -> Built:
    """Build an image and try its entry points, unless it is there with the same inputs.

    Args:
        buildah: Storage for the image.
        wanted: What to build.
        context: Folder that holds the sources (`images.recipe.snapshot`).

    Raises:
        BadConfig: the build failed, or an entry point does not import in the image.
    """
    start = time.monotonic()
    inputs = wanted.inputs_digest(context, wanted.base)
    repository = f"localhost/tandem/{wanted.kind}"
    name = f"{repository}:inputs-{inputs[:12]}"
    labels = wanted.labels(context, inputs)
    fresh = not buildah.has(name)
    if not fresh:
        # Files that are in no image may have changed since, so that the image is of an older revision.
        held = buildah.labels(name)
        labels |= {argument: held[label] for argument, label in _SINCE_LABELS.items() if label in held}
    else:
        draft = f"{repository}:unchecked"
        certificates = os.environ.get("SSL_CERT_FILE", "")
        buildah.build(
            context / wanted.containerfile,
            context,
            target=wanted.kind,
            name=draft,
            arguments={
                **wanted.arguments,
                **labels,
                **({"SSL_CERT_FILE": _CERTIFICATES} if certificates else {}),
            },
            contexts={"uv": find_uv().parent},
            volumes={uv_cache(): _UV_CACHE, **({Path(certificates): f"{_CERTIFICATES}:ro"} if certificates else {})},
            log=buildah.folder / f"{wanted.kind}.log",
        )
        if not wanted.stack.cuda:
            check(buildah, draft, wanted.kind)
        buildah.run("tag", draft, name, f"{repository}:{buildah.image_id(draft)[:12]}")
        buildah.run("rmi", draft)
    reference = f"{repository}:{buildah.image_id(name)[:12]}"
    return Built(wanted, reference, labels, buildah.size(name), time.monotonic() - start, fresh)


def push_image(buildah: Buildah, image: Built, prefix: str) -> Built:
    """Push an image to `prefix`/<kind> and refer to it by its digest there."""
    repository = f"{prefix.rstrip('/')}/{image.recipe.kind}"
    digest_file = buildah.folder / "digest"
    buildah.push(image.reference, f"{repository}:{image.reference.rpartition(':')[2]}", "--digestfile", digest_file)
    return image._replace(reference=f"{repository}@{digest_file.read_text().strip()}")


def record(buildah: Buildah, images: list[Built]) -> None:
    """Write images/built.json, the build manifest and a bill of materials for each image."""
    RECORDS.mkdir(exist_ok=True)
    manifest = {}
    for image in images:
        kind = image.recipe.kind
        bill = RECORDS / f"{kind}.cdx.json"
        if image.fresh or not bill.exists():
            with buildah.mounted(f"localhost/tandem/{kind}:inputs-{image.labels['INPUTS_DIGEST'][:12]}") as root:
                bill.write_text(bill_of_materials(image.reference, image.labels["VERSION"], packages_in(root)))
        manifest[kind] = {
            "reference": image.reference,
            "base": image.recipe.base,
            "bytes": image.size,
            **{key.lower(): value for key, value in image.labels.items()},
        }
    (RECORDS / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    references = json.loads(BUILT.read_text()) if BUILT.exists() else {}
    references |= {image.recipe.kind: image.reference for image in images}
    BUILT.write_text(json.dumps(references, indent=2) + "\n")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other build uses the storage."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@click.command()
@click.option("--stack", "stack_name", default="cpu", show_default=True, help="Stack in configs/stacks to build for.")
@click.option("--base", default="", metavar="REF", help="Image with Python 3.11 to start from; name it by digest.")
@click.option("--bootstrap-base", is_flag=True, help="Without --base, make one from Debian packages.")
@click.option("--cuda-base", default="", metavar="REF", help="CUDA development image, for a stack with CUDA.")
@click.option("--mirror", default=MIRROR, show_default=True, help="Debian mirror for --bootstrap-base.")
@click.option("--security-mirror", default=SECURITY_MIRROR, show_default=True, help="Mirror of its security updates.")
@click.option("--only", "kinds", multiple=True, type=click.Choice(KINDS), help="Build this image only; repeatable.")
@click.option("--push", "prefix", default="", metavar="PREFIX", help="Push to PREFIX/control, /train and /rollout.")
@click.option("--archive", type=click.Path(path_type=Path), metavar="DIR", help="Write one OCI archive into DIR.")
def main(
    stack_name: str,
    base: str,
    bootstrap_base: bool,
    cuda_base: str,
    mirror: str,
    security_mirror: str,
    kinds: tuple[str, ...],
    prefix: str,
    archive: Path | None,
) -> None:
    """Build the images of a stack and write images/built.json."""
    if not base and not bootstrap_base:
        raise BadConfig("name the base image with --base, or have one made with --bootstrap-base")
    buildah = Buildah()
    with alone(buildah.folder):
        base = base or bootstrap(buildah, mirror, security_mirror)
        recipes = [recipe(kind, load_stack(stack_name), base, cuda_base) for kind in kinds or KINDS]
        images = []
        with tempfile.TemporaryDirectory(dir=buildah.folder) as context:
            snapshot(Path(context))
            for wanted in recipes:
                images.append(build_image(buildah, wanted, Path(context)))
                print(_line(images[-1]), flush=True)
        local = {image.recipe.kind: image.reference for image in images}
        if prefix:
            images = [push_image(buildah, image, prefix) for image in images]
        record(buildah, images)
        if archive is not None:
            print(write_archive(buildah, local, archive))


def _line(image: Built) -> str:
    how = "built" if image.fresh else "unchanged"
    return f"{image.recipe.kind:8} {image.size / 1e6:6.0f} MB  {image.seconds:5.1f} s  {how:9} {image.reference}"


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(64)
    except Failure as failure:
        print(f"images: {failure.sentence}", file=sys.stderr)
        sys.exit(failure.exit_code)
