"""Exit handler: ends what is left of the run and closes its record, however the run went.

Role processes that outlived their loop are ended (by process id and start time, so that a reused id is safe), and in a
cluster the run's JobSet is deleted with all it owns. The
record on the tracking server is closed as FINISHED, FAILED or, when a step was told to leave, KILLED. What is already
gone is no failure here.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec
import psutil

from components.step import Marker, Step, read_marker, run_step
from components.storage.layout import RunLayout
from components.tracking.run import Tracker, tracking_uri
from configs.failure import TOLD_TO_LEAVE, Failure
from configs.run import RunConfig

STEPS = ("preflight", "stage_data", "warm_start", "adopt_checkpoint", "rl_loop", "publish_checkpoint", "evaluate")
LEAVE_LIMIT_S = 15.0
"""Seconds a role has between SIGTERM and SIGKILL."""
START_TOLERANCE_S = 1.0


class RoleProcess(msgspec.Struct):
    """A line of `roles.json`, which rl_loop keeps."""

    role: str
    pid: int
    started: float
    """Start of the process in seconds since the epoch, as psutil's `create_time`."""


def release(step: Step) -> None:
    """End left-over processes, then the record."""
    if step.config.loop.roles == "kubernetes":
        end_pods(step.config)
    for role in end_roles(step.layout):
        print(f"ended {role}, which outlived its loop", flush=True)
    opened = read_marker(step.layout, "preflight")
    run_id = opened.parameters.get("tracking_run") if opened else None
    if opened and run_id:
        try:
            Tracker(tracking_uri(step.config), run_id).end(outcome(step.layout, opened.started))
        except Failure as failure:
            print(f"note: the record stays open: {failure.sentence}", flush=True)
    step.finish()


def end_pods(config: RunConfig) -> None:
    """Delete what the loop and preflight of this workflow created in the cluster, should it still be there."""
    from components.preflight.proof import proofs_of
    from components.rl_loop.cluster import LoopCluster, pod_name
    from components.rl_loop.kubernetes import workflow_of
    from components.rl_loop.objects import JOBSET

    cluster = LoopCluster()
    mine = workflow_of(cluster.get("v1", "Pod", pod_name()))
    loop = cluster.get(JOBSET, "JobSet", config.name)
    # Another execution of the run may have one of that name.
    left = [(loop, "loop")] if loop is not None and workflow_of(loop) == mine else []
    for found, maker in [*left, *((proof, "preflight") for proof in proofs_of(config, cluster, mine))]:
        name = found["metadata"]["name"]
        cluster.delete(JOBSET, "JobSet", name, uid=found["metadata"]["uid"])
        print(f"deleted JobSet {name}, which outlived its {maker}", flush=True)


def end_roles(layout: RunLayout) -> list[str]:
    """End the role processes of this machine that still live: SIGTERM, and SIGKILL after 15 s.

    Returns:
        Names of the roles ended.
    """
    file = layout.scratch / "roles.json"
    if not file.exists():
        return []
    try:
        recorded = msgspec.json.decode(file.read_bytes(), type=list[RoleProcess])
    except msgspec.DecodeError:
        # The loop was killed while it wrote; its roles die with it.
        print(f"note: {file} is cut off; no process was ended", flush=True)
        return []
    living = {process: role.role for role in recorded if (process := _living(role)) is not None}
    for process in living:
        _signal(process, kill=False)
    for process in _wait(list(living)):
        _signal(process, kill=True)
    file.unlink(missing_ok=True)
    return list(living.values())


def _wait(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait until the processes end; returns those that did not in time."""
    end = time.monotonic() + LEAVE_LIMIT_S
    while processes and time.monotonic() < end:
        time.sleep(0.05)
        processes = [process for process in processes if _runs(process)]
    return processes


def _runs(process: psutil.Process) -> bool:
    """Whether a process runs still; one that ended and was not collected by its parent does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _living(role: RoleProcess) -> psutil.Process | None:
    """The process, unless it ended or its id was given to another."""
    try:
        process = psutil.Process(role.pid)
        same = abs(process.create_time() - role.started) < START_TOLERANCE_S
        return process if same and _runs(process) else None
    except psutil.NoSuchProcess:
        return None


def _signal(process: psutil.Process, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        pass


def outcome(layout: RunLayout, since: float) -> Literal["FINISHED", "FAILED", "KILLED"]:
    """How the run went, from the markers of its steps.

    Args:
        layout: The run.
        since: Start of this execution (seconds since the epoch); failures before it belong to an earlier one.
    """
    markers = {name: marker for name in STEPS if (marker := read_marker(layout, name)) is not None}
    unfinished = [marker for marker in markers.values() if marker.status != "done" and marker.started >= since]
    if any(_told_to_leave(marker) for marker in unfinished):
        return "KILLED"
    done = "evaluate" in markers and markers["evaluate"].status == "done"
    return "FINISHED" if done and not unfinished else "FAILED"


def _told_to_leave(marker: Marker) -> bool:
    return marker.status == "failed" and marker.exit_code == TOLD_TO_LEAVE


if __name__ == "__main__":
    run_step("release", release)
