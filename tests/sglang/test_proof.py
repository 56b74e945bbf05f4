"""What a real server reports of its weights, against what is computed from the checkpoint alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.weights.proof import difference, engine_checksums
from tests.broadcast import tiny_checkpoint
from tests.sglang.raw_server import RawServer

GEOMETRY = tiny_checkpoint.geometry(dtype="bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16; the recorded ones are float32."""
    folder = tmp_path_factory.mktemp("proof") / "policy"
    tiny_checkpoint.save(folder, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RawServer]:
    server = RawServer(folder, folder.parent / "server.log", "--dtype", "bfloat16", "--skip-tokenizer-init")
    yield server.wait()
    server.stop()


def expected(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    return engine_checksums({name: t.view(torch.uint8).numpy() for name, t in tensors.items()}, GEOMETRY, "cpu")


def test_a_server_holds_what_it_was_started_with_and_what_it_was_given(
    server: RawServer, folder: Path, tmp_path: Path
) -> None:
    first = expected(folder)
    assert difference(first, server.checksums()) == ""
    # One element of one expert.
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.5.up_proj.weight"][3, 7] += 1
    tiny_checkpoint.save(tmp_path, dtype="bfloat16")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert server.post("/update_weights_from_disk", model_path=str(tmp_path)).status_code == 200
    assert "'model.layers.1.mlp.experts.w13_weight'" in difference(first, server.checksums())
    assert difference(expected(tmp_path), server.checksums()) == ""
