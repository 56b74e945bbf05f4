"""What an image is made of: its Containerfile, locks, sources and stack, and one digest over all of it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.failure import BadConfig
from configs.stack import Stack
from images.gpu import gpu_arguments
from images.locks import ROOT

KINDS = ("control", "train", "rollout")
_SOURCES = ("configs", "kernels", "components", "images/locks", "images/sglang_shim")
_SCRIPTS = ("images/Containerfile", "images/gpu.Containerfile", "images/keep_mapped.py")


@dataclass(frozen=True)
class Recipe:
    """How one image is built."""

    kind: str
    """control, train or rollout; also the stage of the Containerfile."""
    stack: Stack
    base: str
    """Reference of the image it starts from."""
    containerfile: str
    """Path in the context, as that of the lock."""
    lock: str

    @property
    def arguments(self) -> dict[str, str]:
        """Build arguments that decide what is in the image; not those that only its labels say."""
        gpu = gpu_arguments(self.stack) if self.containerfile.endswith("gpu.Containerfile") else {}
        return {"BASE": self.base, **gpu}

    def inputs_digest(self, context: Path, base_digest: str) -> str:
        """SHA-256 over everything that decides what is in the image.

        Args:
            context: Folder that holds the sources.
            base_digest: What identifies the content of the base image.
        """
        digest = hashlib.sha256(f"{self.kind} {base_digest} {self.stack.digest}".encode())
        for key, value in sorted(self.arguments.items()):
            digest.update(f"{key}={value if key != 'BASE' else ''}\0".encode())
        for path in self._files(context):
            digest.update(f"{path.relative_to(context)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def labels(self, context: Path, inputs: str) -> dict[str, str]:
        """Build arguments for the labels."""
        return {
            "VERSION": project_version(),
            "REVISION": revision(),
            "STACK": self.stack.name,
            "STACK_DIGEST": self.stack.digest,
            "LOCK_DIGEST": hashlib.sha256((context / self.lock).read_bytes()).hexdigest(),
            "INPUTS_DIGEST": inputs,
        }

    def _files(self, context: Path) -> Iterator[Path]:
        yield context / self.containerfile
        yield context / "images/keep_mapped.py"
        yield context / "images/locks/control.txt"
        yield context / self.lock
        for folder in ("configs", "kernels", "components", "images/sglang_shim"):
            yield from sorted(path for path in (context / folder).rglob("*") if path.is_file())


def snapshot(target: Path) -> None:
    """Copy to `target` what the Containerfiles copy, so that all images of a build hold the same sources."""
    for folder in _SOURCES:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for name in _SCRIPTS:
        shutil.copy2(ROOT / name, target / name)


def recipe(kind: str, stack: Stack, base: str, cuda_base: str = "") -> Recipe:
    """How to build the image `kind` of `stack`.

    Args:
        kind: control, train or rollout.
        stack: Versions to build with.
        base: Reference of the image with Python.
        cuda_base: Reference of a CUDA development image, for train and rollout of a stack with CUDA.

    Raises:
        BadConfig: the stack's images come from elsewhere, or the CUDA image is not named.
    """
    if kind == "control" or not stack.cuda:
        lock = "control.txt" if kind == "control" else "train.txt"
        return Recipe(kind, stack, base, "images/Containerfile", f"images/locks/{lock}")
    if stack.sglang_build != "stock":
        raise BadConfig(
            f"stack {stack.name} runs on the image of {stack.sglang_build}, which is not built here; name it in the"
            f" stack's images, or build --stack deepep-efa"
        )
    if not cuda_base:
        raise BadConfig(
            f"stack {stack.name} needs CUDA {stack.cuda}; name a CUDA {stack.cuda} development image on Ubuntu with"
            f" Python {stack.python} with --cuda-base"
        )
    return Recipe(kind, stack, cuda_base, "images/gpu.Containerfile", f"images/locks/{stack.name}-{kind}.txt")


def revision() -> str:
    """The commit of the checkout, with -changed where files differ from it; empty outside a checkout."""
    told = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False)
        if done.returncode:
            return ""
        told.append(done.stdout.strip())
    return told[0] + ("-changed" if told[1] else "")


def project_version() -> str:
    """The version in pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
