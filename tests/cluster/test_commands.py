"""The commands of a user who has nothing but the Role tandem-submitter, on runs that fail early or are never let go."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.run import RUNS
from tests.cluster.accounts import kubeconfig_of
from tests.cluster.api import wait_for
from tests.pipelines.command import ROOT, Outcome, tandem

LIMIT_S = 300.0
QUICKSTART = str(RUNS / "quickstart.yaml")


class User:
    """Somebody with the token of tandem-submitter, in a namespace with Tandem but without MLflow."""

    def __init__(self, cluster: Any, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.images = folder / "images.json"
        self.images.write_text(cluster.load_built_images().model_dump_json())
        s3 = cluster.s3.environment(inside=True)
        keys = {key: s3[key] for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        for name, values in {"tandem-redis": {"password": "for-the-test"}, "tandem-s3": keys}.items():
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": values}
            cluster.api.apply([secret], namespace)
        # Nobody listens there, so every run ends in its first step.
        place = ("--context", cluster.context, "--kubeconfig", str(cluster.kubeconfig), "-n", namespace)
        done = tandem(
            ROOT, "install", *place, "--no-mlflow", "--tracking-uri", f"http://tandem-mlflow.{namespace}.svc:5000",
            "--s3-endpoint", s3["AWS_ENDPOINT_URL"], "--region", s3["AWS_REGION"],
        )  # fmt: skip
        assert done.code == 0, done.err
        self.kubeconfig = kubeconfig_of(cluster, "tandem-submitter", namespace, folder)

    def tandem(self, command: str, *arguments: str) -> Outcome:
        """A command with the user's token."""
        place = ("--context", self.cluster.context, "--kubeconfig", str(self.kubeconfig), "-n", self.namespace)
        return tandem(ROOT, command, *arguments, *place, limit_s=LIMIT_S)

    def submit(self, name: str, *overrides: str, command: str = "submit", options: tuple[str, ...] = ()) -> Outcome:
        """Submit the quickstart."""
        settings = (
            f"storage.root=s3://{self.cluster.s3.bucket}/{self.namespace}",
            "kubernetes.pull_policy=Never",
            *overrides,
        )
        given = [part for setting in settings for part in ("-s", setting)]
        return self.tandem(command, QUICKSTART, "--name", name, "--images", str(self.images), *given, *options)


@pytest.fixture(scope="module")
def user(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    namespace = cluster.namespace("commands")
    yield User(cluster, namespace, tmp_path_factory.mktemp("commands"))
    cluster.delete_namespace(namespace)


def test_a_failed_step_ends_the_watch_with_its_sentence(user: User) -> None:
    """There is no tracking server: preflight says so, and the command ends with preflight's exit code."""
    done = user.submit("first")
    assert done.code == 69, f"{done.out}\n{done.err}"
    assert done.err.splitlines()[-1].startswith("tandem: preflight: ")
    assert "tracking server" in done.err
    assert "preflight            running" in done.out

    again = user.submit("first", options=("--no-follow",))
    assert (again.code, again.err.splitlines()[-1]) == (69, done.err.splitlines()[-1]), (
        "it is found, and starts nothing"
    )
    other = user.submit("first", "train.steps=7")
    assert other.code == 64
    assert "train.steps 500, here 7" in other.err

    log = user.tandem("logs", "first", "--part", "preflight")
    assert log.code == 0, log.err
    assert all(line.startswith("[preflight") for line in log.out.splitlines())
    assert "tracking server" in log.out
    assert "no pod of 'rollout'" in user.tandem("logs", "first", "--part", "rollout").err


def test_a_retry_is_an_execution_of_the_same_run(user: User) -> None:
    user.submit("again")
    done = user.tandem("retry", "again")
    assert done.code == 69
    assert "execution again-r1" in done.out
    state = json.loads(user.tandem("status", "again", "--json").out)
    assert (state["name"], state["run"], state["state"], state["exit_code"]) == ("again-r1", "again", "failed", 69)
    told = user.tandem("status", "again")
    assert told.code == 0
    assert told.out.splitlines()[0] == "again-r1: failed"
    assert "tracking server" in told.out
    names = [one["name"] for one in json.loads(user.tandem("executions", "--json").out)]
    assert names.index("again-r1") < names.index("again")
    assert "no execution 'nothing'" in user.tandem("status", "nothing").err


def test_an_execution_that_waits_is_canceled(user: User) -> None:
    """A quota of no pods: the status names the reason, a cancel ends it, a second one finds it ended."""
    quota = {
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}},
    }  # fmt: skip
    user.cluster.api.apply([quota], user.namespace)
    try:
        assert user.submit("waits", options=("--no-follow",)).code == 0

        def told() -> bool:
            steps = json.loads(user.tandem("status", "waits", "--json").out)["steps"]
            return any("exceeded quota" in step["words"] for step in steps)

        wait_for("the reason", LIMIT_S, told, 1.0)
        assert "is still" in user.tandem("retry", "waits").err
        started = time.monotonic()
        done = user.tandem("cancel", "waits", "--now")
        assert done.code == 0, done.err
        assert "canceled; nothing of it is left" in done.out
        assert time.monotonic() - started < 60
        assert user.tandem("cancel", "waits").code == 0
        for _ in range(2):
            assert user.tandem("retry", "waits", "--no-follow").code == 0
            ended, going = user.tandem("cancel", "waits-r1", "--now"), user.tandem("status", "waits", "--json")
        # The second retry goes on when the first, which is over, is canceled once more.
        assert (ended.code, json.loads(going.out)["name"]) == (64, "waits-r2"), ended.err
        assert "execution waits-r1 is over, and waits-r2 of the same run is" in ended.err
        assert json.loads(going.out)["state"] in ("pending", "running")
        assert user.tandem("cancel", "waits", "--now").code == 0
    finally:
        user.cluster.api.delete("v1", "ResourceQuota", "none", user.namespace)


