"""buildah with storage of its own, outside the checkout: builds without a daemon and leaves the host's images alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from configs.failure import BadConfig
from images.tools import require

# Images are made here, so there is no signature to check; a base image is pinned by its digest.
_POLICY = {"default": [{"type": "insecureAcceptAnything"}]}


def cache_folder() -> Path:
    """Where storage, base images and records of earlier builds lie: the user's cache folder."""
    return platformdirs.user_cache_path("tandem") / "images"


class Buildah:
    """One storage of images and layers.

    Attributes:
        folder: Where it lies.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Open the storage, making it if need be.

        Raises:
            BadConfig: buildah is not installed, or cannot keep images here.
        """
        require("buildah", "buildah")
        self.folder = folder or cache_folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._policy = self.folder / "policy.json"
        self._policy.write_text(json.dumps(_POLICY))
        self._driver = self._working_driver()

    def _working_driver(self) -> str:
        """overlay where the file system can carry it, else vfs, which copies every layer."""
        words = ""
        for driver in ("overlay", "vfs"):
            done = subprocess.run([*self._command(driver), "info"], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return driver
            words = done.stderr.strip()
        raise BadConfig(f"buildah cannot keep images in {self.folder}: {words}; run as root, or set XDG_CACHE_HOME")

    def _command(self, driver: str) -> list[str]:
        place = self.folder / "storage" / driver
        return ["buildah", "--root", str(place), "--runroot", str(place) + ".run", "--storage-driver", driver]

    def run(self, *arguments: str | Path) -> str:
        """Run a buildah command and return what it printed.

        Raises:
            BadConfig: it failed; its last words are in the message.
        """
        done = subprocess.run(
            [*self._command(self._driver), *map(str, arguments)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            words = done.stderr.strip().splitlines() or ["it left no words"]
            raise BadConfig(f"buildah {arguments[0]} failed: {words[-1]}")
        return done.stdout.strip()

    def has(self, name: str) -> bool:
        """Whether an image of that name is in the storage."""
        command = [*self._command(self._driver), "inspect", "--type", "image", name]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def image_id(self, name: str) -> str:
        """SHA-256 of the image's configuration, in hex."""
        return self._inspect(name)["FromImageID"]

    def labels(self, name: str) -> dict[str, str]:
        """The labels of an image."""
        return self._inspect(name)["OCIv1"]["config"].get("Labels", {})

    def size(self, name: str) -> int:
        """Bytes of all layers of an image, uncompressed."""
        return sum(layer["size"] for layer in json.loads(self._inspect(name)["Manifest"])["layers"])

    @contextmanager
    def mounted(self, name: str) -> Iterator[Path]:
        """The root file system of an image, while the context is open."""
        container = self.run("from", "--pull-never", name)
        try:
            yield Path(self.run("mount", container))
        finally:
            self.run("rm", container)

    def _inspect(self, name: str) -> dict[str, Any]:
        return json.loads(self.run("inspect", "--type", "image", name))

    def import_rootfs(self, archive: Path, name: str) -> None:
        """Make an image of one layer from a tar file of a root file system."""
        container = self.run("from", "scratch")
        try:
            self.run("add", "--quiet", container, archive, "/")
            self.run("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
            self.run("commit", "--quiet", "--signature-policy", self._policy, container, name)
        finally:
            self.run("rm", container)

    def build(
        self,
        containerfile: Path,
        context: Path,
        *,
        target: str,
        name: str,
        arguments: Mapping[str, str],
        contexts: Mapping[str, Path],
        volumes: Mapping[Path, str],
        log: Path,
    ) -> None:
        """Build one stage of a Containerfile.

        Args:
            containerfile: Its path.
            context: Folder whose files it copies.
            target: Stage to build.
            name: Name for the image.
            arguments: Build arguments.
            contexts: Folders by the name under which the Containerfile copies or mounts from them.
            volumes: Host paths that are mounted during RUN, by path inside; nothing of them stays in the image.
            log: File for everything the build prints.

        Raises:
            BadConfig: the build failed; its last words are in the message.
        """
        command = [
            *self._command(self._driver), "build", "--signature-policy", str(self._policy), "--isolation", "chroot",
            "--layers", "--format", "oci", "--target", target,
            *(f"--build-arg={key}={value}" for key, value in arguments.items()),
            *(f"--build-context={key}={path}" for key, path in contexts.items()),
            *(f"--volume={path}:{inside}" for path, inside in volumes.items()),
            "--tag", name, "--file", str(containerfile), str(context),
        ]  # fmt: skip
        with log.open("wb") as sink:
            code = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no words"]
            raise BadConfig(f"{containerfile.name}, stage {target}: the build failed: {lines[-1]} (all of it: {log})")

    def push(self, name: str, destination: str, *options: str | Path) -> None:
        """Copy an image to a registry or a folder (a destination with a transport, such as oci:FOLDER:NAME)."""
        self.run("push", "--quiet", "--signature-policy", self._policy, *options, name, destination)
