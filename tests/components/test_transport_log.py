"""NCCL's log and the table of silent fallbacks: every row is found by its sign, and only by it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from components.preflight.evidence import Evidence, Node, Wanted
from components.preflight.exchange import Part, conclude
from components.preflight.fabric_checks import Host
from components.preflight.fallbacks import COUNTED, FALLBACKS, Fallback, judge
from components.preflight.nccl_log import merge, parse_log
from components.preflight.nic import Counters
from tests.components import transport_logs as logs

MIB = 2**20
SENT = 256 * MIB
GDA = Wanted(efa=True, gin="efa-gda", deep_ep_build="amazon", interfaces=16, gpus=8)
PLAIN = Wanted(efa=True, interfaces=16, gpus=8)
GOOD_HOST = Host(
    fi_info=16,
    uverbs=("uverbs0",),
    huge_pages_mib=5120,
    shared_memory_mib=65536,
    gdrdrv=True,
    direct="dmabuf",
    efa_driver="3.3.0g",
    nccl_libraries=("/opt/nccl/lib/libnccl.so.2",),
    plugin_gda=True,
)
OVER_EFA = Counters({"rdmap0s1": {"tx_bytes": SENT + MIB}}, {"eth0": 4096})
OVER_ETH = Counters({"rdmap0s1": {"tx_bytes": 0, "rdma_write_bytes": 0}}, {"eth0": SENT + 9 * MIB})
IN_A_POD = Counters({"rdmap0s1": {}}, {"eth0": 4096})
"""Where the kernel shows no counters of the devices."""
NOWHERE = Counters({"rdmap0s1": {"tx_bytes": SENT // 2}}, {"eth0": 4096})


def with_ranks(
    log: str, moved: Counters = OVER_EFA, other: str | None = None, error: str = "", wanted: Wanted = PLAIN
) -> Evidence:
    """What an exchange of four ranks gives, of which rank 3 writes another log."""
    return conclude(wanted, parts_of(log, moved, other, error), SENT).evidence


def parts_of(log: str, moved: Counters, other: str | None = None, error: str = "") -> list[Part]:
    logs_of = [log, log, log, log if other is None else other]
    nodes = {rank: evidence(log, moved=moved).nodes[rank // 2] for rank in (0, 2)}
    return [Part(nodes.get(rank), rank, parse_log(text), 1.0, error) for rank, text in enumerate(logs_of)]


def evidence(
    log: str, wanted: Wanted = GDA, moved: Counters = OVER_EFA, machines: str = "ab", **host: object
) -> Evidence:
    both = msgspec.structs.replace(GOOD_HOST, **host)
    nodes = tuple(Node(pod=f"pod-{m}{i}", node=m, sent=SENT, moved=moved, host=both) for i, m in enumerate(machines))
    return Evidence(wanted=wanted, findings=parse_log(log), nodes=nodes)


CASES: dict[str, tuple[Evidence, str]] = {
    "one-node": (evidence(logs.EFA_DIRECT, machines="aa"), "both pods of the exchange ran on node a,"),
    "plugin-missing": (
        evidence(logs.SOCKETS, moved=OVER_ETH),
        "did not find the aws-ofi-nccl plugin (its log says so)",
    ),
    "no-provider": (evidence(logs.NO_PROVIDER, fi_info=0), "libfabric finds no EFA in pod-a0, pod-b1"),
    "no-device": (evidence(logs.SOCKETS, uverbs=()), "pods pod-a0, pod-b1 have no /dev/infiniband/uverbs*"),
    "sockets": (evidence(logs.SOCKETS), "plain TCP sockets instead of EFA"),
    "other-network": (evidence(logs.INFINIBAND), "network IB instead of Libfabric"),
    "network-unknown": (evidence(logs.NOTHING), "NCCL's log names no network"),
    "rank-silent": (with_ranks(logs.EFA_DIRECT, other=""), "ranks 3 of the exchange wrote nothing"),
    "other-provider": (evidence(logs.TCP_PROVIDER), "provider tcp instead of efa"),
    "ranks-differ": (evidence(logs.MIXED), "(Libfabric and Socket)"),
    "few-interfaces": (evidence(logs.FEW), "found 2 of the 16 EFA interfaces"),
    "send-receive": (evidence(logs.SEND_RECEIVE), "its SENDRECV protocol, not RDMA"),
    "no-gpu-direct": (evidence(logs.NO_GPU_DIRECT, direct=""), "(a node has neither dmabuf nor nvidia_peermem)"),
    "no-channel": (
        with_ranks(logs.EFA_DIRECT, other=logs.EFA_DIRECT.replace(" via NET/", " by ")),
        "ranks 3 of the exchange name no channel",
    ),
    "no-traffic": (evidence(logs.EFA_DIRECT, moved=NOWHERE), "only 128.0 MiB of the 256.0 MiB that pod pod-a0 sent"),
    "counters-unreadable": (evidence(logs.EFA_DIRECT, moved=IN_A_POD), "devices of pods pod-a0, pod-b1 tell no bytes"),
    "over-ethernet": (evidence(logs.EFA_DIRECT, moved=OVER_ETH), "pod-a0 (eth0), pod-b1 (eth0) went over a plain"),
    "gin-unset": (evidence(logs.NO_GIN_TYPE), "NCCL_GIN_TYPE is unset"),
    "gin-proxy": (evidence(logs.PROXY), "from the CPU proxy, but the GPU over EFA (type 5) is what"),
    "gin-absent": (evidence(logs.NO_GIN), "DeepEP says that NCCL has no GIN"),
    "plugin-old": (evidence(logs.OLD_PLUGIN), "aws-ofi-nccl 1.19.2 has no GIN"),
    "plugin-without-gda": (evidence(logs.EFA_DIRECT, plugin_gda=False), "lacks ncclGinPlugin_v14"),
    "driver-old": (evidence(logs.EFA_DIRECT, efa_driver="3.1.0g"), "older than 3.3.0"),
    "driver-unknown": (evidence(logs.EFA_DIRECT, efa_driver=""), "do not see the version of their nodes' EFA driver"),
    "gdrcopy-missing": (evidence(logs.EFA_DIRECT, gdrdrv=False), "have no /dev/gdrdrv"),
    "ordered-kernels": (
        evidence(logs.EFA_DIRECT, msgspec.structs.replace(GDA, deep_ep_build="upstream")),
        "DeepEP's upstream kernels take for granted",
    ),
    "two-nccl": (
        evidence(logs.EFA_DIRECT, nccl_libraries=("/a/libnccl.so.2", "/b/libnccl.so.2")),
        "two copies of NCCL",
    ),
    "unproven": (evidence("NET/OFI Initializing aws-ofi-nccl 1.21.1\nUsing network Libfabric"), "provider (none)"),
    "communicator-reused": (
        evidence(logs.EFA_DIRECT, environment={"EP_REUSE_NCCL_COMM": "1"}),
        "EP_REUSE_NCCL_COMM is 1",
    ),
    "memory-lock": (evidence(logs.EFA_DIRECT, memlock_mib=8), "may lock less than 16 GiB"),
    "huge-pages": (evidence(logs.EFA_DIRECT, huge_pages_mib=0), "fewer free huge pages"),
    "shared-memory": (evidence(logs.EFA_DIRECT, shared_memory_mib=64), "/dev/shm of pods pod-a0"),
    "efa-protocol": (evidence(logs.THROUGH_EFA), "rather than efa-direct"),
    "fork-safe": (evidence(logs.EFA_DIRECT, environment={"RDMAV_FORK_SAFE": "1"}), "RDMAV_FORK_SAFE is 1"),
    "protocol-forced": (evidence(logs.EFA_DIRECT, environment={"NCCL_PROTO": "Simple"}), "NCCL_PROTO is Simple"),
    "provider-forced": (evidence(logs.EFA_DIRECT, environment={"FI_PROVIDER": "efa"}), "FI_PROVIDER is efa"),
    "device-rdma-forced": (
        evidence(logs.EFA_DIRECT, environment={"FI_EFA_USE_DEVICE_RDMA": "1"}),
        "FI_EFA_USE_DEVICE_RDMA is 1",
    ),
}


def test_every_row_has_a_case() -> None:
    assert list(CASES) == [row.key for row in FALLBACKS]


@pytest.mark.parametrize("row", FALLBACKS, ids=lambda row: row.key)
def test_a_fallback_is_told_in_one_sentence(row: Fallback) -> None:
    given, words = CASES[row.key]
    found = {problem.key: problem for problem in judge(given)}
    problem = found[row.key]
    assert words in problem.sentence and "\n" not in problem.sentence and "{" not in problem.sentence
    assert problem.fails == (row.fails != "never")
    # Where nothing has to be proven, the same is only told.
    anything = msgspec.structs.replace(given, wanted=msgspec.structs.replace(given.wanted, efa=False))
    assert not any(problem.fails for problem in judge(anything))


@pytest.mark.parametrize("prefix", logs.PREFIXES)
@pytest.mark.parametrize("wanted", [GDA, PLAIN], ids=["gda", "plain"])
def test_efa_is_proven(prefix: str, wanted: Wanted) -> None:
    given = evidence(logs.written(logs.EFA_DIRECT, prefix), wanted)
    assert judge(given) == []
    found = given.findings
    assert (found.providers, found.fabrics, found.nics, found.protocols) == (
        ("efa",),
        ("efa-direct",),
        (16,),
        ("RDMA",),
    )
    assert (found.networks, found.gdrdma, found.gin_types) == (("Libfabric",), (True,), (5,))
    assert found.plugin == ("1.21.1",) and found.nccl == ("2.31.2+cuda13.0",) and found.gda_context
    assert found.lines[0] == "NCCL version 2.31.2+cuda13.0"


@pytest.mark.parametrize("wanted", [GDA, PLAIN], ids=["gda", "plain"])
def test_efa_is_proven_in_a_pod_that_shows_no_counters(wanted: Wanted) -> None:
    report = conclude(wanted, parts_of(logs.EFA_DIRECT, IN_A_POD), SENT)
    assert report.proven and report.carried_by == "efa"
    assert [problem.key for problem in report.problems] == ["counters-unreadable"]
    # Not where a plain interface carried it, nor where the log of one rank is missing.
    over = conclude(wanted, parts_of(logs.EFA_DIRECT, Counters({"rdmap0s1": {}}, {"eth0": SENT})), SENT)
    assert not over.proven and over.carried_by == "tcp (eth0)"
    silent = conclude(wanted, parts_of(logs.EFA_DIRECT, IN_A_POD, other=logs.NOTHING), SENT)
    assert not silent.proven and silent.carried_by == "unknown"


@pytest.mark.parametrize(
    "log", [logs.EFA_DIRECT, logs.SOCKETS, logs.NO_PROVIDER, ""], ids=["efa", "tcp", "none", "empty"]
)
def test_a_failed_exchange_is_told_as_that_first(log: str) -> None:
    report = conclude(GDA, parts_of(log, Counters({}, {}), error="NCCL error: unhandled system error"), SENT)
    keys = [problem.key for problem in report.problems]
    assert keys[0] == "failed" and not report.proven and not COUNTED & set(keys)
    assert "pod-a0 and pod-b1 failed (NCCL error" in report.problems[0].sentence
    assert (report.seconds, report.carried_by) == (0.0, "unknown")


def test_what_the_log_proves_other_tools_do_not_deny() -> None:
    assert judge(evidence(logs.EFA_DIRECT, PLAIN, fi_info=0)) == []
    missing = logs.EFA_DIRECT.replace(
        "NET/OFI Initializing aws-ofi-nccl 1.21.1", "NET/Plugin: Could not find: libnccl-net.so"
    )
    assert judge(evidence(missing, PLAIN)) == []
    keys = [problem.key for problem in judge(evidence(logs.EFA_DIRECT, efa_driver=""))]
    assert keys == ["driver-unknown"]


def test_tables_that_a_plugin_has_not_are_no_missing_plugin() -> None:
    for log in (logs.EFA_DIRECT, logs.OLD_EFA, logs.OLDEST_EFA):
        assert "symbol" in log and not parse_log(log).plugin_missing
    assert parse_log(logs.OLDEST_EFA).plugin == ("1.5.0aws",)
    assert parse_log("NET/Plugin: Failed to load libnccl-net-ofi.so: no such file").plugin_missing


def test_an_old_log_that_names_its_sockets_is_efa() -> None:
    old = evidence(logs.written(logs.OLD_EFA, logs.PREFIXES[0]), Wanted(efa=True, interfaces=4, gpus=8))
    assert [problem.key for problem in judge(old)] == ["send-receive"]  # as p4d does, and told only
    assert not judge(old)[0].fails and old.findings.networks == ("Libfabric",)
    assert old.findings.plugin == ("1.7.4-aws",)


def test_case_and_order_of_lines_do_not_matter() -> None:
    lines = logs.written(logs.EFA_DIRECT, logs.PREFIXES[0]).splitlines()
    shouted = parse_log("\n".join(reversed(lines)).upper())
    told = parse_log("\n".join(lines))
    for name in ("providers", "fabrics", "nics", "protocols", "networks", "gdrdma", "gin_types", "gda_context"):
        assert getattr(shouted, name) == getattr(told, name), name


def test_ranks_together_find_what_one_log_holds() -> None:
    apart = merge([parse_log(logs.EFA_DIRECT), parse_log(logs.SOCKETS), parse_log("")])
    together = parse_log(logs.EFA_DIRECT + logs.SOCKETS)
    assert msgspec.structs.replace(apart, lines=()) == msgspec.structs.replace(together, lines=())


def test_proxy_is_fine_where_the_stack_says_so() -> None:
    wanted = msgspec.structs.replace(GDA, gin="proxy", deep_ep_build="upstream")
    assert judge(evidence(logs.PROXY, wanted)) == []
    assert judge(evidence(logs.NO_GIN_TYPE, wanted)) == []


def test_what_needs_gin_does_not_fail_a_run_without_it() -> None:
    for log in (logs.OLD_PLUGIN, logs.PROXY, logs.SEND_RECEIVE):
        assert not any(problem.fails for problem in judge(evidence(log, PLAIN)))


def test_the_page_holds_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transport.md").read_text()
    rows = [f"| `{row.key}` | {row.sign} | {row.fails} |" for row in FALLBACKS]
    written = re.findall(r"^\| `[a-z-]+` \| .* \| (?:efa|gin|gda|never) \|$", page, re.MULTILINE)
    assert written == rows