def test_a_schedule_is_replaced_and_removed(user: User) -> None:
    for cron in ("0 3 * * 1", "0 4 * * 1"):
        done = user.submit("weekly", command="schedule", options=("--cron", cron, "--timezone", "Europe/Berlin"))
        assert done.code == 0, done.err
    (plan,) = json.loads(user.tandem("schedules", "--json").out)
    assert (plan["name"], plan["cron"], plan["timezone"], plan["enabled"]) == (
        "weekly",
        "0 4 * * 1",
        "Europe/Berlin",
        True,
    )
    assert "no schedule 'daily'; known: weekly" in user.tandem("unschedule", "daily").err
    assert user.tandem("unschedule", "weekly").code == 0
    assert json.loads(user.tandem("schedules", "--json").out) == []


def test_a_schedule_that_starts_nothing_says_so(user: User) -> None:
    """The condition is written here, in the form in which Argo's controller reports it."""
    assert "no minute" in user.submit("odd", command="schedule", options=("--cron", "99 * * * *")).err
    assert user.submit("odd", command="schedule", options=("--cron", "@yearly")).code == 0
    plan = user.cluster.api.get("argoproj.io/v1alpha1", "CronWorkflow", "odd", user.namespace)
    try:
        condition = {"type": "SpecError", "status": "True", "message": "cron schedule 99 * * * * is malformed"}
        written = {
            **{key: plan[key] for key in ("apiVersion", "kind", "spec")},
            "metadata": {"name": "odd", "labels": plan["metadata"]["labels"]},
            "status": {"conditions": [condition]},
        }
        user.cluster.api.apply([written], user.namespace)
        (one,) = json.loads(user.tandem("schedules", "--json").out)
        assert one["words"] == condition["message"]
        first, second = user.tandem("schedules").out.splitlines()
        assert first.split()[:2] == ["odd", "error"] and "99" in second
    finally:
        assert user.tandem("unschedule", "odd").code == 0


def test_a_missing_permission_is_named(user: User) -> None:
    """The same, asked by an account that has no rights at all."""
    user.kubeconfig, own = kubeconfig_of(user.cluster, "tandem-role", user.namespace, user.folder), user.kubeconfig
    try:
        for command, words in (("submit", "does not allow you to"), ("executions", "forbids to list Workflow")):
            done = user.submit("denied") if command == "submit" else user.tandem(command)
            assert done.code == 64
            assert words in done.err
            assert "tandem-submitter" in done.err
    finally:
        user.kubeconfig = own
