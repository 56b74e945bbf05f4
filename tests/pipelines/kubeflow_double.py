"""A double of the Kubeflow Pipelines API server (v2beta1), on loopback: what the real kfp client is tested against.

It is no Kubeflow: it keeps what it is sent in memory and runs nothing; a test moves a run on by `set_state`. It refuses
what the real server is known to refuse: unknown ids, a taken pipeline name, a namespace in single-user mode, arguments
that the pipeline does not have, a second terminate, a retry of a run that did not fail.
"""

from __future__ import annotations

import email.parser
import email.policy
import json
import re
import threading
import uuid
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

PREFIX = "/apis/v2beta1/"
OVER = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")


class Refused(Exception):
    """An answer that is an error: HTTP status and message."""


class KubeflowDouble:
    """The double and its contents.

    Attributes:
        requests: `METHOD path` of every request but health, in order.
        pipelines, versions, experiments, runs, recurring: What was made, by id.
        failing: HTTP status with which every request but health fails; 0 for none.
    """

    def __init__(self, multi_user: bool = False, login: bool = False, page: int = 2) -> None:
        """Start serving.

        Args:
            multi_user: Ask for a namespace, as a Kubeflow with profiles does.
            login: Refuse requests without a bearer token.
            page: Items of a list's page, at most.
        """
        self.multi_user, self.login, self.page = multi_user, login, page
        self.requests: list[str] = []
        self.failing = 0
        self.pipelines: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        self.experiments: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.recurring: dict[str, dict[str, Any]] = {}
        self._seconds = 0
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = double.answer(self.command, self.path, dict(self.headers), body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = _answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def set_state(self, run_id: str, state: str, error: str = "", tasks: dict[str, str] | None = None) -> None:
        """Move a run to a state, its tasks (by display name) too; Kubeflow lists drivers beside them."""
        run = self.runs[run_id]
        run["state"] = state
        if state in OVER:
            run["finished_at"] = self._now()
        if error:
            run["error"] = {"code": 13, "message": error}
        details = [{"display_name": "root-driver", "state": "SUCCEEDED", "create_time": self._now()}]
        for name, one in (tasks or {}).items():
            details.append({"display_name": f"{name}-driver", "state": "SUCCEEDED", "create_time": self._now()})
            details.append({"display_name": name, "state": one, "create_time": self._now(), "start_time": self._now()})
        run["run_details"] = {"task_details": details}

    def fire(self, recurring_id: str) -> dict[str, Any]:
        """Start a run of a schedule as its time comes, macros replaced."""
        plan = self.recurring[recurring_id]
        text = json.dumps(plan["runtime_config"])
        text = text.replace("[[CurrentTime.20060102-150405]]", "20261207-030000")
        return self._make_run(
            {
                **plan,
                "runtime_config": json.loads(text),
                "display_name": f"{plan['display_name']} (1)",
                "recurring_run_id": recurring_id,
            }
        )

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        """Status and JSON body for a request."""
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        route = unquote(url.path.removeprefix(PREFIX))
        if (
            self.login
            and {key.lower(): value for key, value in headers.items()}.get("authorization") != "Bearer let-me-in"
        ):
            return 401, {"message": "no credentials"}
        if route == "healthz":
            return 200, {"multi_user": self.multi_user}
        self.requests.append(f"{method} {route}")
        if self.failing:
            return self.failing, {"message": "told to fail"}
        try:
            return 200, self._route(method, route, query, headers, body)
        except Refused as refused:
            return refused.args[0], {"error": refused.args[1], "code": 5, "message": refused.args[1]}

    # ---- routes

    def _route(self, method: str, route: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Any:
        kind, _, rest = route.partition("/")
        if kind == "pipelines":
            return self._pipelines(method, rest, query, headers, body)
        if kind == "experiments":
            return self._experiments(method, query, body)
        if kind == "runs":
            return self._runs(method, rest, query, body)
        if kind == "recurringruns":
            return self._recurring(method, rest, query, body)
        raise Refused(404, f"no route {method} {route}")

    def _pipelines(self, method: str, rest: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Any:
        if method == "GET" and not rest:
            return self._listed("pipelines", self.pipelines, query)
        if rest == "upload":
            name = query["name"]
            if any(one["display_name"] == name for one in self.pipelines.values()):
                raise Refused(409, f"pipeline {name} already exists")
            made = {"pipeline_id": str(uuid.uuid4()), "display_name": name, "name": name, "created_at": self._now()}
            self.pipelines[made["pipeline_id"]] = made
            # The first upload cannot name its version.
            self._version(made["pipeline_id"], name, _uploaded(headers, body))
            return made
        if rest == "upload_version":
            return self._version(
                _known(self.pipelines, query["pipelineid"])["pipeline_id"], query["name"], _uploaded(headers, body)
            )
        if method == "GET" and rest.endswith("/versions"):
            own = {
                key: one for key, one in self.versions.items() if one["pipeline_id"] == rest.removesuffix("/versions")
            }
            return self._listed("pipeline_versions", own, query)
        raise Refused(404, f"no route {method} pipelines/{rest}")

    def _version(self, pipeline: str, name: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
        if any(one["display_name"] == name and one["pipeline_id"] == pipeline for one in self.versions.values()):
            raise Refused(409, f"version {name} already exists")
        made = {
            "pipeline_id": pipeline, "pipeline_version_id": str(uuid.uuid4()), "display_name": name, "name": name,
            "created_at": self._now(), "pipeline_spec": documents[0],
        }  # fmt: skip
        self.versions[made["pipeline_version_id"]] = made
        return made

    def _experiments(self, method: str, query: dict[str, str], body: bytes) -> Any:
        if method == "GET":
            return self._listed("experiments", self.experiments, query)
        given = json.loads(body)
        self._check_namespace(given.get("namespace"))
        made = {"experiment_id": str(uuid.uuid4()), "created_at": self._now(), **given}
        self.experiments[made["experiment_id"]] = made
        return made

    def _runs(self, method: str, rest: str, query: dict[str, str], body: bytes) -> Any:
        run_id, _, verb = rest.partition(":")
        if method == "POST" and not rest:
            return self._make_run(json.loads(body))
        if method == "GET" and not rest:
            return self._listed("runs", self.runs, query)
        run = _known(self.runs, run_id)
        if verb == "terminate":
            if run["state"] in OVER:
                raise Refused(400, f"run {run_id} is already finished")
            self.set_state(run_id, "CANCELED")
        elif verb == "retry":
            if run["state"] not in ("FAILED", "CANCELED"):
                raise Refused(400, f"run {run_id} cannot be retried in state {run['state']}")
            run.pop("error", None)
            self.set_state(run_id, "RUNNING")
        elif verb or method != "GET":
            raise Refused(404, f"no route {method} runs/{rest}")
        return {} if verb else run

    def _make_run(self, given: dict[str, Any]) -> dict[str, Any]:
        _known(self.experiments, given["experiment_id"])
        version = _known(self.versions, given["pipeline_version_reference"]["pipeline_version_id"])
        known = version["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
        for name in given["runtime_config"]["parameters"]:
            if name not in known:
                raise Refused(400, f"unknown input parameter {name}")
        made = {
            **given, "run_id": str(uuid.uuid4()), "created_at": self._now(), "state": "PENDING", "storage_state": "AVAILABLE",
        }  # fmt: skip
        self.runs[made["run_id"]] = made
        return made

    def _recurring(self, method: str, rest: str, query: dict[str, str], body: bytes) -> Any:
        if method == "POST" and not rest:
            given = json.loads(body)
            if len(given["trigger"]["cron_schedule"]["cron"].split()) != 6:
                raise Refused(400, "the cron expression needs six fields")
            made = {**given, "recurring_run_id": str(uuid.uuid4()), "created_at": self._now(), "status": "ENABLED"}
            self.recurring[made["recurring_run_id"]] = made
            return made
        if method == "GET" and not rest:
            return self._listed("recurringRuns", self.recurring, query)
        if method == "DELETE":
            _known(self.recurring, rest)
            del self.recurring[rest]
            return {}
        raise Refused(404, f"no route {method} recurringruns/{rest}")

    def _listed(self, key: str, items: dict[str, dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
        if key != "pipelines" and key != "pipeline_versions":
            self._check_namespace(query.get("namespace"))
        found = list(items.values())
        for predicate in json.loads(query.get("filter") or "{}").get("predicates", []):
            assert predicate["operation"] in ("EQUALS", 1), predicate
            found = [one for one in found if one.get(predicate["key"]) == predicate["stringValue"]]
        if query.get("sort_by") == "created_at desc":
            found.reverse()
        first = int(query.get("page_token") or 0)
        size = min(int(query.get("page_size") or self.page), self.page)
        after = str(first + size) if first + size < len(found) else ""
        return {key: found[first : first + size], "total_size": len(found), "next_page_token": after}

    def _check_namespace(self, namespace: str | None) -> None:
        if namespace and not self.multi_user:
            raise Refused(400, "in single-user mode a namespace cannot be given")
        if self.multi_user and not namespace:
            raise Refused(400, "in multi-user mode a namespace must be given")

    def _now(self) -> str:
        self._seconds += 1
        return (
            (datetime(2026, 11, 30, tzinfo=UTC) + timedelta(seconds=self._seconds)).isoformat().replace("+00:00", "Z")
        )


def _known(items: dict[str, dict[str, Any]], key: str) -> dict[str, Any]:
    if key not in items:
        raise Refused(404, f"{key} not found")
    return items[key]


def _uploaded(headers: dict[str, str], body: bytes) -> list[dict[str, Any]]:
    """The YAML documents of a multipart upload."""
    head = f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode()
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    part = next(iter(message.iter_parts()))  # type: ignore[attr-defined]
    assert re.search(r"\.ya?ml", part.get_filename() or "")
    return list(yaml.safe_load_all(part.get_payload(decode=True)))
