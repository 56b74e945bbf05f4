"""One rank of `tandem bench experts`: `python -m components.train.bench_rank FOLDER RANK RANKS`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from components.experience.group import Group, Sample
from components.train.ranks import Ranks
from components.train.trainer import Trainer
from components.weights.policy import new_policy
from configs.run import RunConfig

VOCABULARY = 32


class Setting(msgspec.Struct):
    """What all ranks are told."""

    config: str
    """RunConfig as JSON."""
    rounds: int

    def write(self, folder: Path) -> None:
        """Leave it for the ranks."""
        (folder / "setting.json").write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> Setting:
        """What `write` left."""
        return msgspec.json.decode((folder / "setting.json").read_bytes(), type=cls)

    @staticmethod
    def times(folder: Path) -> list[float]:
        """Seconds of each update, as rank 0 left them."""
        return msgspec.json.decode((folder / "times.json").read_bytes(), type=list[float])


def measure_update(setting: Setting, ranks: Ranks, folder: Path) -> None:
    """Update a new policy `rounds` times, each with another random batch; rank 0 leaves the seconds."""
    config = RunConfig.from_json(setting.config)
    trainer = Trainer(new_policy(config.model, VOCABULARY, 0), config, ranks)
    times = []
    for number in range(setting.rounds + 1):
        groups = random_groups(config, number)
        ranks.wait()
        start = time.perf_counter()
        trainer.update(groups)
        ranks.wait()
        times.append(time.perf_counter() - start)
    if ranks.rank == 0:
        # The first round warms up.
        (folder / "times.json").write_bytes(msgspec.json.encode(times[1:]))


def random_groups(config: RunConfig, seed: int) -> list[Group]:
    """A batch of random completions with random rewards, prompts as long as completions."""
    random, length = np.random.default_rng(seed), config.rollout.max_new_tokens
    groups = []
    for number in range(config.train.batch_groups):
        samples = []
        for index in range(config.rollout.group_size):
            tokens = random.integers(3, VOCABULARY, length)
            sample = Sample.of(tokens, np.full(length, -np.log(VOCABULARY)), seed, "length")
            sample.reward = float(index % 2)
            samples.append(sample)
        prompt = random.integers(3, VOCABULARY, length).astype("<i4").tobytes()
        groups.append(Group(number, str(number), prompt, "", samples))
    return groups


def main() -> None:
    """Be one rank."""
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ |= {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    ranks = Ranks(rank, size, rank)
    if size > 1:
        ranks.open(dist.FileStore(str(folder / "meet"), size))
    measure_update(Setting.read(folder), ranks, folder)
    ranks.close()


if __name__ == "__main__":
    main()
