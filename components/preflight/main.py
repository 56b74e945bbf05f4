"""Checks that the run can work here, before it costs anything, and opens its record on the tracking server.

It looks at the stack and hardware (known clashes between versions), installed packages, what the engines need, room on
disk, the run's store (a probe is written and deleted), a given checkpoint, Redis and the tracking server. On a cluster
it proves the transport between training's nodes by a known exchange (docs/transport.md). The build manifest says what
exactly ran; it goes to the store, to the tracking server and out as an artifact.
"""

from __future__ import annotations

from components.preflight.checks import (
    check_checkpoint,
    check_disk,
    check_packages,
    check_redis,
    check_stack,
    check_storage,
)
from components.preflight.engines import check_engines
from components.preflight.transport import check_transport
from components.step import Step, run_step
from components.tracking.manifest import build_manifest, manifest_bytes, manifest_tags
from components.tracking.run import Tracker, open_run, tracking_uri


def preflight(step: Step) -> None:
    """Check, write the build manifest, and name the run's record."""
    config = step.config
    stack, hardware = check_stack(config)
    if config.loop.roles == "kubernetes":
        from components.preflight.cluster import check_cluster
        from components.rl_loop.cluster import LoopCluster

        check_cluster(config, LoopCluster())
    else:
        for note in check_packages(stack, hardware):
            print(f"note: {note}", flush=True)
        check_disk(config, step.layout.scratch)
        check_redis(config)
    sglang = check_engines(config, stack, hardware)
    check_storage(step.layout)
    check_checkpoint(config, step.parameters.get("checkpoint", ""))

    # The dearest check comes last: it needs two of training's nodes.
    proof = check_transport(config, stack)

    images = config.kubernetes.images or stack.images
    engine = {"sglang": sglang} if sglang else {}
    manifest = build_manifest(config, images=images.model_dump(), engine=engine, proof=proof)
    text = manifest_bytes(manifest)
    run_id = open_run(config, {**manifest_tags(manifest), "hardware": hardware.name})
    tracker = Tracker(tracking_uri(config), run_id)
    tracker.log_config(config)
    tracker.log_text("build/manifest.json", text.decode())
    step.store.write("manifest.json", text)
    step.store.write("config.json", config.to_json().encode())
    step.write_artifact("manifest", text)
    step.finish({"tracking_run": run_id})


if __name__ == "__main__":
    run_step("preflight", preflight)
