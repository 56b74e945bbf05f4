"""Assembly: the folder of a whole version, linked to its shards or made by applying differences, proven on the way."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from components.weights import delta
from components.weights.folders import Whole, file_names, write_index
from components.weights.manifest import Manifest, TensorEntry, as_words, checksum
from components.weights.parallel import SERIAL
from components.weights.publication import split_name
from components.weights.shard import Part, ShardFile, header_of, is_intact, planned, write_file
from configs.failure import BadData

Item = TypeVar("Item")
Result = TypeVar("Result")


class Assembly:
    """How to make a version's folder.

    Args:
        chain: Versions, oldest first; the last is the one wanted. All but the first are differences; the first is one
            only if there is a folder to apply it to.
        start: Folder of the version that the first is the difference from.
        files: Local files of their shards by name.
        limit: Bytes a file may have.
    """

    def __init__(self, chain: list[Manifest], start: Path | None, files: dict[str, Path], limit: int) -> None:
        self.wanted, self.limit = chain[-1], limit
        self.shards = [(files[shard.file], shard) for each in chain for shard in each.shards]
        whole = [files[shard.file] for shard in chain[0].shards]
        self.whole = Whole(whole) if start is None else Whole.in_folder(start)
        differences = chain if start is not None else chain[1:]
        self.differences = [Difference([files[shard.file] for shard in each.shards]) for each in differences]

    def make(self, folder: Path) -> None:
        """Fill a folder.

        Raises:
            BadData: what comes out differs from the manifest, or cannot be made; names file and tensor.
        """
        if any(each.frames for each in self.differences):
            self._apply(folder)
        else:
            self._link(folder)

    def _link(self, folder: Path) -> None:
        self.whole.verify(self.wanted)
        files = {}
        for file, name in zip(self.whole.files, file_names(len(self.whole.files)), strict=True):
            _link(file.path, folder / name)
            files[name] = list(file.parts())
        write_index(folder, files)

    def _apply(self, folder: Path) -> None:
        entries = {entry.name: entry for entry in self.wanted.tensors}
        for each in self.differences:
            each.check_names(entries)
        parts = planned([Part(e.name, e.dtype, e.shape, e.bytes) for e in self.wanted.tensors], self.limit)
        files = dict(zip(file_names(len(parts)), parts, strict=True))
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            threads = pool if self.wanted.bytes > SERIAL else None
            for name, held in files.items():
                write_file(folder / name, self._pieces(held, entries, threads))
        write_index(folder, files)

    def _pieces(
        self, parts: list[Part], entries: dict[str, TensorEntry], pool: ThreadPoolExecutor | None
    ) -> Iterator[bytes | np.ndarray]:
        yield header_of(parts)
        yield from _ahead(pool, self._tensor, [entries[part.name] for part in parts])

    def _tensor(self, entry: TensorEntry) -> np.ndarray:
        """A tensor's elements with all differences applied, proven."""
        place = self.whole.parts[entry.name][0].path if entry.name in self.whole.parts else None
        words = as_words(self.whole.data(entry), entry.dtype)
        for difference in self.differences:
            frames = difference.frames.get(entry.name)
            if frames is not None:
                place = difference.files[entry.name]
                try:
                    words = delta.apply(words, frames)
                except delta.Damaged as error:
                    raise BadData(
                        f"{place}: the difference of tensor '{entry.name}' in version {self.wanted.version} {error}"
                    ) from None
        if checksum(words) != entry.xxh3:
            # Any file on the way may be the reason; the one that is not what it is named is.
            place = next((file for file, shard in self.shards if not is_intact(file, shard)), place)
            raise BadData(f"{place}: version {self.wanted.version} differs from its manifest at tensor '{entry.name}'")
        return words


class Difference:
    """The shards of a version that is stored as a difference.

    Args:
        paths: Local files.

    Raises:
        BadData: one is missing, cut short or no safetensors file.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.frames: dict[str, dict[str, np.ndarray]] = {}
        self.files: dict[str, Path] = {}
        for shard in map(ShardFile, paths):
            for part in shard.parts():
                plane, tensor = split_name(part.name)
                self.frames.setdefault(tensor, {})[plane] = shard.data(part.name)
                self.files[tensor] = shard.path

    def check_names(self, entries: dict[str, TensorEntry]) -> None:
        """See that it changes no tensor that the version does not have."""
        if odd := sorted(self.frames.keys() - entries.keys()):
            raise BadData(f"{self.files[odd[0]]}: changes tensor '{odd[0]}', which the version does not have")


def _link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise BadData(f"{source}: was removed while it was read") from None
    except OSError:
        shutil.copyfile(source, target)


def _ahead(pool: ThreadPoolExecutor | None, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Results in order, a few of them made in advance: all of them at once would need the memory of a model."""
    if pool is None:
        yield from map(work, items)
        return
    coming: deque[Future[Result]] = deque()
    for item in items:
        coming.append(pool.submit(work, item))
        if len(coming) > 8:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()
