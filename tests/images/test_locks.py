"""The locks of the images are fresh, agree with the checkout's lock, and keep torch out of the control image."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.stack import load_stack
from images.check import STEPS_AND_ROLES
from images.locks import REQUIREMENTS, image_locks, is_fresh, pins_of

LOCKS = image_locks()


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_fresh(name: str) -> None:
    assert is_fresh(LOCKS[name]), f"images/locks/{name}.txt is stale; run `make lock`"


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_hashed(name: str) -> None:
    entries = re.split(r"\n(?=\w)", LOCKS[name].path.read_text().split("\n", 1)[1])
    assert all("--hash=sha256:" in entry for entry in entries)


def test_cpu_images_have_the_versions_of_the_checkout() -> None:
    whole = pins_of(REQUIREMENTS)
    for name in ("control", "train"):
        for package, versions in pins_of(LOCKS[name].path).items():
            assert versions == whole[package]


def test_train_is_control_and_torch() -> None:
    control, train = (pins_of(LOCKS[name].path) for name in ("control", "train"))
    assert control.items() <= train.items()
    added = set(train) - set(control)
    assert {"torch", "transformers"} <= added
    assert not {"torch", "transformers", "triton", "kfp", "pytest"} & set(control)


def test_gpu_images_have_the_versions_of_the_stack() -> None:
    stack = load_stack("deepep-efa")
    train, rollout = (pins_of(LOCKS[f"deepep-efa-{kind}"].path) for kind in ("train", "rollout"))
    assert train["torch"] == rollout["torch"] == {stack.torch}
    assert train["transformers"] == rollout["transformers"] == {stack.transformers}
    assert rollout["sglang"] == {stack.sglang}
    assert train.items() <= rollout.items()
    for pins in (train, rollout):
        assert not {"nvidia-nccl-cu13", "sgl-deep-ep", "deep-ep"} & set(pins)


def test_control_needs_no_torch() -> None:
    blocked = f"""
import importlib, sys
class Blocked:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in {{"torch", "transformers", "kfp"}}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)
sys.meta_path.insert(0, Blocked())
for name in {STEPS_AND_ROLES["control"]}:
    importlib.import_module(f"components.{{name}}.main")
import components.report.page, components.tracking.server, kubernetes
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
