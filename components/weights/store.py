"""The weights store: every version of the policy as safetensors shards and a manifest that lets anyone check it.

`manifests/v000012.json` is a version; `shards/<xxh3-128>.safetensors` is what manifests name, by content, so that equal
bytes are there once. A manifest is written last and in one step: a version counts once it is there. One process
publishes and prunes; any number read. What a reader needs of a version it gets as a folder of whole tensors
(`folders/`, a cache of this machine), made from the newest folder or whole version that its differences lead back to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from components.weights.assembly import Assembly
from components.weights.folders import Folders, Whole, adopt
from components.weights.manifest import Manifest, Shard, TensorEntry, decoded, digest_of, fingerprint
from components.weights.publication import Published, Snapshot, kept, snapshot, write_difference, write_whole
from components.weights.retention import divided
from components.weights.shard import is_intact
from configs.failure import BadConfig, BadData

if TYPE_CHECKING:
    import torch

    from components.storage.layout import RunLayout

__all__ = ["Manifest", "TensorEntry", "WeightsStore", "digest_of", "fingerprint", "open_weights"]

CACHED = 2
"""Folders of whole versions a machine keeps, besides those in use."""
SHARD_BYTES = 1 << 30
"""Largest size of a shard."""


def open_weights(layout: RunLayout) -> WeightsStore:
    """The weights store that the roles of a run share: a folder on one machine, the run's store among pods."""
    settings = layout.config.weights
    if layout.scratch_is_shared:
        return WeightsStore(layout.weights, settings.deltas, settings.dtype)
    from components.weights.shared_store import SharedWeightsStore

    return SharedWeightsStore(layout.weights, layout.store.child("weights"), settings.deltas, settings.dtype)


