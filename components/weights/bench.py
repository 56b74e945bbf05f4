"""`tandem bench weights`: what a version costs on its way, beside a raw copy of the same bytes."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from components.storage.store import Store, open_store
from components.weights.bench_steps import difference_sizes
from components.weights.manifest import Manifest
from components.weights.shared_store import SharedWeightsStore
from components.weights.store import WeightsStore
from configs.run import StorageConfig

TENSOR_SHAPE = (1024, 768)
"""Of the tensors that are timed: about an expert's matrix in Qwen3-30B-A3B."""
SCALE, STEP = 0.02, 1e-6
"""Spread of the timed weights, and of the change from one version to the next: that of a learning rate of 1e-6."""


def measure(
    mib: int,
    rounds: int,
    steps: int,
    place: Path,
    store_uri: str = "",
    checkpoint: str = "",
) -> dict[str, Any]:
    """Times of a synthetic version, and sizes of differences after real steps.

    Times are taken in turn in this process; the median counts, of wall-clock seconds and of CPU-seconds (of all threads;
    on a busy machine these tell more). A reader begins without any folder, pulls a whole version, then the next one as
    a difference; either time it ends with a proven folder that an engine can read. The raw copy moves the files of the
    whole version from where the reader has them to where the reader puts them.

    Args:
        mib: Size of the timed version in bfloat16, MiB.
        rounds: Times each is measured.
        steps: Policy updates a learning rate of the sizes; 0 leaves them out.
        place: Folder to work in.
        store_uri: Store that machines share; empty for a weights store in `place`, as the roles of one machine have it.
        checkpoint: Folder of the policy that the steps begin with; empty for one that is warmed up first.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-bench-", dir=place) as folder:
        remote = open_store(store_uri, StorageConfig()).child(f"bench-{uuid.uuid4().hex}") if store_uri else None
        try:
            times, shape = _times(mib, rounds, Path(folder), remote)
        finally:
            if remote is not None:
                open_store(store_uri, StorageConfig()).delete(remote.uri.rpartition("/")[2])
        sizes = difference_sizes(steps, checkpoint, Path(folder)) if steps else {}
    figures = {"place": f"{place} ({_file_system(place)})", "store": store_uri or "in place", "rounds": rounds}
    ratios = {
        f"ratio_{name}": times[f"{name}_s"] / times[f"copy{'_cpu' * name.endswith('_cpu')}_s"]
        for name in ("pull_full", "pull_full_cpu", "pull_delta", "pull_delta_cpu")
    }
    return {**figures, **shape, **times, **ratios, **sizes}


def _times(mib: int, rounds: int, folder: Path, remote: Store | None) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of everything that is done with a version."""

    def opened(name: str) -> WeightsStore:
        if remote is None:
            return WeightsStore(folder / name, 1, "bfloat16")
        return SharedWeightsStore(folder / name, remote, 1, "bfloat16")

    before = _weights(mib)
    random = torch.Generator().manual_seed(1)
    after = {name: value + STEP * torch.randn(value.shape, generator=random) for name, value in before.items()}
    trainer = opened("trainer")
    whole, difference = trainer.publish(0, before), trainer.publish(1, after)
    spent: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        work()
        spent.setdefault(f"{name}_cpu_s", []).append(time.process_time() - cpu)
        spent.setdefault(f"{name}_s", []).append(time.perf_counter() - start)

    for number in range(rounds + 1):  # the first round is for warming up
        reader = opened("trainer" if remote is None else f"reader-{number}")
        publisher = WeightsStore(folder / f"publisher-{number}", 1, "bfloat16")
        timed("copy", lambda: _copy(whole, trainer.shards, remote, folder / "copy"))
        timed("pull_full", lambda: reader.folder(0))  # noqa: B023
        timed("pull_delta", lambda: reader.folder(1))  # noqa: B023
        timed("publish_full", lambda: publisher.publish(0, before))  # noqa: B023
        timed("publish_delta", lambda: publisher.publish(1, after))  # noqa: B023
        for used in (reader.folders.root, publisher.root, folder / "copy"):
            shutil.rmtree(used)
    shape = {
        "shape": f"{len(before)} tensors bfloat16 {list(TENSOR_SHAPE)} in {len(whole.shards)} shards",
        "setting": f"normal weights of spread {SCALE:g}, every one moved by a normal step of spread {STEP:g}",
        "full_bytes": whole.stored_bytes,
        "delta_bytes": difference.stored_bytes,
        "delta_share": difference.stored_bytes / whole.stored_bytes,
    }
    return {name: statistics.median(seconds[1:]) for name, seconds in sorted(spent.items())}, shape


def _weights(mib: int) -> dict[str, torch.Tensor]:
    """Tensors in float32 that take so many MiB in bfloat16."""
    random = torch.Generator().manual_seed(0)
    count = max(1, mib * 2**20 // (2 * TENSOR_SHAPE[0] * TENSOR_SHAPE[1]))
    return {
        f"model.weights.{number:04d}": SCALE * torch.randn(TENSOR_SHAPE, generator=random) for number in range(count)
    }


def _copy(manifest: Manifest, shards: Path, remote: Store | None, folder: Path) -> None:
    """A raw copy of a version's files: by the store's own download, or by the file system."""
    folder.mkdir()
    for shard in manifest.shards:
        if remote is not None:
            remote.download(f"shards/{shard.file}", folder / shard.file)
        else:
            shutil.copyfile(shards / shard.file, folder / shard.file)


def _file_system(place: Path) -> str:
    """Type of the file system that a folder is on."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    at = os.path.realpath(place)
    return max((each for each in mounts if Path(at).is_relative_to(each[0])), key=lambda each: len(each[0]))[1]
