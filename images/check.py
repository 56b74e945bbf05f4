"""What an image must be able to do before it gets its name: each entry point imports, as the user it runs as."""

from __future__ import annotations

from images.buildah import Buildah

STEPS_AND_ROLES = {
    "control": ("preflight", "stage_data", "adopt_checkpoint", "rl_loop", "release", "reward", "broadcast"),
    "train": ("warm_start", "train", "publish_checkpoint", "evaluate"),
    "rollout": ("rollout",),
}
"""The folders of components/ that run in each image."""

_PROGRAM = """
import importlib, os, subprocess, sys, tempfile
assert os.getuid() == 10001 and os.getgid() == 10001, os.getuid()
tempfile.TemporaryFile(dir=os.environ["HOME"]).close()
for name in sys.argv[1:]:
    importlib.import_module(f"components.{name}.main")
from components.experience.redis_server import redis_binary
from configs.stack import known_stacks, load_stack
subprocess.run([redis_binary(), "--version"], check=True, stdout=subprocess.DEVNULL)
[load_stack(name) for name in known_stacks()]
"""


def check(buildah: Buildah, image: str, kind: str) -> None:
    """Import every entry point of `kind` in the image, from a folder that is not the application's.

    Raises:
        BadConfig: one cannot be imported, the user is not 10001, or redis-server does not start.
    """
    container = buildah.run("from", "--pull-never", image)
    try:
        buildah.run(
            "run", "--isolation", "chroot", "--workingdir", "/tmp", container, "--",
            "python3", "-c", _PROGRAM, *STEPS_AND_ROLES[kind],
        )  # fmt: skip
    finally:
        buildah.run("rm", container)
