"""Locks of the environment and of the images: every package by version and hash, resolved from one another.

requirements.lock is the whole environment of a checkout. The locks of the CPU images hold a part of it at the same
versions. The locks of a GPU stack start from the versions its file in configs/stacks names. Each image lock says in its
first line which inputs it was resolved from, so that a stale one is found without resolving anything.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

from configs.failure import BadConfig
from configs.stack import known_stacks, load_stack
from images.tools import find_uv

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements.lock"
LOCKS = Path(__file__).parent / "locks"
STAMP = "# resolved from inputs with sha256 "

# Packages that CPU images leave out: torch asks for them, but nothing that runs without a GPU loads a file of theirs.
# images/keep_mapped.py takes the same look at the files of the NVIDIA packages that have to stay.
UNUSED_ON_CPU = ("nvidia-cuda-cccl", "nvidia-nvtx", "triton")
# torch's own NCCL is older than the one the image builds, and DeepEP comes from the stack's fork.
BUILT_IN_IMAGE = ("nvidia-nccl-cu13", "sgl-deep-ep")


class Lock(NamedTuple):
    """One image lock and what it is resolved from."""

    path: Path
    extras: tuple[str, ...]
    """Extras of pyproject.toml."""
    pins: tuple[str, ...]
    """Requirements beside those of pyproject.toml, `name==version`."""
    left_out: tuple[str, ...]
    """Packages that are resolved but not written."""
    constraint: Path | None
    """Lock whose versions are kept; None where the stack's own packages decide."""
    python: str
    universal: bool
    """Whether the lock serves every platform and later Pythons, or Linux on x86-64 with `python` alone."""
    alone: bool = False
    """Whether it holds `pins` without what pyproject.toml asks for, which may clash with them; previews are admitted."""


def image_locks() -> dict[str, Lock]:
    """All image locks by file name without suffix: `control`, `train`, `cpu-sglang`, `<stack>-train`, `<stack>-rollout`."""
    cpu = load_stack("cpu")
    locks = {
        "control": Lock(LOCKS / "control.txt", (), (), (), REQUIREMENTS, cpu.python, True),
        "train": Lock(LOCKS / "train.txt", ("torch",), (), UNUSED_ON_CPU, REQUIREMENTS, cpu.python, True),
    }
    for name in known_stacks():
        stack = load_stack(name)
        if not stack.cuda or stack.sglang_build != "stock":
            continue
        pins = (f"torch=={stack.torch}", f"transformers=={stack.transformers}")
        rollout = Lock(
            LOCKS / f"{name}-rollout.txt", (), (*pins, f"sglang=={stack.sglang}"), BUILT_IN_IMAGE, None,
            stack.python, False,
        )  # fmt: skip
        train = rollout._replace(path=LOCKS / f"{name}-train.txt", pins=pins, constraint=rollout.path)
        locks |= {rollout.path.stem: rollout, train.path.stem: train}
    # A server on a CPU is an environment of its own: SGLang's protobuf and kfp's exclude one another.
    server = (f"sglang=={load_stack('deepep-efa').sglang}",)
    locks["cpu-sglang"] = Lock(LOCKS / "cpu-sglang.txt", (), server, (), None, cpu.python, False, alone=True)
    return locks


def inputs_digest(lock: Lock) -> str:
    """SHA-256 of everything `lock` is resolved from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(text for e in lock.extras for text in project["optional-dependencies"][e])]
    wanted = [] if lock.alone else wanted
    kept = lock.constraint.read_text(encoding="utf-8") if lock.constraint else ""
    parts = [*wanted, *lock.pins, *lock.left_out, lock.python, str(lock.universal), kept]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_fresh(lock: Lock) -> bool:
    """Whether the lock on disk was resolved from the inputs as they are."""
    return lock.path.exists() and lock.path.read_text("utf-8").startswith(f"{STAMP}{inputs_digest(lock)}\n")


def pins_of(path: Path) -> dict[str, set[str]]:
    """Versions by package of a lock; several where they depend on the platform."""
    pins: dict[str, set[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, found, rest = line.partition("==")
        if found and not line.startswith(("#", " ")):
            pins.setdefault(name, set()).add(rest.split()[0])
    return pins


def write_lock(lock: Lock) -> None:
    """Resolve `lock`, keeping the versions of its constraint, or else those it has.

    Raises:
        BadConfig: the resolver found no versions that go together; its own words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.in"
        pins.write_text("\n".join(lock.pins))
        written = Path(folder) / "lock.txt"
        platform = ["--universal"] if lock.universal else ["--python-platform", "x86_64-manylinux_2_35"]
        if lock.path.exists() and not lock.constraint:
            # uv keeps the versions that it finds in the file it writes.
            written.write_text(lock.path.read_text(encoding="utf-8"))
        done = subprocess.run(
            [find_uv(), "pip", "compile", "--quiet", *([] if lock.alone else [ROOT / "pyproject.toml"]), pins,
             *(["--constraint", str(lock.constraint)] if lock.constraint else []),
             *(part for extra in lock.extras for part in ("--extra", extra)),
             *(part for package in lock.left_out for part in ("--no-emit-package", package)),
             *platform, "--python-version", lock.python, "--generate-hashes", "--no-emit-index-url", "--no-annotate",
             "--no-header", "--prerelease", "allow" if lock.alone else "if-necessary-or-explicit", "--output-file", written],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BadConfig(f"{lock.path.name}: cannot be resolved: {done.stderr.strip()}")
        text = "\n".join(line for line in written.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
        lock.path.write_text(f"{STAMP}{inputs_digest(lock)}\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        for each in image_locks().values():
            write_lock(each)
            print(each.path.relative_to(ROOT))
    except BadConfig as failure:
        print(f"locks: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
