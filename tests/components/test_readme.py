"""Component READMEs are what their sources say, and the sources say enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from components.readme import COMPONENTS, described, read_metadata, readme, stale
from configs.failure import BadConfig
from pipelines.compile import POST_TRAINING, read_ir


def test_the_committed_files_are_fresh() -> None:
    assert not stale(), "run `python -m components.readme`"


def test_every_component_is_described() -> None:
    folders = {path.parent for path in COMPONENTS.glob("*/__init__.py")}
    assert folders == set(described())


@pytest.mark.parametrize("folder", described(), ids=lambda folder: folder.name)
def test_metadata_agrees_with_the_folder(folder: Path) -> None:
    metadata = read_metadata(folder)
    assert metadata.name == folder.name
    assert (metadata.kind == "step") == (folder / "component.py").exists()
    assert (metadata.kind != "library") == (folder / "main.py").exists()


def test_the_image_is_the_one_the_pipeline_runs() -> None:
    executors = read_ir(POST_TRAINING)[0]["deploymentSpec"]["executors"]
    for folder in described():
        metadata = read_metadata(folder)
        if metadata.kind == "step":
            image = executors[f"exec-{metadata.name.replace('_', '-')}"]["container"]["image"]
            assert image.startswith(f"tandem/{metadata.image}:"), metadata.name


def test_inputs_and_outputs_are_those_of_the_signature() -> None:
    text = readme(COMPONENTS / "evaluate")
    assert "| `baseline` | URI of the checkpoint the loop started from. (String) |" in text
    assert "| `promoted` | `true` if the alias `champion` moved, else `false`. (String) |" in text
    assert "None" not in text


def test_a_key_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "metadata.yaml").write_text("name: odd\ndescription: x\nkind: library\nowner: me\n")
    with pytest.raises(BadConfig, match="components/odd/metadata.yaml: unknown key 'owner'"):
        read_metadata(folder)


def test_check_names_what_is_stale_and_writes_nothing(tmp_path: Path) -> None:
    copy = tmp_path / "components"
    for source in (
        COMPONENTS / "readme.py",
        COMPONENTS / "release" / "metadata.yaml",
        COMPONENTS / "release" / "main.py",
    ):
        target = copy / source.relative_to(COMPONENTS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    (copy / "__init__.py").write_text("")
    command = [sys.executable, "-m", "components.readme"]
    for arguments, code, out in (
        (["--check"], 1, "stale: components/release/README.md\n"),
        ([], 0, "wrote: components/release/README.md\n"),
        (["--check"], 0, ""),
    ):
        env = {"PYTHONPATH": f"{tmp_path}:{COMPONENTS.parent}", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == (code, out), done.stderr
