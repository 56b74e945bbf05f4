"""What must hold before a run starts; each check raises one sentence, or returns what is worth a note."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import redis

from components.experience.redis_server import redis_binary
from components.storage.layout import RunLayout
from components.storage.store import as_uri, open_store, split_uri
from configs.failure import BadConfig, BadData, ServiceGone
from configs.hardware import HardwareProfile, load_hardware
from configs.run import ModelConfig, RunConfig
from configs.stack import Stack, incompatibilities, load_stack

REDIS_LIMIT_S = 5.0
FLOAT_BYTES = 4
SPARE_BYTES = 512 * 2**20
"""Room for logs, events, the append-only file and the tracking database."""


def check_stack(config: RunConfig) -> tuple[Stack, HardwareProfile]:
    """Load the stack and the hardware profile, and refuse known clashes.

    Raises:
        BadConfig: either is unknown, or they do not work together.
    """
    stack, hardware = load_stack(config.stack), load_hardware(config.hardware)
    clashes = incompatibilities(stack, hardware)
    if clashes:
        more = f" (and {len(clashes) - 1} more)" if len(clashes) > 1 else ""
        raise BadConfig(f"stack {stack.name} on hardware {hardware.name}: {clashes[0]}{more}")
    return stack, hardware


def check_packages(stack: Stack, hardware: HardwareProfile) -> list[str]:
    """On one machine every role needs its packages here; elsewhere the images bring them.

    Returns:
        A note for each version that is not the one the stack was tested with.

    Raises:
        BadConfig: a package is not installed.
    """
    if hardware.instance_type:
        return []
    for package in ("torch", "transformers", "safetensors"):
        if util.find_spec(package) is None:
            raise BadConfig(f"package {package} is not installed in this environment; run `make setup` or install it")
    return list(_drift(stack))


def _drift(stack: Stack) -> Iterator[str]:
    here = {
        "python": platform.python_version(),
        "torch": metadata.version("torch").partition("+")[0],
        "transformers": metadata.version("transformers"),
    }
    for name, version in here.items():
        tested = getattr(stack, name)
        if tested and version != tested and not version.startswith(f"{tested}."):
            yield f"{name} is {version}; stack {stack.name} was tested with {tested}"


def check_disk(config: RunConfig, scratch: Path) -> None:
    """Refuse to start where the weights and checkpoints would fill the disk.

    Raises:
        BadConfig: the folder cannot be made, or the file system is short of room.
    """
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(scratch).free
    except OSError as error:
        raise BadConfig(
            f"{scratch}: cannot be made ({error.strerror}); set storage.scratch to a folder of yours"
        ) from None
    needed = disk_bytes(config)
    if free < needed:
        raise BadConfig(
            f"{scratch}: {free / 1e9:.1f} GB are free, but the run may need {needed / 1e9:.1f} GB; free some, set"
            " storage.scratch elsewhere, or lower weights.keep and train.keep_checkpoints"
        )


def disk_bytes(config: RunConfig) -> int:
    """An upper estimate of what a run leaves at once: versions, with the bases of differences and the folders that engines
    read, checkpoints (weights and two moments), exports."""
    folders = 2 + config.rollout.workers if config.weights.deltas else 0
    copies = config.weights.keep + config.weights.deltas + folders + 3 * (config.train.keep_checkpoints + 1) + 3
    return copies * FLOAT_BYTES * parameter_count(config.model) + SPARE_BYTES


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the policy without its embeddings, which the tokenizer decides."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    experts = 3 * model.num_experts * model.hidden_size * model.moe_intermediate_size
    return model.num_hidden_layers * (attention + experts + model.num_experts * model.hidden_size)


def check_storage(layout: RunLayout) -> None:
    """Write, read and delete a probe in the run's store.

    Raises:
        BadConfig: the store cannot be written.
        BadData: it gives back something else.
        ServiceGone: it does not answer.
    """
    key, probe = "preflight-probe", secrets.token_bytes(16)
    layout.store.write(key, probe)
    read = layout.store.read(key)
    layout.store.delete(key)
    if read != probe:
        raise BadData(f"{layout.uri}: gave back other bytes than were written; check the object store")


def check_checkpoint(config: RunConfig, checkpoint: str) -> None:
    """Check that a given checkpoint is there, and is the one the configuration names.

    Args:
        config: May name a checkpoint as well.
        checkpoint: The pipeline's parameter, which decides; empty makes a new model.

    Raises:
        BadConfig: nothing is there, or the two differ.
    """
    if config.model.checkpoint and as_uri(config.model.checkpoint) != (checkpoint and as_uri(checkpoint)):
        raise BadConfig(
            f"model.checkpoint is {config.model.checkpoint}, but the pipeline's parameter checkpoint is"
            f" {checkpoint or 'empty'}; pass the same to both"
        )
    if checkpoint:
        parent, key = split_uri(checkpoint)
        if f"{key}/config.json" not in open_store(parent, config.storage).list(key):
            raise BadConfig(f"{checkpoint}: holds no config.json; set model.checkpoint to a Hugging Face folder")


def check_redis(config: RunConfig) -> None:
    """Find a redis-server to start, or reach the one that is named.

    Raises:
        BadConfig: there is no binary, or the address is none.
        ServiceGone: the server does not answer within 5 s.
    """
    if not config.loop.redis_url:
        redis_binary()
        return
    try:
        client = redis.Redis.from_url(
            config.loop.redis_url,
            password=os.environ.get("REDIS_PASSWORD"),
            socket_connect_timeout=REDIS_LIMIT_S,
            socket_timeout=REDIS_LIMIT_S,
        )
    except ValueError as error:
        raise BadConfig(f"loop.redis_url: {error}; write redis://host:6379/0") from None
    try:
        client.ping()
    except redis.RedisError as error:
        raise ServiceGone(
            f"Redis at {config.loop.redis_url} does not answer ({error}); start it or empty loop.redis_url"
        ) from None
    finally:
        client.close()
