"""One local execution of the compiled pipeline: its name and lock, its tracking server, its child process, its summary."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from components.experience.audit import Audit, audit
from components.experience.connection import wait_until_loaded
from components.experience.experience import Experience
from components.experience.redis_server import RedisServer
from components.role import die_with_parent
from components.step import read_marker
from components.storage.layout import RunLayout
from components.tracking.server import Server, start_server
from configs.failure import BadConfig, Failure, ToldToLeave, failure_of
from configs.hardware import load_hardware
from configs.run import RunConfig, load_run, validated
from configs.stack import load_stack
from pipelines.compile import compile_pipeline
from pipelines.progress import Display

TRACKING_READY_S = 90.0
POLL_S = 0.2
SAMPLE_S = 1.0
"""Seconds between looks at the memory of the process tree."""
STOP_LIMIT_S = 60.0
"""Seconds the pipeline has to end after a signal; training writes a checkpoint in that time."""


def resolve(run_file: Path, overrides: tuple[str, ...], name: str | None, runs: Path) -> RunConfig:
    """The configuration of a new run: the file, the overrides, a name of its own, absolute places.

    Raises:
        BadConfig: something in it is not valid.
    """
    config = load_run(run_file, overrides)
    values = config.model_dump(mode="json")
    values["name"] = name or f"{config.name[:24]}-{datetime.now():%Y%m%d-%H%M%S}"
    # A champion is comparable only on the same task, so the data gives the model its name.
    task = re.sub(r"[^a-z0-9]+", "-", Path(config.data.uri.rpartition(":")[2]).stem.lower()).strip("-")
    values["tracking"]["registered_model"] = config.tracking.registered_model or f"{config.tracking.experiment}-{task}"
    load_stack(config.stack), load_hardware(config.hardware)
    if runs != Path("runs"):
        values["storage"] |= {"scratch": str(runs)} | ({"root": str(runs)} if config.storage.root == "runs" else {})
    for place in ("root", "scratch"):
        if "://" not in values["storage"][place]:
            values["storage"][place] = str(Path(values["storage"][place]).expanduser().absolute())
    for source in (values["data"], values["model"]):
        key = "uri" if "uri" in source else "checkpoint"
        if source[key] and "://" not in source[key] and not source[key].startswith("example:"):
            source[key] = str(Path(source[key]).expanduser().absolute())
    return validated(RunConfig, values, str(run_file))


def resume_config(run: str, runs: Path) -> RunConfig:
    """The configuration a run was started with.

    Raises:
        BadConfig: there is no such run.
    """
    file = runs / run / "run.json"
    if not file.exists():
        known = sorted(path.parent.name for path in runs.glob("*/run.json"))
        raise BadConfig(f"{runs}: holds no run '{run}'; known: {', '.join(known[-5:]) or 'none'}")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError):
        raise BadConfig(f"{file}: cannot be read; it is not what `tandem run` wrote") from None
    return RunConfig.from_json(text, str(file))


def audit_run(run: str, runs: Path) -> Audit:
    """Audit a run from its own Redis: the live one, or one started on its append-only file.

    Raises:
        BadConfig: there is no such run, or it has no loop yet.
    """
    config = resume_config(run, runs)
    layout = RunLayout(config)
    if config.loop.redis_url or _live_redis(layout):
        return audit(Experience(config.loop.redis_url or _live_redis(layout), config), layout)
    if not any(layout.redis.glob("appendonly*")):
        raise BadConfig(f"run '{run}' has no experience yet: its loop was never started")
    lock = open(layout.scratch / "loop.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadConfig(f"the loop of run '{run}' is starting or stopping; ask again in a moment") from None
    server = RedisServer(layout.redis)
    try:
        experience = Experience(server.url, config)
        wait_until_loaded(experience, 60.0)
        return audit(experience, layout)
    finally:
        server.stop()
        lock.close()


def _live_redis(layout: RunLayout) -> str:
    """Address of the run's embedded Redis if its loop is running, else an empty string."""
    file = layout.scratch / "redis_url"
    if not file.exists():
        return ""
    url, pid, started = file.read_text().split()
    try:
        alive = psutil.Process(int(pid)).create_time() == float(started)
    except psutil.NoSuchProcess:
        alive = False
    return url if alive else ""


def serve_tracking(runs: Path, port: int) -> None:
    """Serve MLflow on the runs of a folder until interrupted.

    Raises:
        BadConfig: there are no runs there, or the port is in use.
    """
    folder = runs / "mlflow"
    if not folder.exists():
        raise BadConfig(f"{runs}: holds no MLflow store yet; start a run first")
    server = start_server(folder, port)
    try:
        server.wait_ready(TRACKING_READY_S)
        print(f"MLflow: {server.uri} (Ctrl-C ends it)", flush=True)
        server.process.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()


