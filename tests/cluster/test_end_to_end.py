"""Runs of the quickstart, shortened, on a real cluster: Argo runs the compiled pipeline, every role is a pod."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.rl_loop.objects import JOBSET, LEADER_WORKER_SET
from components.rl_loop.pods import worker_of
from components.step import read_marker
from components.storage.layout import RunLayout
from components.train.catalogue import latest_checkpoint
from components.weights.store import open_weights
from configs.run import RUNS, RunConfig, load_run
from tests.cluster.api import wait_for
from tests.pipelines.command import ROOT, Outcome, tandem

SHORT = ("data.rows=2000", "warm_start.target_exact_match=0.05", "train.steps=40", "train.checkpoint_every=10",
         "evaluate.rows=64", "evaluate.every=20", "kubernetes.pull_policy=Never")  # fmt: skip
pytestmark = pytest.mark.timeout(1500)
RUN_LIMIT_S = 600.0
STEP_LIMIT_S = 240.0
GONE = (
    (JOBSET, "JobSet"), (LEADER_WORKER_SET, "LeaderWorkerSet"), ("apps/v1", "StatefulSet"), ("v1", "Service"),
    ("v1", "ConfigMap"), ("batch/v1", "Job"), ("coordination.k8s.io/v1", "Lease"), ("v1", "Pod"),
)  # fmt: skip


class Site:
    """A namespace with Tandem installed."""

    def __init__(self, cluster: Any, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.bucket = cluster.s3.bucket
        os.environ.update(cluster.s3.environment())
        self.images = folder / "images.json"
        self.images.write_text(cluster.load_built_images().model_dump_json())

    def install(self) -> None:
        """Secrets, then `tandem install`; waits for MLflow."""
        s3 = self.cluster.s3.environment(inside=True)
        keys = {key: s3[key] for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        secrets = {"tandem-redis": {"password": "for-the-test"}, "tandem-s3": keys}
        for name, values in secrets.items():
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": values}
            self.cluster.api.apply([secret], self.namespace)
        self.tandem(
            "install", "--mlflow-storage", "0", "--mlflow-artifacts", f"s3://{self.bucket}/{self.namespace}/mlflow",
            "--s3-endpoint", s3["AWS_ENDPOINT_URL"], "--region", s3["AWS_REGION"], "--pull-policy", "Never",
            "--images", str(self.images),
        )  # fmt: skip

        def ready() -> bool:
            deployment = self.cluster.api.get("apps/v1", "Deployment", "tandem-mlflow", self.namespace)
            return bool(deployment["status"].get("readyReplicas"))

        wait_for("MLflow", STEP_LIMIT_S, ready, 1.0)

    def tandem(self, command: str, *arguments: str, code: int = 0) -> Outcome:
        """A `tandem` command on this cluster and namespace."""
        place = ("--context", self.cluster.context, "--kubeconfig", str(self.cluster.kubeconfig), "-n", self.namespace)
        target = () if command == "install" else ("--target", "argo")
        done = tandem(ROOT, command, *arguments, *target, *place, limit_s=RUN_LIMIT_S)
        assert done.code == code, f"{done.out}\n{done.err}"
        return done

    def submit(
        self, name: str, *overrides: str, code: int = 0, images: Path | None = None, follow: bool = False
    ) -> Outcome:
        """Submit the shortened quickstart."""
        root = f"storage.root=s3://{self.bucket}/{self.namespace}"
        settings = [part for setting in (root, *SHORT, *overrides) for part in ("-s", setting)]
        watch = "--follow" if follow else "--no-follow"
        run_file = str(RUNS / "quickstart.yaml")
        return self.tandem(
            "submit", run_file, "--name", name, watch, "--images", str(images or self.images), *settings, code=code
        )

    def layout(self, name: str) -> RunLayout:
        """The run's store, as this machine reaches it."""
        overrides = (
            f"storage.root=s3://{self.bucket}/{self.namespace}",
            "loop.roles=kubernetes",
            f"storage.scratch={self.folder}",
        )
        config = load_run(RUNS / "quickstart.yaml", overrides)
        return RunLayout(RunConfig.model_validate({**config.model_dump(), "name": name}))

    def pods(self, run: str, role: str) -> list[dict[str, Any]]:
        """Pods of a role of the loop."""
        return self.cluster.api.list(
            "v1", "Pod", self.namespace, f"tandem.run={run},app.kubernetes.io/component={role}"
        )

    def versions(self, run: str) -> list[int]:
        """Versions in the weights store."""
        return open_weights(self.layout(run)).versions()

    def wait_for_version(self, run: str, version: int) -> None:
        """Wait until training has published a version."""
        self.wait(f"version {version} of {run}", run, lambda: self.versions(run)[-1:] >= [version])

    def wait(self, what: str, run: str, look: Callable[[], Any]) -> Any:
        """Wait for something to come while a run goes on."""

        def unless_over() -> Any:
            found = self.cluster.api.list("argoproj.io/v1alpha1", "Workflow", self.namespace, f"tandem.run={run}")
            newest = max(found, key=lambda workflow: workflow["metadata"]["creationTimestamp"])
            if newest.get("status", {}).get("phase") in ("Failed", "Error"):
                state = self.status(newest["metadata"]["name"])
                raise AssertionError(f"{what}: the run ended: {state['sentence']} {state['steps']}")
            return look()

        return wait_for(what, STEP_LIMIT_S, unless_over, 0.5)

    def wait_for_checkpoint(self, run: str) -> str:
        """Wait until there is a durable checkpoint."""
        return self.wait(f"a checkpoint of {run}", run, lambda: latest_checkpoint(self.layout(run)))

    def status(self, name: str) -> dict[str, Any]:
        """What `tandem status --json` says."""
        return json.loads(self.tandem("status", name, "--json").out)

    def wait_ended(self, name: str) -> dict[str, Any]:
        """Wait until an execution is over."""
        ended = ("succeeded", "failed", "canceled")
        return wait_for(
            f"the end of {name}", RUN_LIMIT_S, lambda: (s := self.status(name))["state"] in ended and s, 2.0
        )

    def left(self, run: str) -> list[str]:
        """Objects of a run's loop that are still there."""
        return [
            f"{kind} {each['metadata']['name']}"
            for api_version, kind in GONE
            for each in self.cluster.api.list(api_version, kind, self.namespace, f"tandem.run={run}")
            if not each["metadata"].get("labels", {}).get("workflows.argoproj.io/workflow")
        ]


