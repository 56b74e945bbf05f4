"""The weights store among machines that share no disk: versions in the run's store, folders of them on each machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from components.weights.manifest import Manifest, Shard, decoded
from components.weights.retention import divided
from components.weights.store import SHARD_BYTES, WeightsStore
from configs.failure import BadData

if TYPE_CHECKING:
    import torch

    from components.storage.store import Store

_MANIFEST = re.compile(r"manifests/v(\d{6,})\.json")
_TRANSFERS = 4
"""Shards on their way at the same time; the store splits large ones further."""


class SharedWeightsStore(WeightsStore):
    """Versions in a store.

    The one process that publishes has its versions in a folder of its machine too, and uploads from there. What is read
    is always the store's: a step that is repeated after a crash may have published the same number anew.

    Args:
        folder: On this machine.
        store: Where the versions are.
        deltas, dtype, shard_bytes: As for `WeightsStore`.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        deltas: int = 0,
        dtype: Literal["float32", "bfloat16"] = "float32",
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        super().__init__(folder, deltas, dtype, shard_bytes)
        self.store = store
        self._known: dict[int, Manifest] = {}
        self._unnamed: set[str] | None = None

    def publish(self, version: int, tensors: dict[str, torch.Tensor]) -> Manifest:
        manifest = super().publish(version, tensors)
        if self._stored_or_none(version) != manifest or self._absent(manifest):
            self._upload(manifest)
            # A trainer that is not quite dead yet may have pruned a shard that this version shares with an old one.
            if self._absent(manifest):
                self._upload(manifest)
        self._known[version] = manifest
        return manifest

    def versions(self) -> list[int]:
        keys = map(_MANIFEST.fullmatch, self.store.list("manifests"))
        return sorted(int(key[1]) for key in keys if key)

    def manifest(self, version: int) -> Manifest:
        return decoded(self.store.read(self._key(version)), version, self._place(version))

    def prune(self, current: int, keep: int, needed: Collection[int] = ()) -> None:
        super().prune(current, keep, needed)
        stay, go = divided(self.versions(), current - keep, needed, self._known_or_none)
        for version in go:
            self.store.delete(self._key(version))
            self._known.pop(version, None)
        if go or self._unnamed is None or self._unnamed:
            self._prune_shards(stay)

    def _prune_shards(self, stay: list[int]) -> None:
        """Delete what no manifest names and none named at the last look: between the two, a version may be coming."""
        manifests = [self._known_or_none(version) for version in stay]
        if None in manifests:
            return  # a damaged manifest may name any of them
        named = {shard.file for manifest in manifests if manifest is not None for shard in manifest.shards}
        unnamed = self._shards_there() - named
        for file in sorted(unnamed & (self._unnamed or set())):
            self.store.delete(f"shards/{file}")
            unnamed.discard(file)
        self._unnamed = unnamed

    def _upload(self, manifest: Manifest) -> None:
        with ThreadPoolExecutor(_TRANSFERS) as threads:
            list(
                threads.map(
                    lambda file: self.store.upload(self.shards / file, f"shards/{file}"), self._absent(manifest)
                )
            )
        self.store.write(self._key(manifest.version), msgspec.json.encode(manifest))

    @contextlib.contextmanager
    def _local(self, shards: list[Shard], afresh: bool) -> Iterator[dict[str, Path]]:
        with self.folders.making() as fetched:
            files = {shard.file: self.shards / shard.file for shard in shards}
            missing = [shard for shard in shards if afresh or not files[shard.file].exists()]
            files |= {shard.file: fetched / shard.file for shard in missing}
            with ThreadPoolExecutor(_TRANSFERS) as threads:
                list(
                    threads.map(
                        lambda shard: self.store.download(f"shards/{shard.file}", fetched / shard.file), missing
                    )
                )
            yield files

    def _check_shards(self, manifest: Manifest) -> None:
        if absent := self._absent(manifest):
            raise BadData(f"{self.store.uri}/shards/{absent[0]}: is missing; version {manifest.version} needs it")

    def _absent(self, manifest: Manifest) -> list[str]:
        """Shards of a version that the store lacks."""
        there = self._shards_there()
        return sorted({shard.file for shard in manifest.shards} - there)

    def _shards_there(self) -> set[str]:
        return {key.removeprefix("shards/") for key in self.store.list("shards")}

    def _stored_or_none(self, version: int) -> Manifest | None:
        try:
            return self.manifest(version)
        except BadData:
            return None

    def _known_or_none(self, version: int) -> Manifest | None:
        """A manifest without asking the store for one that this process, the only one to publish, has put there."""
        if version not in self._known and (manifest := self._stored_or_none(version)) is not None:
            self._known[version] = manifest
        return self._known.get(version)

    def _place(self, version: int) -> str:
        return f"{self.store.uri}/{self._key(version)}"

    @staticmethod
    def _key(version: int) -> str:
        return f"manifests/v{version:06d}.json"
