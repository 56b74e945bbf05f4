"""A real S3 server for tests: SeaweedFS, built from its Go module once into a cache outside the checkout.

Register it with `pytest_plugins = ["tests.storage.s3_server"]`; a test then asks for `s3_uri` (an empty prefix, with
the credentials in the environment) or for `s3_server`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import botocore.exceptions
import filelock
import platformdirs
import pytest
from botocore.config import Config

from tests import go_toolchain

MODULE = "github.com/seaweedfs/seaweedfs"
VERSION = "v0.0.0-20261109003541-7506e5f91cd6"
# Without cgo the binary is static, so that it runs in a container of nothing else.
GO_ENVIRONMENT = {"GOFLAGS": "-mod=mod -trimpath", "CGO_ENABLED": "0"}
LINK_FLAGS = "-s -w"
RECIPE = json.dumps([VERSION, GO_ENVIRONMENT, LINK_FLAGS])
BUILD_LIMIT_S = 1800
READY_LIMIT_S = 120
STOP_LIMIT_S = 15
BUCKET = "tandem-test"
# PR_SET_PDEATHSIG is 1: the kernel kills the server when the test process dies in whatever way.
_EXEC_DYING_WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclasses.dataclass(frozen=True)
class S3Server:
    """A running server with one bucket."""

    endpoint_url: str
    bucket: str
    access_key: str
    secret_key: str
    grpc_ports: tuple[int, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which boto3 finds the server, in this process or another."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1,localhost",
        }


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The server, started at first use and stopped at the end of the session."""
    binary = seaweedfs()
    folder = tmp_path_factory.mktemp("seaweedfs")
    server, process = _start(binary, folder)
    try:
        _wait_ready(server, process, folder / "server.log")
        yield server
    finally:
        # Its data goes with the session, and leaving in order would take it 15 s.
        process.kill()
        process.wait(STOP_LIMIT_S)
        for port in server.grpc_ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
                left.unlink()


@pytest.fixture
def s3_uri(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix on the server; the environment holds what boto3 needs to reach it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.bucket}/{uuid.uuid4().hex}"


def seaweedfs() -> Path:
    """Path of the server's binary, built first if this version is not in the cache (minutes)."""
    cache = platformdirs.user_cache_path("tandem-test") / "seaweedfs"
    cache.mkdir(parents=True, exist_ok=True)
    binary = cache / "weed"
    with filelock.FileLock(cache / "build.lock", timeout=BUILD_LIMIT_S):
        stamp = cache / "recipe.json"
        if not (binary.exists() and stamp.exists() and stamp.read_text() == RECIPE):
            _build(cache, binary)
            stamp.write_text(RECIPE)
    return binary


def _build(cache: Path, binary: Path) -> None:
    go = go_toolchain.go()
    for name in ("recipe.json", "weed", "go.mod", "go.sum"):
        (cache / name).unlink(missing_ok=True)
    unfinished = cache / "weed.unfinished"
    environment = {**os.environ, **GO_ENVIRONMENT}
    for arguments in (
        ("mod", "init", "tandem.test/tools"),
        ("get", "-tool", f"{MODULE}/weed@{VERSION}"),
        ("build", f"-ldflags={LINK_FLAGS}", "-o", str(unfinished), f"{MODULE}/weed"),
    ):
        _checked([str(go), *arguments], cache, environment)
    unfinished.replace(binary)


def _checked(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False
    )
    if done.returncode:
        pytest.fail(f"SeaweedFS cannot be built: `{' '.join(command)}` failed: {done.stderr.strip()[-2000:]}")


def _start(binary: Path, folder: Path) -> tuple[S3Server, subprocess.Popen[bytes]]:
    """One process with master, volume server, filer and S3 gateway, on loopback."""
    parts = ("master", "volume", "filer", "s3")
    ports = _free_ports(2 * len(parts))
    http, grpc = ports[: len(parts)], ports[len(parts) :]
    flags = [f"-{part}.port={port}" for part, port in zip(parts, http, strict=True)]
    flags += [f"-{part}.port.grpc={port}" for part, port in zip(parts, grpc, strict=True)]
    server = S3Server(f"http://127.0.0.1:{http[-1]}", BUCKET, "tandem", uuid.uuid4().hex, tuple(grpc))
    identity = {
        "name": "tandem",
        "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    command = [str(binary), "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *flags]
    command += ["-filer", "-s3", f"-s3.config={folder / 's3.json'}", "-s3.autoCreateBucket=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=20", "-volume.preStopSeconds=0"]
    command += [f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}"]
    command = [sys.executable, "-c", _EXEC_DYING_WITH_PARENT, *command]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    return server, process


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _wait_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the bucket can be made and an object put."""
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10, proxies={}),
    )
    limit = time.monotonic() + READY_LIMIT_S
    made = False
    while True:
        try:
            if not made:
                client.create_bucket(Bucket=server.bucket)
                made = True
            client.put_object(Bucket=server.bucket, Key="ready", Body=b"")
            return
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            if process.poll() is not None or time.monotonic() > limit:
                pytest.fail(f"SeaweedFS is not ready after {READY_LIMIT_S} s ({error}): {log.read_text()[-2000:]}")
            time.sleep(0.2)
