"""Folders of whole versions: what engines read, never half there, shared by the processes of a machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.warm_start.tokenizer import character_tokenizer
from components.weights.policy import checkpoint_tensors, load_policy, new_policy, save_policy
from components.weights.store import WeightsStore, digest_of, fingerprint
from configs.failure import BadData
from configs.run import ModelConfig
from tests.weights.test_differences import published


@pytest.mark.parametrize("limit", [1 << 30, 1 << 20], ids=["one-file", "several-files"])
def test_transformers_reads_the_folder_of_a_difference(tmp_path: Path, limit: int) -> None:
    tokenizer = character_tokenizer("0123456789+=")
    model = new_policy(ModelConfig(), tokenizer.get_vocab_size(), seed=1).eval()
    save_policy(model, tokenizer, tmp_path / "start")
    store = WeightsStore(tmp_path / "weights", deltas=4, shard_bytes=limit)
    store.publish(0, checkpoint_tensors(model))
    for parameter in model.parameters():
        parameter.data.view(-1)[:100] += 0.25
    published = store.publish(1, checkpoint_tensors(model))
    assert published.base is not None
    folder = store.folder(1, start=tmp_path / "start")
    assert (len(list(folder.glob("*.safetensors"))) == 1) == (limit == 1 << 30)
    ids = torch.tensor([[1, 7, 11, 3]])
    with torch.inference_mode():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, model(ids).logits)
    assert digest_of(fingerprint(checkpoint_tensors(load_policy(folder)))) == published.digest
    assert AutoTokenizer.from_pretrained(folder)("37+58=").input_ids == [1, 7, 11, 3, 9, 12, 14]


def test_the_index_tells_which_file_has_which_tensor(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=4, shard_bytes=8000)
    made = published(store, range(2))
    for version in (0, 1):
        folder = store.folder(version)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(made[version])
        assert {(folder / file).exists() for file in index["weight_map"].values()} == {True}
        assert index["metadata"]["total_size"] == store.manifest(version).bytes


def test_a_whole_version_is_linked_not_copied(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path)
    published(store, range(1))
    shard = store.shards / store.manifest(0).shards[0].file
    assert os.path.samefile(store.folder(0) / "model.safetensors", shard)


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    published(WeightsStore(tmp_path, deltas=4), range(3))
    one, other = WeightsStore(tmp_path), WeightsStore(tmp_path)
    inode = (one.folder(2) / "model.safetensors").stat().st_ino
    assert (other.folder(2) / "model.safetensors").stat().st_ino == inode


def test_older_folders_are_let_go_but_not_one_in_use(tmp_path: Path) -> None:
    published(WeightsStore(tmp_path, deltas=4), range(6))
    slow, fast = WeightsStore(tmp_path), WeightsStore(tmp_path)
    held = slow.folder(0)
    for version in range(1, 6):
        fast.folder(version)
    names = sorted(path.name[:7] for path in fast.folders.root.glob("v*"))
    assert names == ["v000000", "v000004", "v000005"]
    assert (held / "model.safetensors").exists()
    slow.folder(5)
    fast.prune(5, keep=4)
    assert sorted(path.name[:7] for path in fast.folders.root.glob("v*")) == ["v000004", "v000005"]


def test_pruning_takes_no_folder_that_is_in_use(tmp_path: Path) -> None:
    store, engine = WeightsStore(tmp_path), WeightsStore(tmp_path)
    published(store, range(2))
    held = engine.folder(0)
    published(store, range(6))
    store.prune(5, keep=2)
    assert store.versions() == [4, 5]
    assert (held / "model.safetensors").exists()


READER = """
import sys
from pathlib import Path
from components.weights.manifest import checksum
from components.weights.store import WeightsStore
store = WeightsStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
folder = store.folder(3)
held = store.mapped(3)
print(folder, all(checksum(held[entry.name]) == entry.xxh3 for entry in store.manifest(3).tensors))
"""


def test_processes_that_make_the_same_folder_at_once_all_end_with_it(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=9)
    tensors = {f"t{number}": torch.randn(500, 500) for number in range(20)}
    for version in range(4):
        tensors["t0"] = tensors["t0"] + 1
        store.publish(version, tensors)
    command = [sys.executable, "-c", READER, str(tmp_path)]
    readers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for reader in readers:
        assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.flush()
    found = [reader.communicate(timeout=60)[0].split() for reader in readers]
    assert found == [[str(store.folder(3)), "True"]] * 3
    assert [path.name[:7] for path in store.folders.root.iterdir() if path.is_dir()] == ["v000003"]


MAKER = """
import sys
from pathlib import Path
from components.weights.store import WeightsStore
store = WeightsStore(Path(sys.argv[1]))
print("ready", flush=True)
store.folder(1)
"""


def test_a_process_killed_while_it_makes_a_folder_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path, deltas=9)
    tensors = {f"t{number}": torch.randn(1000, 1000) for number in range(20)}
    store.publish(0, tensors)
    tensors["t0"] = tensors["t0"] + 1
    manifest = store.publish(1, tensors)
    for delay in (0.002, 0.01, 0.04):
        command = [sys.executable, "-c", MAKER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
            assert maker.stdout is not None and maker.stdout.readline() == "ready\n"
            time.sleep(delay)
            maker.send_signal(signal.SIGKILL)
        # Whatever has the version's name by now is whole.
        for path in store.folders.root.glob("v000001-*"):
            assert (path / "model.safetensors").stat().st_size > manifest.bytes
    assert store.check(1) == manifest
    assert fingerprint(store.load(1)) == manifest.tensors


PUBLISHER = """
import sys
from pathlib import Path
import torch
from components.weights.store import WeightsStore
store = WeightsStore(Path(sys.argv[1]), deltas=3, shard_bytes=1 << 20)
tensors = {f"t{number}": torch.full((500, 500), float(number)) for number in range(8)}
print("ready", flush=True)
for version in range(int(sys.argv[2])):
    tensors["t0"][version % 500] += 1
    store.publish(version, tensors)
    store.prune(version, 4)
