"""The weights store: every version of the policy as safetensors beside a manifest that lets anyone check it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import safetensors
import xxhash

from configs.failure import BadConfig, BadData

if TYPE_CHECKING:
    import torch

    from components.storage.layout import RunLayout
    from components.storage.store import Store


CACHED = 2
"""Versions a machine keeps of those it fetched."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a version."""

    name: str
    dtype: str
    """As safetensors writes it: F32, BF16, …"""
    shape: list[int]
    xxh3: str
    """xxh3-128 of the tensor's bytes, hexadecimal."""


class Manifest(msgspec.Struct, frozen=True):
    """What a version is made of."""

    version: int
    step: int
    """Training step that made it."""
    digest: str
    """xxh3-128 over the names, types, shapes and checksums of all tensors in order of name: equal digests, equal weights."""
    tensors: list[TensorEntry]
    base: int | None = None
    """Version a delta applies to; None for a full version."""

    @property
    def bytes(self) -> int:
        """Size of the tensors in bytes."""
        size = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
        total = 0
        for tensor in self.tensors:
            count = size[tensor.dtype]
            for extent in tensor.shape:
                count *= extent
            total += count
        return total


def fingerprint(tensors: dict[str, torch.Tensor]) -> list[TensorEntry]:
    """Checksums of tensors in memory, in order of name."""
    import torch

    dtypes = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32"}
    return [
        TensorEntry(
            name,
            dtypes[tensor.dtype],
            list(tensor.shape),
            xxhash.xxh3_128_hexdigest(tensor.detach().contiguous().view(torch.uint8).numpy().data),
        )
        for name, tensor in sorted(tensors.items())
    ]


def digest_of(entries: list[TensorEntry]) -> str:
    """One checksum for all tensors (entries in order of name)."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(entries))


def open_weights(layout: RunLayout) -> WeightsStore:
    """The weights store that the roles of a run share: a folder on one machine, the run's store among pods."""
    if layout.scratch_is_shared:
        return WeightsStore(layout.weights)
    return SharedWeightsStore(layout.weights, layout.store.child("weights"))


class WeightsStore:
    """Versions of one run's policy in a folder.

    A version is complete once its folder has its final name: it is written beside and renamed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, version: int, tensors: dict[str, torch.Tensor]) -> Manifest:
        """Write a version (also over an earlier one of the same number, which a repeated step makes anew).

        Raises:
            BadConfig: the folder cannot be written, or the disk is full.
        """
        from safetensors.torch import save_file

        entries = fingerprint(tensors)
        manifest = Manifest(version, version, digest_of(entries), entries)
        if version in self.versions() and self.manifest(version).digest == manifest.digest:
            return manifest  # a step repeated after a crash came to the same weights
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=".publish-", dir=self.folder))
            try:
                # Views of fused experts share storage, which safetensors refuses: each becomes a tensor of its own.
                save_file(
                    {name: tensor.detach().clone() for name, tensor in tensors.items()}, staging / "model.safetensors"
                )
                (staging / "manifest.json").write_bytes(msgspec.json.encode(manifest))
                if (target := self.path(version)).exists():
                    shutil.rmtree(target)
                os.rename(staging, target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        except (OSError, safetensors.SafetensorError) as error:
            raise BadConfig(
                f"{self.folder}: version {version} cannot be written ({error}); free space or mend the permissions of"
                " storage.scratch, then resume the run"
            ) from None
        return manifest

    def path(self, version: int) -> Path:
        """Folder of a version."""
        return self.folder / f"v{version:06d}"

    def versions(self) -> list[int]:
        """Complete versions, ascending."""
        return sorted(int(path.parent.name[1:]) for path in self.folder.glob("v[0-9]*/manifest.json"))

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version.

        Raises:
            BadData: the version is not in the store, or its manifest is damaged.
        """
        file = self.path(version) / "manifest.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise BadData(f"{file}: version {version} cannot be read ({error})") from None

    def check(self, version: int) -> Manifest:
        """Compare a version's file with its manifest, tensor by tensor (needs no torch).

        Raises:
            BadData: a tensor is missing or differs.
        """
        manifest = self.manifest(version)
        file = self.path(version) / "model.safetensors"
        try:
            stored = safetensors.deserialize(file.read_bytes())
        except (OSError, safetensors.SafetensorError) as error:
            raise BadData(f"{file}: version {version} cannot be read ({error})") from None
        found = sorted(
            (
                TensorEntry(name, part["dtype"], part["shape"], xxhash.xxh3_128_hexdigest(part["data"]))
                for name, part in stored
            ),
            key=lambda entry: entry.name,
        )
        if found != manifest.tensors:
            odd = sorted(
                {e.name for e in found if e not in manifest.tensors}
                | {e.name for e in manifest.tensors if e not in found}
            )
            raise BadData(f"{file}: version {version} differs from its manifest at tensor '{odd[0]}'")
        if digest_of(found) != manifest.digest:
            raise BadData(f"{file}: version {version} has another digest than its manifest says")
        return manifest

    def load(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors of a version, by checkpoint name.

        Raises:
            BadData: they cannot be read.
        """
        from safetensors.torch import load_file

        file = self.path(version) / "model.safetensors"
        try:
            return load_file(file)
        except (OSError, safetensors.SafetensorError) as error:
            raise BadData(f"{file}: version {version} cannot be read ({error})") from None

    def prune(self, current: int, keep: int) -> None:
        """Delete versions older than the newest `keep` up to `current`.

        Later ones stay: they are of the time before a crash, and the repeated steps come to them again.
        """
        for path in self.folder.glob("v[0-9]*"):
            if int(path.name[1:]) <= current - keep:
                # Without its manifest it no longer counts as a version, should the rest of this be cut short.
                (path / "manifest.json").unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)


class SharedWeightsStore(WeightsStore):
    """Versions in a store, with a folder of this machine as a cache.

    A version in the cache counts only as long as its manifest is the store's: a step that is repeated after a crash may
    have published the same number anew.
    """

    def __init__(self, folder: Path, store: Store) -> None:
        super().__init__(folder)
        self.store = store

    def publish(self, version: int, tensors: dict[str, torch.Tensor]) -> Manifest:
        manifest = super().publish(version, tensors)
        if version not in self.versions() or self._stored(version) != manifest:
            self.store.upload(self.path(version), self._key(version))
        return manifest

    def versions(self) -> list[int]:
        keys = self.store.list()
        return sorted(int(key[1:7]) for key in keys if re.fullmatch(r"v\d{6}/_digests\.json", key))

    def manifest(self, version: int) -> Manifest:
        self._fetch(version)
        return super().manifest(version)

    def load(self, version: int) -> dict[str, torch.Tensor]:
        self._fetch(version)
        return super().load(version)

    def prune(self, current: int, keep: int) -> None:
        super().prune(current, keep)
        for version in self.versions():
            if version <= current - keep:
                self.store.delete(self._key(version))

    def _fetch(self, version: int) -> None:
        """Bring a version into the cache, and let older ones go."""
        wanted = self._stored(version)
        file = self.path(version) / "manifest.json"
        if file.exists() and msgspec.json.decode(file.read_bytes(), type=Manifest) == wanted:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store.download(self._key(version), self.path(version))
        super().prune(version, CACHED)

    def _stored(self, version: int) -> Manifest:
        key = f"{self._key(version)}/manifest.json"
        try:
            return msgspec.json.decode(self.store.read(key), type=Manifest)
        except msgspec.DecodeError as error:
            raise BadData(f"{self.store.uri}/{key}: version {version} cannot be read ({error})") from None

    def _key(self, version: int) -> str:
        return f"v{version:06d}"
