"""The embedded MLflow server: one process on the loopback interface, SQLite and a local artifact folder.

It runs MLflow's own application under uvicorn in a single process, without the command line's second process and
without the job runner with its eight consumers, which this project has no use for. The parent binds the socket and
hands it over: a port in use is known at once, and a client that comes early waits in the backlog instead of failing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import http.client
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from configs.failure import BadConfig, ServiceGone

LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_ROOT = Path(__file__).resolve().parents[2]


class Server:
    """An MLflow server that this process started.

    Attributes:
        uri: Address for clients (`http://127.0.0.1:<port>`).
        log: File with what the server printed.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.uri = f"http://{LOOPBACK}:{port}"
        self.log = log
        self.process = process
        self._port = port

    def wait_ready(self, limit_s: float = 120.0) -> None:
        """Wait until the server answers its health check.

        Raises:
            ServiceGone: it died (with its last words), or did not answer within `limit_s` seconds.
        """
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            code = self.process.poll()
            if code is not None:
                raise ServiceGone(
                    f"the MLflow server ended with exit code {code} before it was ready; see {self.log}."
                    f" Its last lines: {self.last_words()}"
                )
            if self._healthy(min(1.0, max(0.05, end - time.monotonic()))):
                return
            time.sleep(0.05)
        raise ServiceGone(f"the MLflow server did not answer at {self.uri} within {limit_s:g} s; see {self.log}")

    def stop(self, limit_s: float = 10.0) -> None:
        """End the server: SIGTERM, and SIGKILL after `limit_s` seconds. Calling it again does nothing."""
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def last_words(self, lines: int = 5) -> str:
        """The last lines of the server's log, joined by ` | `."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        kept = [line.strip() for line in text.splitlines() if line.strip()][-lines:]
        return " | ".join(kept) or "(none)"

    def _healthy(self, timeout_s: float) -> bool:
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=timeout_s)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def start_server(folder: Path, port: int = 0) -> Server:
    """Start an MLflow server beside the runs and return at once.

    The server dies with the thread that called this, so call it from one that lives as long as the server should.

    Args:
        folder: Takes `mlflow.db`, `artifacts/` and `server.log`.
        port: Port on the loopback interface; 0 takes a free one.

    Raises:
        BadConfig: the port is in use, or the folder cannot be written.
    """
    folder = folder.absolute()
    listener = _listen(port)
    with contextlib.closing(listener):
        try:
            (folder / "artifacts").mkdir(parents=True, exist_ok=True)
            log = (folder / "server.log").open("ab")
        except OSError as error:
            raise BadConfig(
                f"{folder}: the MLflow server cannot keep its database there ({error.strerror});"
                " set storage.scratch to a folder that can be written"
            ) from None
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "components.tracking.server", str(folder), str(listener.fileno())],
                cwd=folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        return Server(process, listener.getsockname()[1], folder / "server.log")


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({error.strerror})"
        raise BadConfig(
            f"tracking.port {port} {reason} on {LOOPBACK}; set tracking.port to 0 for a free one,"
            " or tracking.uri to the server that is already there"
        ) from None
    return listener


def _environment() -> dict[str, str]:
    """The environment of the server: what the client was told must not steer it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "_MLFLOW_"))}
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"{LOOPBACK},{LOOPBACK}:*,localhost,localhost:*",
        "_TANDEM_PARENT": str(os.getpid()),
    }


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent is gone (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


def _serve(folder: Path, descriptor: int) -> None:
    """Run the server on an inherited listening socket until SIGTERM."""
    _die_with(int(os.environ.pop("_TANDEM_PARENT")))
    # A damaged database is told now rather than after MLflow's six seconds of imports.
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as found:
        found.execute("PRAGMA schema_version")
    import mlflow.server.constants as names
    import uvicorn

    database = f"sqlite:///{folder / 'mlflow.db'}"
    os.environ[names.BACKEND_STORE_URI_ENV_VAR] = database
    os.environ[names.REGISTRY_STORE_URI_ENV_VAR] = database
    os.environ[names.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
    os.environ[names.SERVE_ARTIFACTS_ENV_VAR] = "true"
    os.environ[names.ARTIFACTS_DESTINATION_ENV_VAR] = (folder / "artifacts").as_uri()
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    with open(folder / "lock", "w") as lock:
        # Two servers that start together must not both set up a new database.
        fcntl.flock(lock, fcntl.LOCK_EX)
        initialize_backend_stores(database, database, "mlflow-artifacts:/")
    options = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)
    uvicorn.Server(options).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
