"""The programs of the cluster, built from Go modules once into a cache outside the checkout.

Every part has a folder modules/PART with go.mod and go.sum, which pin each dependency by hash. A part's folder in the
cache is named after the hash of those files and of how it is built, and holds its binaries and, where upstream ships
manifests, `manifests.json` as rendered by kustomize. One build at a time per part; a part in the cache needs no Go.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import filelock
import yaml

from configs.failure import BadConfig
from tests import go_toolchain
from tests.cluster import layout
from tests.storage.s3_server import seaweedfs

MODULES = Path(__file__).parent / "modules"
BUILD_LIMIT_S = 1800
HEARTBEAT_S = 60
FREE_BYTES = 25 * 2**30
"""What a cold build of everything needs for Go's caches and the binaries."""

_ARGO = "github.com/argoproj/argo-workflows/v4"
_CNI = "github.com/containernetworking/plugins/plugins"
_CONTAINERD = "github.com/containerd/containerd/v2"


@dataclasses.dataclass(frozen=True)
class Part:
    """One Go module that pins an upstream project, and what is built from it.

    Attributes:
        packages: Go packages to build; a binary is named after the last element of its package.
        output: Name of the only binary where it differs from that.
        module: Upstream module, of which `version_variables` and `manifests` speak.
        manifests: Kustomizations inside the module that are rendered into manifests.json.
        version_variables: Go packages whose `gitVersion` is set to the module's version.
        addition: File of modules/PART and where in the module it goes.
    """

    name: str
    packages: tuple[str, ...]
    output: str = ""
    tags: str = ""
    module: str = ""
    manifests: tuple[str, ...] = ()
    version_variables: tuple[str, ...] = ()
    addition: tuple[str, str] | None = None

    @property
    def folder(self) -> Path:
        """Where the part lies once it is built."""
        return layout.CACHE / f"{self.name}-{self.key}"

    @property
    def key(self) -> str:
        """Twelve hex digits over everything that decides what the build produces."""
        digest = hashlib.sha256(json.dumps([RECIPE, dataclasses.asdict(self), FLAGS, LINK_FLAGS]).encode())
        for path in sorted((MODULES / self.name).rglob("*")):
            if path.is_file():
                digest.update(path.relative_to(MODULES).as_posix().encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:12]

    def binary(self, name: str = "") -> Path:
        """Path of one of its programs; its only one without a name."""
        return self.folder / (name or self.output or self.packages[0].rsplit("/", 1)[-1])


RECIPE = 1
"""Counts up when this module changes what a build leaves."""
FLAGS = "-buildvcs=false -trimpath -mod=readonly"
LINK_FLAGS = "-s -w"

# The longest first: two parts are built at a time, and the last ones should be short.
PARTS = {
    part.name: part
    for part in (
        Part("kustomize", ("sigs.k8s.io/kustomize/kustomize/v5",), output="kustomize"),
        Part(
            "kube",
            ("./kube",),
            module="k8s.io/kubernetes",
            version_variables=("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"),
        ),
        Part(
            "argo",
            (f"{_ARGO}/cmd/workflow-controller", f"{_ARGO}/cmd/argoexec"),
            module=_ARGO,
            manifests=(
                "manifests/base/crds/full",
                "manifests/base/workflow-controller",
                "manifests/cluster-install-no-crds/workflow-controller-rbac",
            ),
            addition=("signal_linux.go", "workflow/executor/osspecific/signal_linux.go"),
        ),
        Part(
            "containerd",
            tuple(f"{_CONTAINERD}/cmd/{name}" for name in ("containerd", "ctr", "containerd-shim-runc-v2")),
            tags="no_btrfs no_zfs no_devmapper no_aufs",
        ),
        Part(
            "kueue",
            ("sigs.k8s.io/kueue/cmd/kueue",),
            module="sigs.k8s.io/kueue",
            manifests=("config/default",),
        ),
        Part("jobset", ("sigs.k8s.io/jobset",), module="sigs.k8s.io/jobset", manifests=("config/default",)),
        Part("lws", ("sigs.k8s.io/lws/cmd",), output="lws", module="sigs.k8s.io/lws", manifests=("config/default",)),
        Part("etcd", ("go.etcd.io/etcd/server/v3",), output="etcd"),
        Part("coredns", ("github.com/coredns/coredns",)),
        Part("cni", (f"{_CNI}/main/ptp", f"{_CNI}/main/loopback", f"{_CNI}/ipam/host-local")),
        Part("pause", (".",), output="pause"),
    )
}