@pytest.fixture(scope="module")
def site(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    earlier = dict(os.environ)
    namespace = cluster.namespace("e2e")
    made = Site(cluster, namespace, tmp_path_factory.mktemp("e2e"))
    made.install()
    yield made
    cluster.delete_namespace(namespace)
    os.environ.clear()
    os.environ.update(earlier)


def _events_of_a_balanced_run(layout: RunLayout) -> list[dict[str, Any]]:
    audit = json.loads(layout.store.read("audit.json"))
    assert audit["groups_issued"] == audit["groups_durable"] + audit["groups_dropped"] and not audit["findings"]
    return [json.loads(line) for line in layout.store.read("events.jsonl").splitlines()]


def test_a_run_survives_a_lost_rollout_pod_and_is_published(site: Site, figures: dict[str, Any]) -> None:
    """Submit, lose an engine on the way, finish: checkpoint in S3, audit balanced, evaluated, report readable."""
    started = time.monotonic()
    site.submit("whole")
    site.wait_for_version("whole", 1)
    figures["submit_to_first_update_s"] = round(time.monotonic() - started, 1)
    (engine,) = site.pods("whole", "rollout")
    site.cluster.api.core.delete_namespaced_pod(engine["metadata"]["name"], site.namespace, grace_period_seconds=0)
    state = site.wait_ended("whole")
    figures["total_s"] = round(time.monotonic() - started, 1)
    assert state["state"] == "succeeded", state

    layout = site.layout("whole")
    assert latest_checkpoint(layout) == "step-000040"
    events = _events_of_a_balanced_run(layout)
    assert any(event["event"] == "restart" and event["restarted"] == "rollout-0" for event in events)
    assert sum(event["event"] == "warm_start" for event in events)
    evaluated = read_marker(layout, "evaluate")
    assert evaluated and evaluated.status == "done" and evaluated.parameters["promoted"] in ("true", "false")
    assert b"<svg" in layout.store.read("report.html")
    manifest = json.loads(layout.store.read("manifest.json"))
    assert json.loads(site.images.read_text())["train"] in json.dumps(manifest)
    assert not site.left("whole")
    # Submitting the same again finds it and starts nothing.
    assert "succeeded" in site.submit("whole").out


def test_a_gang_of_two_pods_shares_the_experts_and_survives_a_lost_rank(site: Site, figures: dict[str, Any]) -> None:
    """Two pods train one policy; one is lost, and the gang is made anew. The transport between them was looked at before."""
    gang = ("kubernetes.train.nodes=2", "train.ranks=2", "train.expert_parallel=2", "train.steps=12",
            "train.checkpoint_every=4")  # fmt: skip
    started = time.monotonic()
    site.submit("gang", *gang)
    site.wait_for_checkpoint("gang")
    figures["gang_submit_to_checkpoint_s"] = round(time.monotonic() - started, 1)
    lost = next(pod for pod in site.pods("gang", "train") if worker_of(pod) == "train-1")
    site.cluster.api.core.delete_namespaced_pod(lost["metadata"]["name"], site.namespace, grace_period_seconds=0)
    state = site.wait_ended("gang")
    figures["gang_total_s"] = round(time.monotonic() - started, 1)
    assert state["state"] == "succeeded", state

    layout = site.layout("gang")
    assert latest_checkpoint(layout) == "step-000012"
    events = _events_of_a_balanced_run(layout)
    assert any(event["event"] == "restart" and event["restarted"].startswith("train") for event in events)
    steps = [event["metrics"] for event in events if event["event"] == "step"]
    assert all("train/moe/max_violation" in metrics for metrics in steps)
    transport = json.loads(layout.store.read("manifest.json"))["transport"]
    assert transport["proof"]["carried_by"] == "tcp (eth0)"
    assert not site.left("gang")


def _process_of(pod_uid: str, module: str) -> int:
    """Process on this machine that runs a module in a pod."""
    for entry in Path("/proc").iterdir():
        try:
            named = entry.name.isdigit() and module in (entry / "cmdline").read_text().split("\0")
            if named and pod_uid in (entry / "cgroup").read_text().replace("_", "-"):
                return int(entry.name)
        except OSError:
            continue
    return 0


def test_a_killed_launcher_adopts_and_a_cancel_leaves_nothing(site: Site, figures: dict[str, Any]) -> None:
    """kill -9 of rl_loop: its retry goes on with the same pods. Cancel: all gone. Retry: from the checkpoint."""
    site.submit("hard", "train.steps=4000")
    site.wait_for_version("hard", 3)
    jobset = site.cluster.api.get(JOBSET, "JobSet", "hard", site.namespace)
    train = site.pods("hard", "train")[0]["metadata"]["uid"]
    (launcher,) = [
        pod for pod in site.cluster.api.list("v1", "Pod", site.namespace, "workflows.argoproj.io/workflow=hard")
        if "rl-loop" in pod["metadata"]["name"]
    ]  # fmt: skip
    process = _process_of(launcher["metadata"]["uid"], "components.rl_loop.main")
    assert process
    os.kill(process, signal.SIGKILL)

    def holder() -> str:
        lease = site.cluster.api.get("coordination.k8s.io/v1", "Lease", "hard", site.namespace)
        return lease["spec"]["holderIdentity"] if lease else ""

    first = launcher["metadata"]["name"]
    wait_for("the retried launcher", STEP_LIMIT_S, lambda: holder() not in ("", first), 0.5)
    reached = site.versions("hard")[-1]
    site.wait_for_version("hard", reached + 3)
    assert (
        site.cluster.api.get(JOBSET, "JobSet", "hard", site.namespace)["metadata"]["uid"] == jobset["metadata"]["uid"]
    )
    assert site.pods("hard", "train")[0]["metadata"]["uid"] == train

    site.wait_for_checkpoint("hard")
    figures["cancel_to_gone_s"] = _cancel(site, "hard")
    checkpoint = latest_checkpoint(site.layout("hard"))
    assert checkpoint

    site.tandem("retry", "hard", "--no-follow")
    step = int(checkpoint.removeprefix("step-"))
    wait_for("training that went on", STEP_LIMIT_S, lambda: max(_steps(site, "hard"), default=0) > step, 1.0)
    _cancel(site, "hard")


def _cancel(site: Site, run: str) -> float:
    """Cancel a run; seconds until its last object was gone."""
    import threading

    started = time.monotonic()
    command = threading.Thread(target=lambda: site.tandem("cancel", run))
    command.start()
    wait_for("nothing to be left", 60, lambda: not site.left(run), 0.1)
    gone = round(time.monotonic() - started, 1)
    command.join()
    return gone


def _steps(site: Site, run: str) -> list[int]:
    return site.versions(run)


def test_an_image_that_is_not_there_is_told_in_a_minute(site: Site) -> None:
    images = site.folder / "absent.json"
    absent = dict.fromkeys(("control", "train", "rollout"), "localhost/tandem/absent:1")
    images.write_text(json.dumps(absent))
    started = time.monotonic()
    done = site.submit("absent", images=images, follow=True, code=64)
    assert time.monotonic() - started < 60
    assert "localhost/tandem/absent:1" in done.err


def test_a_schedule_fires(site: Site) -> None:
    root = f"storage.root=s3://{site.bucket}/{site.namespace}"
    site.tandem(
        "schedule", str(RUNS / "quickstart.yaml"), "--name", "hourly", "--cron", "* * * * *", "--images",
        str(site.images), "-s", root,
    )  # fmt: skip

    def fired() -> list[dict[str, Any]]:
        return [each for each in json.loads(site.tandem("executions", "--json").out) if each["schedule"] == "hourly"]

    (execution, *_) = wait_for("the schedule", 90, fired, 2.0)
    site.tandem("unschedule", "hourly")
    site.tandem("cancel", execution["name"])
    assert execution["run"] == execution["name"]
    assert execution["name"].startswith("hourly-")
