"""What leads to a cluster: kubeconfigs as users have them, and a server whose list of kinds is short of some at times."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from components.cluster import api
from components.cluster.api import Cluster
from tests.pipelines.command import tandem

WORKFLOW = ("argoproj.io/v1alpha1", "Workflow")


def kubeconfig(server: str, **user: str) -> str:
    """A kubeconfig with one context."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": user or {"token": "t"}}],
        }
    )


class Server:
    """An API server that knows Workflows, but leaves them out of its first lists."""

    def __init__(self) -> None:
        self.left_out = 0
        """How many lists of groups lack them."""
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(double.answer(self.path.rstrip("/"))).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str) -> dict[str, Any]:
        """The answer to a request."""
        version = {"groupVersion": WORKFLOW[0], "version": "v1alpha1"}
        resource = {"name": "workflows", "kind": "Workflow", "namespaced": True, "verbs": ["get"]}
        if path == "/apis":
            self.left_out -= 1
            groups = (
                []
                if self.left_out >= 0
                else [{"name": "argoproj.io", "versions": [version], "preferredVersion": version}]
            )
            return {"kind": "APIGroupList", "groups": groups}
        return {
            "/version": {"major": "1", "minor": "36"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
            f"/apis/{WORKFLOW[0]}": {"kind": "APIResourceList", "groupVersion": WORKFLOW[0], "resources": [resource]},
        }[path]

    def stop(self) -> None:
        """Free its port."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(api, "SECOND_LOOK_S", 0.01)
    server = Server()
    yield server
    server.stop()


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_kind_is_missed_only_at_a_second_look(server: Server, tmp_path: Path, left_out: int) -> None:
    """The library looks twice by itself, at once."""
    file = tmp_path / "config"
    file.write_text(kubeconfig(server.address))
    server.left_out = left_out
    cluster = Cluster("tandem", None, file)
    assert cluster.serves(*WORKFLOW)
    assert not cluster.serves("jobset.x-k8s.io/v1alpha2", "JobSet")


def test_kubeconfig_may_be_a_list_of_files(server: Server, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(kubeconfig(server.address))
    places = os.pathsep.join((str(tmp_path / "absent"), str(tmp_path / "config")))
    done = tandem(tmp_path, "status", "first", KUBECONFIG=places)
    # It was asked for something of which the double knows nothing, so it was found.
    assert "names no cluster" not in done.err
    assert server.address in done.err or "does not know" in done.err or done.code == 70


@pytest.mark.parametrize(
    "content",
    [
        b"a: [1",
        b"only words",
        b"\xff\xfe\x00\x01\x80",
        b"\x00\x01",
        b"[1, 2]",
        b"clusters: 3\ncontexts: x\n",
        b"current-context: c\nclusters: [{name: c}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nusers: []\n",
        b"current-context: c\nclusters: [3]\ncontexts: [4]\nusers: [5]\n",
        kubeconfig("1.2.3.4:6443").encode(),
        kubeconfig("somewhere").encode(),
        kubeconfig("").encode(),
        kubeconfig("https://").encode(),
        kubeconfig("https://[::1").encode(),
        kubeconfig("https://host:port").encode(),
        kubeconfig("https://127.0.0.1:9", **{"client-certificate-data": "a"}).encode(),
        kubeconfig("https://127.0.0.1:9", **{"client-certificate": "absent.pem", "client-key": "absent.pem"}).encode(),
        None,
    ],
    ids=[
        "yaml", "words", "binary", "control", "list", "scalars", "no-cluster", "numbers", "no-scheme", "bare-host", "no-server",
        "no-host", "bracket", "port", "certificate", "no-certificate", "folder",
    ],
)  # fmt: skip
def test_a_broken_kubeconfig_is_a_sentence(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "broken"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    for arguments, variables in (
        (("--kubeconfig", str(file)), {}),
        ((), {"KUBECONFIG": str(file)}),
    ):
        done = tandem(tmp_path, "executions", *arguments, **variables)
        assert done.code == 64, done.err
        assert done.err.startswith("tandem: ") and done.err.count("\n") == 1, done.err
