"""Verifiers say 1 for what is right."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from components.reward.verifiers import Completion, contains, exact_match, load_verifier, numeric
from configs.failure import BadConfig
from configs.run import RewardConfig


@pytest.mark.parametrize(
    ("text", "finish", "reward"),
    [("590", "stop", 1.0), ("590", "length", 0.0), ("59", "stop", 0.0), ("5900", "stop", 0.0), ("", "stop", 0.0)],
)
def test_exact_match(text: str, finish: str, reward: float) -> None:
    assert exact_match([Completion(text, finish)], "590") == [reward]


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so it is 42.", "42", 1.0),
        ("1,234", "1234.0", 1.0),
        ("-3", "3", 0.0),
        ("no number", "7", 0.0),
        ("7", "none", 0.0),
    ],
)
def test_numeric(text: str, answer: str, reward: float) -> None:
    assert numeric([Completion(text, "stop")], answer) == [reward]


def test_contains() -> None:
    assert contains([Completion("a b c", "length"), Completion("a c", "stop")], "b") == [1.0, 0.0]


@pytest.mark.parametrize("name", ["exact", "no.such.module:f", "components.reward.verifiers:nothing", "json:__name__"])
def test_an_unknown_verifier_is_one_sentence(name: str) -> None:
    with pytest.raises(BadConfig, match=r"^reward\.verifier"):
        load_verifier(RewardConfig(verifier=name))


@pytest.fixture
def endpoint() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps({"rewards": [float(c["text"] == body["answer"]) for c in body["completions"]]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()


def test_an_http_verifier(endpoint: str) -> None:
    verify = load_verifier(RewardConfig(verifier="http", url=endpoint))
    assert verify([Completion("a", "stop"), Completion("b", "stop")], "b") == [0.0, 1.0]