class WeightsStore:
    """Versions of one run's policy in a folder.

    Args:
        folder: Made by the first publication.
        deltas: Versions in a row that may be stored as the difference from the one before.
        dtype: What float32 tensors are published as.
        shard_bytes: Largest size of a shard; a larger tensor has one of its own.
    """

    def __init__(
        self,
        folder: Path,
        deltas: int = 0,
        dtype: Literal["float32", "bfloat16"] = "float32",
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.root, self.deltas, self.dtype, self.shard_bytes = folder, deltas, dtype, shard_bytes
        self.shards = folder / "shards"
        self.folders = Folders(folder / "folders", CACHED)
        self._last: Published | None = None
        self._read: dict[int, tuple[tuple[int, int, int], Manifest]] = {}

    def publish(self, version: int, tensors: dict[str, torch.Tensor]) -> Manifest:
        """Write a version (also over an earlier one of the same number, which a repeated step makes anew).

        Raises:
            BadConfig: the folder cannot be written, or the disk is full.
        """
        taken = snapshot(tensors, self.dtype)
        try:
            with self._writing():
                published = self._unchanged(version, taken) or self._write(version, taken)
        except OSError as error:
            raise BadConfig(
                f"{self.root}: version {version} cannot be written ({error}); free space or mend the permissions of"
                " storage.scratch, then resume the run"
            ) from None
        # Until the next one, training writes into the memory that a snapshot may be a view of.
        self._last = published._replace(snapshot=kept(taken, tensors)) if self.deltas else None
        return published.manifest

    def path(self, version: int) -> Path:
        """Manifest of a version."""
        return self.root / "manifests" / f"v{version:06d}.json"

    def versions(self) -> list[int]:
        """Complete versions, ascending."""
        return self._versions_here()

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version.

        Raises:
            BadData: the version is not in the store, or its manifest is damaged.
        """
        file = self.path(version)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise BadData(f"{file}: version {version} cannot be read ({error.strerror or error})") from None
        return decoded(content, version, str(file))

    def check(self, version: int) -> Manifest:
        """Compare a version with its manifest, tensor by tensor, differences applied (needs no torch).

        Raises:
            BadData: a tensor is missing or differs, or a file is missing.
        """
        manifest = self.manifest(version)
        known = self.folders.hold(version, manifest.digest)
        if known is None:
            self._made(manifest)
            return manifest
        self._check_shards(manifest)
        try:
            Whole.in_folder(known).verify(manifest)
        except BadData:
            # The folder is but a copy: what the store holds decides.
            self.folders.drop(known, used=True)
            self._made(manifest)
        return manifest

    def folder(self, version: int, start: Path | None = None) -> Path:
        """A local Hugging Face folder with a version's whole tensors, proven, for an engine to read.

        It is shared with the other processes of this machine, and stays until this object is asked for another version.

        Args:
            version: In the store.
            start: Folder of the policy the run starts from, whose config.json and tokenizer are to be there too.

        Raises:
            BadData: the version is not in the store or damaged.
        """
        folder = self._ready(self.manifest(version))
        if start is not None:
            try:
                adopt(folder, start)
            except OSError as error:
                raise self._unwritable(version, error) from None
        return folder

    def load(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors of a version, by checkpoint name.

        Raises:
            BadData: the version is not in the store or damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(self.folder(version).glob("*.safetensors")):
            try:
                tensors |= load_file(file)
            except (OSError, SafetensorError) as error:
                raise BadData(f"{file}: version {version} cannot be read ({error})") from None
        return tensors

    def mapped(self, version: int) -> dict[str, np.ndarray]:
        """The bytes of a version's tensors by name, uint8 [n], read-only and mapped from its folder (needs no torch).

        Raises:
            BadData: the version is not in the store or damaged.
        """
        manifest = self.manifest(version)
        whole = Whole.in_folder(self._ready(manifest))
        return {entry.name: whole.data(entry) for entry in manifest.tensors}

    def prune(self, current: int, keep: int, needed: Collection[int] = ()) -> None:
        """Delete versions older than the newest `keep` up to `current`, and shards that none of the rest names.

        Later ones stay: they are of the time before a crash, and the repeated steps come to them again.

        Args:
            current: The version just published.
            keep: Versions to keep.
            needed: Others to keep, because an engine or a resume reads them; what these are differences from stays too.
        """
        if self.root.is_dir():
            with self._writing():
                self._prune_here(current, keep, needed)
            if self.folders.root.is_dir():
                self.folders.let_go()

    def _versions_here(self) -> list[int]:
        return sorted(int(path.stem[1:]) for path in (self.root / "manifests").glob("v[0-9]*.json"))

    def _prune_here(self, current: int, keep: int, needed: Collection[int]) -> None:
        stay, go = divided(self._versions_here(), current - keep, needed, self._manifest_or_none)
        for version in go:
            self.path(version).unlink(missing_ok=True)
            self._read.pop(version, None)
        named = self._named(stay)
        if named is not None and self.shards.is_dir():
            for file in self.shards.iterdir():
                if file.name not in named:
                    file.unlink(missing_ok=True)

    def _named(self, versions: Collection[int]) -> set[str] | None:
        """Shards that these versions name; None if that cannot be told, because a manifest is damaged."""
        manifests = [self._manifest_or_none(version) for version in versions]
        if None in manifests:
            return None
        return {shard.file for manifest in manifests if manifest is not None for shard in manifest.shards}

    def _manifest_or_none(self, version: int) -> Manifest | None:
        """A manifest in the folder, read once for as long as its file is the same."""
        try:
            found = self.path(version).stat()
            file = found.st_ino, found.st_mtime_ns, found.st_size
            if self._read.get(version, (None,))[0] != file:
                self._read[version] = file, WeightsStore.manifest(self, version)
            return self._read[version][1]
        except (OSError, BadData):
            self._read.pop(version, None)
            return None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Alone among the processes of this machine that publish or prune here."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / ".writing", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _unchanged(self, version: int, taken: Snapshot) -> Published | None:
        """What is there of a version, if it is whole and has these weights: a step repeated after a crash came to it."""
        manifest = self._manifest_or_none(version)
        if manifest is None or manifest.digest != taken.digest:
            return None
        each, depth = manifest, 0
        while True:
            if not all(is_intact(self.shards / shard.file, shard) for shard in each.shards):
                return None
            if each.base is None:
                return Published(manifest, taken, depth)
            before = self._manifest_or_none(each.base.version)
            depth += 1
            if before is None or before.digest != each.base.digest or depth > self.deltas:
                return None
            each = before

    def _write(self, version: int, taken: Snapshot) -> Published:
        staging = Path(tempfile.mkdtemp(prefix=".publish-", dir=self.root))
        try:
            last, made = self._last, None
            if last is not None and self._may_follow(last, version):
                made = write_difference(taken, last, staging, self.shard_bytes, self.shards)
            if made is not None and last is not None:
                shards, base = made
                manifest = Manifest(version, version, taken.digest, taken.entries, shards, "difference", base)
            else:
                for torn in staging.iterdir():
                    torn.unlink()
                shards = write_whole(taken, staging, self.shard_bytes, self.shards)
                manifest = Manifest(version, version, taken.digest, taken.entries, shards)
            self._install(staging, manifest)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return Published(manifest, taken, last.depth + 1 if made is not None and last is not None else 0)

    def _may_follow(self, last: Published, version: int) -> bool:
        """Whether a version may be stored as the difference from the last one."""
        there = self._manifest_or_none(last.manifest.version)
        is_there = there is not None and there.digest == last.manifest.digest
        return last.depth < self.deltas and last.manifest.version < version and is_there

    def _install(self, staging: Path, manifest: Manifest) -> None:
        self.shards.mkdir(exist_ok=True)
        self.path(manifest.version).parent.mkdir(exist_ok=True)
        for file in staging.iterdir():
            file.rename(self.shards / file.name)
        written = staging / "manifest.json"
        written.write_bytes(msgspec.json.encode(manifest))
        written.rename(self.path(manifest.version))

    def _ready(self, manifest: Manifest) -> Path:
        """The folder of a version, held."""
        try:
            return self.folders.hold(manifest.version, manifest.digest) or self._made(manifest)
        except OSError as error:
            raise self._unwritable(manifest.version, error) from None

    def _made(self, manifest: Manifest) -> Path:
        """Make the folder of a version, from the nearest one that is there or a whole version."""
        with self.folders.turn():
            if (folder := self.folders.hold(manifest.version, manifest.digest)) is not None:
                return folder  # another process made it meanwhile
            try:
                self._assemble(manifest, use_folders=True)
            except BadData:
                # A folder that it started from may be damaged; the store itself decides.
                self._assemble(manifest, use_folders=False)
            folder = self.folders.hold(manifest.version, manifest.digest)
            self.folders.let_go()
        if folder is None:
            raise BadData(f"{self.folders.root}: version {manifest.version} was removed as soon as it was made")
        return folder

    def _unwritable(self, version: int, error: OSError) -> BadConfig:
        return BadConfig(
            f"{self.folders.root}: the folder of version {version} cannot be written ({error}); free space or mend the"
            " permissions of storage.scratch, then resume the run"
        )

    def _assemble(self, manifest: Manifest, use_folders: bool) -> None:
        chain, start = self._chain(manifest, use_folders)
        with self.folders.making() as staging:
            with self._local([shard for each in chain for shard in each.shards], afresh=not use_folders) as files:
                Assembly(chain, start, files, self.shard_bytes).make(staging)
            self.folders.install(staging, manifest.version, manifest.digest)

    def _chain(self, manifest: Manifest, use_folders: bool) -> tuple[list[Manifest], Path | None]:
        """Versions from the one to start with to `manifest`, and the folder to apply all of them to (or none: the first
        is whole).

        Raises:
            BadData: a version that another is the difference from is missing, or is not the one it was.
        """
        chain = [manifest]
        while (base := chain[0].base) is not None:
            folder = self.folders.path(base.version, base.digest)
            if use_folders and folder.is_dir():
                return chain, folder
            version, place = chain[0].version, f"version {chain[0].version} is the difference from {base.version}"
            if base.version >= version:
                raise BadData(f"{self._place(version)}: {place}, which is no earlier one; the manifest is damaged")
            try:
                before = self.manifest(base.version)
            except BadData as error:
                raise BadData(f"{self._place(version)}: {place}, but {error.sentence}") from None
            if before.digest != base.digest:
                raise BadData(
                    f"{self._place(version)}: {place} with digest {base.digest}, but the store holds another version"
                    f" {base.version}, with digest {before.digest}"
                )
            chain.insert(0, before)
        return chain, None

    @contextlib.contextmanager
    def _local(self, shards: list[Shard], afresh: bool) -> Iterator[dict[str, Path]]:
        """Local files of shards by name.

        Args:
            afresh: Not those that an earlier call brought here.
        """
        yield {shard.file: self.shards / shard.file for shard in shards}

    def _place(self, version: int) -> str:
        """Where a version's manifest is, for a message."""
        return str(self.path(version))

    def _check_shards(self, manifest: Manifest) -> None:
        """See that a version's own shards are there; those of a difference also, that they are what they are named."""
        for shard in manifest.shards:
            file = self.shards / shard.file
            try:
                size = file.stat().st_size
            except OSError:
                size = None
            if size != shard.bytes:
                found = "is missing" if size is None else f"has {size} bytes, not {shard.bytes}"
                raise BadData(f"{file}: {found}; version {manifest.version} needs it")
            if manifest.base is not None and not is_intact(file, shard):
                raise BadData(f"{file}: is not what its name says; version {manifest.version} needs it")
