"""Folders of whole versions on this machine, as Hugging Face has them: what engines read, shared by all processes here.

A folder appears by rename, whole and proven; two processes that make the same one at once both end with it. The folder
a process was last given stays for as long as that process lives and asks for no other, whatever others let go.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from components.weights.manifest import Manifest, TensorEntry, checksum
from components.weights.parallel import on_cores
from components.weights.shard import Part, ShardFile
from configs.failure import BadData

MAKING = ".making-"
INDEX = "model.safetensors.index.json"
_BUILD_WAIT_S = 60.0
"""Seconds to wait while another process makes a folder, before making it too."""
_ABANDONED_S = 600.0
"""Age at which a folder still being made is left over from a killed process, unless that one still holds it."""


class Folders:
    """Folders of versions below a root.

    Args:
        root: Made by the first use.
        keep: Folders that stay, the most recently used ones, besides those that a process was given.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self.keep = root, keep
        self._held: tuple[Path, int] | None = None

    def path(self, version: int, digest: str) -> Path:
        """Where the folder of a version is, or would be."""
        return self.root / f"v{version:06d}-{digest}"

    def hold(self, version: int, digest: str) -> Path | None:
        """The folder of a version, if it is there; it stays until this process holds another."""
        path = self.path(version, digest)
        if self._held is not None and self._held[0] == path and self._is(self._held[1], path):
            os.utime(path)
            return path
        descriptor = _locked(path, fcntl.LOCK_SH)
        if descriptor is None or not self._is(descriptor, path):
            if descriptor is not None:
                os.close(descriptor)
            return None
        os.utime(path)
        self.release()
        self._held = path, descriptor
        return path

    def release(self) -> None:
        """Hold nothing any more."""
        if self._held is not None:
            os.close(self._held[1])
            self._held = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for others that make a folder, because it may be the one wanted; not for ever, for one may hang."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / ".turn", os.O_CREAT | os.O_RDWR, 0o644)
        end = time.monotonic() + _BUILD_WAIT_S
        try:
            while not _try_lock(descriptor, fcntl.LOCK_EX) and time.monotonic() < end:
                time.sleep(0.005)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def making(self) -> Iterator[Path]:
        """A folder to fill; gone afterwards unless it was installed."""
        staging = Path(tempfile.mkdtemp(prefix=MAKING, dir=self.root))
        staging.chmod(0o755)
        descriptor = _locked(staging, fcntl.LOCK_SH)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if descriptor is not None:
                os.close(descriptor)

    def install(self, staging: Path, version: int, digest: str) -> None:
        """Give a filled folder its name; one that another process made meanwhile is as good."""
        try:
            os.rename(staging, self.path(version, digest))
        except OSError:
            if not self.path(version, digest).is_dir():
                raise

    def let_go(self) -> None:
        """Remove folders beyond those that stay."""
        aged = []
        for path in self.root.glob("v*-*"):
            with contextlib.suppress(FileNotFoundError):
                aged.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(aged, reverse=True)[self.keep :]:
            self.drop(path)
        for path in self.root.glob(f"{MAKING}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    self.drop(path)

    def drop(self, path: Path, used: bool = False) -> None:
        """Remove a folder, unless a process holds it.

        Args:
            path: The folder.
            used: Also if one does: what it holds is damaged.
        """
        if used and self._held is not None and self._held[0] == path:
            self.release()
        descriptor = _locked(path, fcntl.LOCK_EX)
        if descriptor is None and not used:
            return
        with contextlib.suppress(FileNotFoundError):
            # Renamed first, so that nobody finds it half empty.
            removed = Path(tempfile.mkdtemp(prefix=MAKING, dir=self.root)) / path.name
            os.rename(path, removed)
        shutil.rmtree(removed.parent, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)

    @staticmethod
    def _is(descriptor: int, path: Path) -> bool:
        """Whether an open folder is still the one of that name."""
        try:
            return os.path.samestat(os.fstat(descriptor), path.stat())
        except OSError:
            return False


class Whole:
    """The tensors of a whole version, in safetensors files.

    Args:
        files: The files; every tensor is in one of them.

    Raises:
        BadData: a file is missing, cut short or no safetensors file.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = [ShardFile(file) for file in files]
        self.parts: dict[str, tuple[ShardFile, Part]] = {
            part.name: (file, part) for file in self.files for part in file.parts()
        }

    @classmethod
    def in_folder(cls, folder: Path) -> Whole:
        """The version in a folder that `write_index` completed."""
        return cls(sorted(folder.glob("*.safetensors")))

    def data(self, entry: TensorEntry) -> np.ndarray:
        """A tensor's bytes: uint8 [n].

        Raises:
            BadData: it is missing, or of another type or shape.
        """
        file, part = self.parts.get(entry.name, (None, None))
        if file is None or part is None:
            named = self.files[0].path if self.files else "no file"
            raise BadData(f"{named}: lacks tensor '{entry.name}'")
        if (part.dtype, part.shape) != (entry.dtype, entry.shape):
            raise BadData(
                f"{file.path}: tensor '{entry.name}' is {part.dtype} {part.shape}, not {entry.dtype} {entry.shape}"
            )
        return file.data(entry.name)

    def verify(self, manifest: Manifest) -> None:
        """Compare every tensor with its checksum.

        Raises:
            BadData: one differs, is missing, or is none of the version's.
        """
        with on_cores(manifest.bytes) as threads:
            found = threads(lambda entry: checksum(self.data(entry)), manifest.tensors)
            for entry, actual in zip(manifest.tensors, found, strict=True):
                if actual != entry.xxh3:
                    file = self.parts[entry.name][0].path
                    raise BadData(
                        f"{file}: version {manifest.version} differs from its manifest at tensor '{entry.name}'"
                    )
        if odd := sorted(self.parts.keys() - {entry.name for entry in manifest.tensors}):
            raise BadData(f"{self.parts[odd[0]][0].path}: tensor '{odd[0]}' is none of version {manifest.version}")


def file_names(count: int) -> list[str]:
    """The names Hugging Face gives to a checkpoint's files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, files: dict[str, list[Part]]) -> None:
    """Write which file has which tensor, where there are several files.

    Args:
        folder: Where they are.
        files: Tensors by file name.
    """
    if len(files) > 1:
        places = {part.name: file for file, parts in files.items() for part in parts}
        size = sum(part.bytes for parts in files.values() for part in parts)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index))


def adopt(folder: Path, start: Path) -> None:
    """Put the other files of a policy folder (config.json, tokenizer) beside the weights, by link."""
    for source in start.iterdir():
        is_weights = source.suffix == ".safetensors" or source.name == INDEX
        if source.is_file() and not is_weights and not source.name.startswith(("_", ".")):
            with contextlib.suppress(FileExistsError):
                (folder / source.name).symlink_to(source.resolve())


def _locked(path: Path, kind: int) -> int | None:
    """An open folder with a lock, or None if it is not there or the lock is another's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    if _try_lock(descriptor, kind):
        return descriptor
    os.close(descriptor)
    return None


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