"""


def test_a_publisher_killed_at_any_moment_leaves_whole_versions_only(tmp_path: Path) -> None:
    for delay in (0.05, 0.13):
        command = [sys.executable, "-c", PUBLISHER, str(tmp_path), "1000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
            assert publisher.stdout is not None and publisher.stdout.readline() == "ready\n"
            time.sleep(delay)
            publisher.send_signal(signal.SIGKILL)
        store = WeightsStore(tmp_path, deltas=3, shard_bytes=1 << 20)
        newest = store.versions()[-1:]
        for version in newest:
            assert store.check(version)
        tensors = {"t0": torch.randn(500, 500)}
        following = (newest or [0])[0] + 1
        manifest = store.publish(following, tensors)
        assert store.check(following) == manifest
        store.prune(following, 1)
        assert store.versions()[-1] == following


def test_readers_beside_a_publisher_that_prunes_get_whole_versions(tmp_path: Path) -> None:
    """Or one sentence, where a version went while it was read."""
    command = [sys.executable, "-c", PUBLISHER, str(tmp_path), "40"]
    store, read = WeightsStore(tmp_path), set()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as publisher:
        while publisher.poll() is None:
            for version in store.versions()[-1:]:
                with contextlib.suppress(BadData):
                    loaded = store.load(version)
                    assert loaded["t0"].sum() == 500 * (version + 1)
                    assert loaded["t7"].eq(7).all()
                    read.add(version)
    assert publisher.returncode == 0
    assert read, "nothing was read at all"
    assert store.check(39)


def test_a_version_that_was_never_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="v000003.json: version 3 cannot be read"):
        WeightsStore(tmp_path).folder(3)


def test_checking_and_mapping_need_no_torch(tmp_path: Path) -> None:
    """Broadcast's image has none."""
    published(WeightsStore(tmp_path, deltas=9), range(3))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from components.weights.store import WeightsStore\n"
        "store = WeightsStore(Path(sys.argv[1]))\n"
        "print(store.check(2).digest, len(store.mapped(2)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [WeightsStore(tmp_path).manifest(2).digest, "4"], done.stderr
