"""The sources of the real deep_ep, from the wheel that the locks name; it is unpacked and never imported."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import filelock
import platformdirs

from configs.failure import BadConfig
from images.locks import LOCKS
from images.tools import find_uv

INSTALL_LIMIT_S = 300
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_28"


class Signature(NamedTuple):
    """A function as its source has it."""

    defaults: dict[str, str | None]
    """Parameters without `self`, in order, with their defaults as source; None where there is none."""
    returned: frozenset[int]
    """Lengths of the tuples it returns; 1 for anything else."""


def wheel() -> Path:
    """The unpacked package deep_ep: in the user's cache, put there from PyPI by version and hash if it is missing.

    Raises:
        BadConfig: it cannot be installed.
    """
    wanted = requirement()
    version = re.match(r"sgl-deep-ep==([\w.]+)", wanted)
    assert version is not None
    target = platformdirs.user_cache_path("tandem-test") / f"sgl-deep-ep-{version[1]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{target}.lock", timeout=INSTALL_LIMIT_S):
        if not (target / "deep_ep" / "buffers" / "elastic.py").exists():
            _install(target, wanted)
    return target / "deep_ep"


def requirement() -> str:
    """The line of the lock, with its hashes."""
    text = (LOCKS / "cpu-sglang.txt").read_text()
    found = re.search(r"^sgl-deep-ep==\S+ \\\n(?:    --hash=\S+(?: \\)?\n)+", text, re.MULTILINE)
    assert found is not None, "images/locks/cpu-sglang.txt names no sgl-deep-ep"
    return found[0]


def _install(target: Path, wanted: str) -> None:
    listed = Path(f"{target}.txt")
    listed.write_text(wanted)
    options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(target)]
    try:
        command = [str(find_uv()), "pip", "install", "--python-version", PYTHON, "--python-platform", PLATFORM]
    except BadConfig:
        # Of an environment that uv made, only the interpreter beneath has pip.
        python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        platform = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27)]
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--python-version", PYTHON]
        command += [word for name in platform for word in ("--platform", name)]
    command += [*options, "--requirement", str(listed)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, env=environment, check=False
    )
    if done.returncode:
        raise BadConfig(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}; see that PyPI can be reached")


def signatures(file: Path, name: str) -> dict[str, Signature]:
    """The methods of a class."""
    tree = ast.parse(file.read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name: _signature(node) for node in found.body if isinstance(node, ast.FunctionDef)}


def _signature(function: ast.FunctionDef) -> Signature:
    names = [argument.arg for argument in function.args.args]
    defaults: list[str | None] = [None] * (len(names) - len(function.args.defaults))
    defaults += [ast.unparse(default) for default in function.args.defaults]
    static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)
    pairs = list(zip(names, defaults, strict=True))[0 if static else 1 :]
    returned = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            if isinstance(node.value, ast.Tuple):
                returned.add(len(node.value.elts))
            elif not _delegates(node.value):
                returned.add(1)
    return Signature(dict(pairs), frozenset(returned))


def _delegates(value: ast.expr) -> bool:
    """Whether a function hands on what another method returns, which is looked at there."""
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith("self.inter")


def assigned(file: Path, name: str) -> set[str]:
    """Attributes that a class gives itself."""
    tree = ast.parse(file.read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