class Execution:
    """Runs one pipeline to its end."""

    def __init__(self, config: RunConfig, resumed: bool, plain: bool) -> None:
        self.config = config
        self.resumed = resumed
        self.layout = RunLayout(config)
        self.display = Display(config, self.layout, plain)
        self.peak_rss = 0
        self._signals = 0
        self._sampled = 0.0

    def run(self) -> dict[str, Any]:
        """Run the pipeline; returns the summary that `--json` writes.

        Raises:
            Failure: of the step that failed.
        """
        started = time.time()
        lock = self._claim()
        server = None
        try:
            if not self.config.tracking.uri and not os.environ.get("MLFLOW_TRACKING_URI"):
                folder = Path(self.config.storage.scratch) / "mlflow"
                server = start_server(folder, self.config.tracking.port)
            ir = self.layout.scratch / "pipeline.yaml"
            compile_pipeline(load_stack(self.config.stack), ir)
            if server is not None:
                self.display.note(f"MLflow: {server.uri}")
            self._pipeline(ir, server, lock)
        finally:
            if server is not None:
                server.stop()
            lock.close()
        summary = self._summary(started)
        self.display.summary(summary)
        return summary

    def _claim(self) -> IO[str]:
        """Take the run's name.

        Raises:
            BadConfig: a live run has it, or an ended one; or the folder cannot be written.
        """
        name, scratch = self.config.name, self.layout.scratch
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            lock = open(scratch / "lock", "w")
        except OSError as error:
            raise BadConfig(
                f"storage.scratch {scratch}: cannot be written ({error.strerror}); choose another folder"
            ) from None
        # A launcher that was killed leaves its pipeline stopping: a resume waits for that.
        end = time.monotonic() + (STOP_LIMIT_S if self.resumed else 0.0)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise BadConfig(
                        f"a run named '{name}' is live; wait for it, stop it, or choose another --name"
                    ) from None
                time.sleep(0.2)
        if not self.resumed and (scratch / "run.json").exists() and self._has_staged():
            raise BadConfig(f"a run named '{name}' exists; go on with it by --resume {name}, or choose another --name")
        self.layout.logs.mkdir(exist_ok=True)
        (scratch / "run.json").write_text(self.config.to_json())
        return lock

    def _has_staged(self) -> bool:
        """Whether an earlier run of this name came further than a mistake in its data or configuration."""
        try:
            marker = read_marker(self.layout, "stage_data")
        except Failure:
            return True
        return marker is not None and marker.status == "done"

    def _pipeline(self, ir: Path, server: Server | None, lock: IO[str]) -> None:
        """Run the IR in a child process, showing progress, passing signals on."""
        arguments = self.layout.scratch / "arguments.json"
        arguments.write_text(json.dumps({"config": self.config.to_json(), "checkpoint": self.config.model.checkpoint}))
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment["TANDEM_IR_SHA256"] = hashlib.sha256(ir.read_bytes()).hexdigest()
        if server is not None:
            environment["MLFLOW_TRACKING_URI"] = server.uri
            server.wait_ready(TRACKING_READY_S)
        command = [sys.executable, "-m", "pipelines.targets.local", str(ir), str(arguments)]
        errors = self.layout.logs / "pipeline.err"
        with open(self.layout.logs / "pipeline.log", "ab") as out, open(errors, "wb") as err:
            child = subprocess.Popen(
                [*command, "--pipeline-root", str(self.layout.scratch / "kfp")],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True,
                preexec_fn=die_with_parent, pass_fds=[lock.fileno()],
            )  # fmt: skip
        self._follow(child)
        if child.returncode < 0 and self._signals:
            raise ToldToLeave(f"stopped; `tandem run --resume {self.config.name}` goes on")
        if child.returncode:
            lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
            self.display.note(f"logs: {self.layout.logs}")
            sentence = lines[-1] if lines else f"the pipeline ended with {child.returncode}; see {self.layout.logs}"
            raise failure_of(child.returncode, sentence)

    def _follow(self, child: subprocess.Popen[bytes]) -> None:
        earlier = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        told, end = 0, float("inf")
        try:
            with self.display:
                while child.poll() is None:
                    self.display.update()
                    self._sample()
                    if self._signals > told:
                        told = self._signals
                        if told == 1:
                            self.display.note("stopping: the running step hands back its work (again to kill it)")
                            child.terminate()
                            end = time.monotonic() + STOP_LIMIT_S
                        else:
                            end = 0.0
                    if time.monotonic() > end:
                        _kill_tree(child.pid)
                    time.sleep(POLL_S)
                self.display.update()
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signals += 1

    def _sample(self) -> None:
        if time.monotonic() - self._sampled < SAMPLE_S:
            return
        self._sampled = time.monotonic()
        total = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.peak_rss = max(self.peak_rss, total)

    def _summary(self, started: float) -> dict[str, Any]:
        """The figures of a finished run, under stable keys."""
        markers = {step: read_marker(self.layout, step) for step in ("preflight", "rl_loop", "evaluate")}
        if any(marker is None for marker in markers.values()):
            raise Failure(
                f"run {self.config.name}: the pipeline ended well but left no marker of one of {sorted(markers)}"
            )
        loop, evaluation, first = (markers[step] for step in ("rl_loop", "evaluate", "preflight"))
        assert loop is not None and evaluation is not None and first is not None
        counted = msgspec.json.decode(self.layout.store.read("audit.json"), type=Audit)
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        figures = loop.metrics
        return {
            "run": self.config.name,
            "exact_match_before": evaluation.metrics["eval/exact_match_before"],
            "exact_match_after": evaluation.metrics["eval/exact_match"],
            "promoted": evaluation.parameters.get("promoted") == "true",
            "verified_updates": int(figures["verified_updates"]),
            "updates_per_hour": figures["updates_per_hour"],
            "rollout_tokens_per_s": figures["rollout_tokens_per_s"],
            "train_wait_fraction": figures["train_wait_fraction"],
            "staleness_max": int(figures["staleness_max"]),
            "wall_s": time.time() - started,
            "cpu_s": sum(part.ru_utime + part.ru_stime for part in usage),
            "peak_rss_bytes": self.peak_rss,
            "groups_issued": counted.groups_issued,
            "groups_durable": counted.groups_durable,
            "groups_dropped": counted.groups_dropped,
            "report": str(self.layout.store.local("report.html") or f"{self.layout.uri}/report.html"),
            "mlflow_run_id": first.parameters["tracking_run"],
        }


def _kill_tree(pid: int) -> None:
    try:
        parent = psutil.Process(pid)
        doomed = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in doomed:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
