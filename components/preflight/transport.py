"""Whether traffic between training nodes must be proven, the proof, and what becomes of its outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from components.preflight.evidence import Problem, Report, Wanted
from components.preflight.nic import SYS, efa_devices
from configs.failure import BadConfig, Failure, ToldToLeave
from configs.run import RunConfig
from configs.stack import Stack


def expects_efa(config: RunConfig) -> bool:
    """Whether `transport.expect` asks for EFA; `auto` does where training has nodes to connect and asks for its interfaces.

    Training on one node sends nothing over it, and the proof would need a second node.
    """
    pods = config.kubernetes.train
    if config.transport.expect == "auto":
        return config.loop.roles == "kubernetes" and pods.nodes > 1 and pods.efa_interfaces > 0
    return config.transport.expect == "efa"


def wanted_of(config: RunConfig, stack: Stack) -> Wanted:
    """What an exchange has to show for this run."""
    pods = config.kubernetes.train
    # In training only DeepEP uses GIN; `auto` may choose it.
    deep_ep = config.train.expert_parallel > 1 and config.kernels.dispatch in ("auto", "deep_ep")
    setting = config.kernels.deep_ep.gin
    gin = stack.gin if setting == "environment" else setting
    return Wanted(
        efa=expects_efa(config),
        gin=gin if deep_ep else "none",
        deep_ep_gin=setting,
        deep_ep_build=stack.deep_ep_build,
        interfaces=pods.efa_interfaces,
        gpus=pods.gpus,
    )


def check_transport(config: RunConfig, stack: Stack, root: Path = SYS) -> dict[str, Any]:
    """Prove the transport where there is one between nodes.

    Args:
        config: The run's configuration.
        stack: Its stack.
        root: As /sys/class, for a run on one machine.

    Returns:
        What the build manifest keeps; notes are printed.

    Raises:
        BadConfig: EFA is expected and not shown; the sentence says why.
        ServiceGone: the pods of the proof did not start or end in time. Where EFA is not expected, both are notes.
    """
    if config.loop.roles != "kubernetes":
        return _on_one_machine(config, root)
    pods = config.kubernetes.train
    if pods.nodes == 1 and not expects_efa(config):
        if pods.efa_interfaces:
            print(
                "note: EFA is not proven: training is one node, which sends nothing over it, and the proof would take a second"
                " one; set transport.expect to efa to have it nevertheless",
                flush=True,
            )
        return _entry(config, "training is one pod")
    from components.preflight.proof import Proof
    from components.rl_loop.cluster import LoopCluster, pod_name
    from components.rl_loop.kubernetes import workflow_of

    cluster = LoopCluster()
    owner = workflow_of(cluster.get("v1", "Pod", pod_name()))
    try:
        report = Proof(config, wanted_of(config, stack), cluster, owner).make()
    except ToldToLeave:
        raise
    except Failure as failure:
        if expects_efa(config):
            raise
        print(f"note: the transport was not looked at: {failure.sentence}", flush=True)
        return _entry(config, failure.sentence)
    return conclude(config, report)


def conclude(config: RunConfig, report: Report) -> dict[str, Any]:
    """Fail, or print the notes and return the manifest's entry.

    Raises:
        BadConfig: the report does not prove what is expected.
    """
    print(
        f"transport: {report.carried_by}, {report.gib_s:g} GiB/s each way between"
        f" {' and '.join(node.pod for node in report.evidence.nodes)}",
        flush=True,
    )
    for line in report.evidence.findings.lines:
        print(f"transport: {line}", flush=True)
    failing = [problem for problem in report.problems if problem.fails]
    if failing:
        # The reasons of the verdict, and what else was seen.
        for problem in report.problems[1:]:
            print(f"transport: {problem.sentence}", flush=True)
        more = f" (and {len(failing) - 1} more, see above)" if len(failing) > 1 else ""
        raise BadConfig(f"EFA is not proven (transport.expect): {failing[0].sentence}{more}")
    for problem in report.problems:
        print(f"note: {problem.sentence}", flush=True)
    return _entry(config, "", report)


def _on_one_machine(config: RunConfig, root: Path) -> dict[str, Any]:
    if not expects_efa(config):
        return _entry(config, "the run is on one machine")
    if not efa_devices(root):
        raise BadConfig(
            f"transport.expect is efa, but this machine has no EFA device in {root / 'infiniband'}; run it on a cluster by"
            " `tandem submit`, or set transport.expect to any"
        )
    raise BadConfig(
        "transport.expect is efa, but all roles run on this one machine, so that nothing crosses its EFA; run it on a cluster"
        " by `tandem submit`, or set transport.expect to any"
    )


def _entry(config: RunConfig, why_not: str, report: Report | None = None) -> dict[str, Any]:
    """The manifest's entry: always the same keys, and nothing that differs from one exchange to the next."""
    findings = msgspec.to_builtins(report.evidence.findings) if report else {}
    kept = ("nccl", "plugin", "networks", "providers", "fabrics", "protocols", "nics", "gdrdma", "gin_types")
    notes: tuple[Problem, ...] = report.problems if report else ()
    return {
        "expected": "efa" if expects_efa(config) else "any",
        "carried_by": report.carried_by if report else None,
        "not_made": why_not or None,
        "notes": [problem.key for problem in notes],
        **{name: findings.get(name) for name in kept},
    }