def build(jobs: int = 2) -> None:
    """Build every part that is not in the cache, and SeaweedFS; minutes when cold, nothing to do when warm.

    Raises:
        BadConfig: A build failed, took too long, or there is no room for it.
    """
    layout.CACHE.mkdir(parents=True, exist_ok=True)
    missing = [part for part in PARTS.values() if not part.folder.exists()]
    if missing:
        names = ", ".join(part.name for part in missing)
        _say(f"building {names} from source into {layout.CACHE} (all of it from nothing: about 20 minutes on 2 cores)")
        _check_room()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        if PARTS["kustomize"] in missing:
            _build_locked(PARTS["kustomize"])
        builds = [pool.submit(_build_locked, part) for part in missing]
        builds.append(pool.submit(_build_seaweedfs))
        try:
            for done in concurrent.futures.as_completed(builds):
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def remove_outdated() -> None:
    """Delete builds that this checkout no longer names, and what an interrupted build left."""
    current = {part.folder for part in PARTS.values()}
    for path in layout.CACHE.glob("*-*"):
        if path.is_dir() and path not in current and path.name.rsplit("-", 1)[0] in PARTS:
            shutil.rmtree(path)


def _build_seaweedfs() -> None:
    started = time.monotonic()
    seaweedfs()
    if time.monotonic() - started > HEARTBEAT_S / 10:
        _say(f"seaweedfs built in {time.monotonic() - started:.0f} s")


def _build_locked(part: Part) -> None:
    with filelock.FileLock(layout.CACHE / f"{part.name}.lock", timeout=BUILD_LIMIT_S):
        if not part.folder.exists():
            started = time.monotonic()
            _build(part)
            _say(f"{part.name} built in {time.monotonic() - started:.0f} s")


def _build(part: Part) -> None:
    """Build in a folder beside the final one, which appears complete or not at all."""
    work = layout.CACHE / f"{part.name}.unfinished"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(MODULES / part.name, work / "module")
    module, binaries = work / "module", work / "part"
    binaries.mkdir()
    source = _source(part, module)
    if part.addition:
        # The module cache is read-only, and Go lays no file over it: build from a copy of the module.
        name, place = part.addition
        copy = work / "source"
        shutil.copytree(source, copy, copy_function=shutil.copy)
        for folder in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
            folder.chmod(0o755)
        shutil.move(module / name, copy / place)
        _go(part, module, "mod", "edit", f"-replace={part.module}={copy}")
    version = _go(part, module, "list", "-m", "-f", "{{.Version}}", part.module) if part.version_variables else ""
    variables = [f"-X {package}.gitVersion={version}" for package in part.version_variables]
    target = str(binaries / part.output) if part.output else f"{binaries}/"
    flags = [f"-ldflags={' '.join([LINK_FLAGS, *variables])}", *([f"-tags={part.tags}"] if part.tags else [])]
    _go(part, module, "build", *flags, "-o", target, *part.packages)
    if part.manifests:
        kustomize = PARTS["kustomize"].binary()
        rendered = [_run(part, [str(kustomize), "build", str(source / each)], module) for each in part.manifests]
        documents = [each for text in rendered for each in yaml.load_all(text, yaml.CSafeLoader) if each]
        # Megabytes of schemas, read at every start of a wiped cluster: JSON is ten times faster.
        (binaries / "manifests.json").write_text(json.dumps(documents, default=str))
    binaries.rename(part.folder)
    shutil.rmtree(work)


def _source(part: Part, module: Path) -> Path:
    """Folder of the upstream module in Go's module cache, downloaded if need be."""
    if not part.module:
        return module
    return Path(json.loads(_go(part, module, "mod", "download", "-json", part.module))["Dir"])


def _go(part: Part, folder: Path, *arguments: str) -> str:
    return _run(part, [str(go_toolchain.go()), *arguments], folder)


def _run(part: Part, command: list[str], folder: Path) -> str:
    """Run one step of a build below everything else on the machine; its standard output.

    A line a minute says that it goes on, since the compiler is silent.
    """
    environment = {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": FLAGS, "CGO_ENABLED": "0", "GOWORK": "off"}
    started = time.monotonic()
    with subprocess.Popen(
        ["nice", "-n", "10", *command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        while True:
            try:
                output, errors = process.communicate(timeout=HEARTBEAT_S)
                break
            except subprocess.TimeoutExpired:
                elapsed = time.monotonic() - started
                _say(f"still building {part.name} after {elapsed:.0f} s")
                if elapsed > BUILD_LIMIT_S:
                    process.kill()
                    raise BadConfig(f"building {part.name} took over {BUILD_LIMIT_S} s; run it again") from None
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        words = "\n".join(line for line in errors.splitlines() if not line.startswith("go: downloading"))
        raise BadConfig(f"{part.name} cannot be built: `{' '.join(command)}` failed: {words[-2000:]}")
    return output.strip()


def _check_room() -> None:
    home = layout.CACHE
    free = shutil.disk_usage(home).free
    cold = not any(layout.CACHE.glob("kube-*"))
    if cold and free < FREE_BYTES:
        raise BadConfig(
            f"{home}: a first build needs {FREE_BYTES / 2**30:.0f} GiB for Go's caches and {free / 2**30:.0f} GiB are "
            "free; free some, or set XDG_CACHE_HOME, GOCACHE and GOMODCACHE to a larger disk"
        )


def _say(words: str) -> None:
    print(f"tandem: {words}", file=sys.stderr, flush=True)
