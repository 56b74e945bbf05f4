"""The table of silent fallbacks: by what each is known, what the user is told, and whether it fails the run.

Signs and reasons come from the logs and documents of NCCL, aws-ofi-nccl and DeepEP; docs/transport.md holds the same
table for reading, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from components.preflight.evidence import (
    Evidence,
    Problem,
    asked,
    carriers,
    differences,
    gin_types,
    listed,
    on,
    too_few,
    unreadable,
    variable,
    when,
)
from components.preflight.nccl_log import GDA
from configs.stack import below

MEMLOCK_MIB = 16 * 1024
"""Below this a process with EFA queues and NCCL's buffers runs out of memory it may lock."""
SHARED_MEMORY_MIB = 1024
HUGE_PAGES_MIB = 256


class Fallback(NamedTuple):
    """One row."""

    key: str
    sign: str
    """By what it is known."""
    sentence: str
    """What, where and the mend; braces take what `detail` returns."""
    fails: Literal["efa", "gin", "gda", "never"]
    """What must have been wanted for it to fail the run: EFA, any GIN, the GPU-initiated one; or it is only told."""
    detail: Callable[[Evidence], str | None]
    """What to put into the sentence, or None where the sign is absent."""


FALLBACKS: tuple[Fallback, ...] = (
    Fallback(
        "one-node",
        "both pods name the same node",
        "both pods of the exchange ran on node {}, so nothing crossed the network; give each pod a whole node's GPUs, or add a"
        " node",
        "efa",
        lambda e: when(
            len(e.nodes) > 1 and len({node.node for node in e.nodes}) == 1, e.nodes[0].node if e.nodes else ""
        ),
    ),
    Fallback(
        "plugin-missing",
        "`NET/Plugin: Could not find` (or no plugin is named at all), and no `Initializing aws-ofi-nccl`",
        "NCCL did not find the aws-ofi-nccl plugin{}, so it uses plain sockets; install it into the train image by the EFA"
        " installer and set NCCL_NET_PLUGIN to its libnccl-net-ofi.so",
        "efa",
        lambda e: when(
            not e.findings.plugin and not e.over_efa and (e.findings.plugin_missing or bool(e.findings.networks)),
            " (its log says so)" if e.findings.plugin_missing else "",
        ),
    ),
    Fallback(
        "no-provider",
        "`NET/OFI No eligible providers were found`, or `fi_info -p efa` lists nothing and the log does not show EFA",
        "libfabric finds no EFA in {}; request vpc.amazonaws.com/efa (kubernetes.train.efa_interfaces) and see that the EFA"
        " device plugin runs on the node",
        "efa",
        lambda e: (
            on(e, lambda host: host.fi_info == 0 and not e.over_efa)
            or when(e.findings.no_provider, "a pod, as its NCCL log says")
        ),
    ),
    Fallback(
        "no-device",
        "no /dev/infiniband/uverbs*",
        "pods {} have no /dev/infiniband/uverbs*, so no EFA can be opened; request vpc.amazonaws.com/efa"
        " (kubernetes.train.efa_interfaces)",
        "efa",
        lambda e: on(e, lambda host: asked(e) and not host.uverbs),
    ),
    Fallback(
        "sockets",
        "`Using network Socket`, or `via NET/Socket`",
        "NCCL went over plain TCP sockets instead of EFA ({}); see the other findings for the cause, and the NCCL log in the"
        " report",
        "efa",
        lambda e: when("Socket" in e.findings.networks, "the log says 'Using network Socket' or 'via NET/Socket'"),
    ),
    Fallback(
        "other-network",
        "`Using network` names neither Libfabric nor Socket",
        "NCCL uses network {} instead of Libfabric; unset NCCL_NET and set NCCL_NET_PLUGIN to libnccl-net-ofi.so in the train"
        " image",
        "efa",
        lambda e: when(
            bool(other := [name for name in e.findings.networks if name not in ("Libfabric", "Socket")]),
            ", ".join(other),
        ),
    ),
    Fallback(
        "network-unknown",
        "neither `Using network` nor `via NET/` in the log",
        "NCCL's log names no network{}, so the exchange proves nothing; use a train image with NCCL and GPUs, and do not set"
        " NCCL_DEBUG_FILE or NCCL_DEBUG_SUBSYS in configmap tandem",
        "efa",
        lambda e: when(
            asked(e) and not e.findings.networks, "" if e.wanted.gpus else " (there are no GPUs: gloo carried it)"
        ),
    ),
    Fallback(
        "rank-silent",
        "a rank's own log names no network, or Libfabric without its provider",
        "ranks {} of the exchange wrote nothing that tells what they use, so the log of the others does not speak for them; see"
        " that no NCCL_CONF_FILE or /etc/nccl.conf in the train image turns its log off",
        "efa",
        lambda e: when(asked(e) and bool(e.findings.networks) and bool(e.unheard), listed(e.unheard)),
    ),
    Fallback(
        "other-provider",
        "`Selected provider is` something else than efa",
        "aws-ofi-nccl took libfabric's provider {} instead of efa; unset FI_PROVIDER in configmap tandem and the image",
        "efa",
        lambda e: when(bool(other := [name for name in e.findings.providers if name != "efa"]), ", ".join(other)),
    ),
    Fallback(
        "ranks-differ",
        "ranks name different networks, providers, protocols or numbers of interfaces",
        "ranks of the exchange differ in what they use ({}); see that all training nodes have the same type, image and driver",
        "efa",
        differences,
    ),
    Fallback(
        "few-interfaces",
        "`found N nics` with N under what the pod asked for",
        "aws-ofi-nccl found {} EFA interfaces a pod was given; request the GPUs' own number in"
        " kubernetes.train.efa_interfaces, and see that the node was started with all of them",
        "efa",
        lambda e: when(
            bool(e.findings.nics) and e.over_efa and min(e.findings.nics) < e.wanted.interfaces,
            f"{min(e.findings.nics, default=0)} of the {e.wanted.interfaces}",
        ),
    ),
    Fallback(
        "send-receive",
        "`Using transport protocol SENDRECV`",
        "aws-ofi-nccl uses its SENDRECV protocol, not RDMA{}; unset OFI_NCCL_PROTOCOL and FI_EFA_USE_DEVICE_RDMA, and use nodes"
        " with RDMA (p5 and later)",
        "gin",
        lambda e: when("SENDRECV" in e.findings.protocols),
    ),
    Fallback(
        "no-gpu-direct",
        "`via NET/Libfabric` without `GDRDMA`",
        "EFA does not reach GPU memory directly{}, so every byte is copied through the host; use nodes with dmabuf or"
        " nvidia_peermem, and unset NCCL_NET_GDR_LEVEL",
        "efa",
        lambda e: when(
            False in e.findings.gdrdma and e.over_efa,
            "" if all(node.host.direct for node in e.nodes) else " (a node has neither dmabuf nor nvidia_peermem)",
        ),
    ),
    Fallback(
        "no-channel",
        "no `via NET/` in a rank's own log",
        "ranks {} of the exchange name no channel between nodes, so whether EFA reaches their GPU's memory is not known; see"
        " the report for the lines of the others",
        "never",
        lambda e: when(asked(e) and e.over_efa and bool(e.without_channel), listed(e.without_channel)),
    ),
    Fallback(
        "no-traffic",
        "the EFA devices' byte counters grew by less than was sent",
        "only {}; the rest went elsewhere, whatever NCCL's log says",
        "efa",
        too_few,
    ),
    Fallback(
        "counters-unreadable",
        "the EFA devices show no byte counters, neither in sysfs nor over netlink, as in most pods",
        "the EFA devices of pods {} tell no bytes, so EFA is shown by NCCL's log and by no plain interface having carried the"
        " bytes; install iproute2 (rdma) into the train image, which may be able to ask for them",
        "never",
        unreadable,
    ),
    Fallback(
        "over-ethernet",
        "a plain interface's tx_bytes grew by what was sent",
        "the bytes of pods {} went over a plain network interface instead of EFA; see the other findings for the cause",
        "efa",
        carriers,
    ),
    Fallback(
        "gin-unset",
        "NCCL_GIN_TYPE is set neither by the image nor by `kernels.deep_ep.gin`",
        "NCCL_GIN_TYPE is unset{}, which on EFA silently means the CPU proxy, but the stack promises the GPU; set"
        " kernels.deep_ep.gin to efa-gda, or to proxy",
        "gda",
        lambda e: when(e.wanted.gin == "efa-gda" and not gin_types(e)),
    ),
    Fallback(
        "gin-proxy",
        "`NCCL_GIN_TYPE set by environment to 2`, or type 5 skipped",
        "NCCL starts DeepEP's transfers from {}, but the GPU over EFA (type 5) is what the stack or kernels.deep_ep.gin"
        " promises; unset NCCL_GIN_TYPE and set kernels.deep_ep.gin to efa-gda, or to proxy",
        "gda",
        lambda e: when(
            e.wanted.gin == "efa-gda" and (bool(gin_types(e) - {GDA}) or GDA in e.findings.gin_skipped),
            "the CPU proxy" if gin_types(e) <= {2, GDA} else f"GIN type {min(gin_types(e) - {GDA})}",
        ),
    ),
    Fallback(
        "gin-absent",
        "`NCCL GIN is unavailable`",
        "DeepEP says that NCCL has no GIN{}; take NCCL 2.31.2-1 or later and aws-ofi-nccl 1.21 or later, as stack deepep-efa"
        " does",
        "gin",
        lambda e: when(e.findings.gin_unavailable),
    ),
    Fallback(
        "plugin-old",
        "`Initializing aws-ofi-nccl` below 1.21",
        "aws-ofi-nccl {} has no GIN, which DeepEP crosses nodes with; take 1.21 or later (EFA installer 1.50)",
        "gin",
        lambda e: (
            next((v for v in e.findings.plugin if v[:1].isdigit() and below(v, "1.21")), None)
            if e.wanted.gin != "none"
            else None
        ),
    ),
    Fallback(
        "plugin-without-gda",
        "the plugin's library lacks ncclGinPlugin_v14",
        "the plugin library of pods {} lacks ncclGinPlugin_v14, so the GPU cannot start EFA transfers; take EFA installer 1.50"
        " or later",
        "gda",
        lambda e: on(e, lambda host: e.wanted.gin == "efa-gda" and host.plugin_gda is False),
    ),
    Fallback(
        "driver-old",
        "/sys/module/efa/version below 3.3.0",
        "the EFA driver on the nodes of pods {} is older than 3.3.0, which GPU-initiated EFA needs; take a newer node image, or"
        " gin: proxy in the stack",
        "gda",
        lambda e: on(
            e, lambda host: e.wanted.gin == "efa-gda" and bool(host.efa_driver) and below(host.efa_driver, "3.3.0")
        ),
    ),
    Fallback(
        "driver-unknown",
        "no /sys/module/efa/version",
        "pods {} do not see the version of their nodes' EFA driver, and GPU-initiated EFA needs 3.3.0; look at"
        " /sys/module/efa/version on the node",
        "never",
        lambda e: on(e, lambda host: e.wanted.gin == "efa-gda" and not host.efa_driver),
    ),
    Fallback(
        "gdrcopy-missing",
        "no /dev/gdrdrv",
        "pods {} have no /dev/gdrdrv, which GPU-initiated EFA needs; set kubernetes.gdrcopy and load gdrdrv on the nodes",
        "gda",
        lambda e: on(e, lambda host: e.wanted.gin == "efa-gda" and not host.gdrdrv),
    ),
    Fallback(
        "ordered-kernels",
        "GIN type 5 with a DeepEP that is not Amazon's fork, or with EP_HYBRID_KERNEL=ordered",
        "DeepEP's {} kernels take for granted that data arrives in order, which GPU-initiated EFA does not promise, so results"
        " may be silently wrong; use deep_ep_build amazon with EP_HYBRID_KERNEL=unordered, or NCCL_GIN_TYPE=2",
        "gin",
        lambda e: when(
            e.wanted.gin != "none"
            and GDA in gin_types(e)
            and (e.wanted.deep_ep_build != "amazon" or variable(e, "EP_HYBRID_KERNEL", ("unordered",)) is not None),
            "ordered" if e.wanted.deep_ep_build == "amazon" else e.wanted.deep_ep_build,
        ),
    ),
    Fallback(
        "two-nccl",
        "two files libnccl.so in /proc/self/maps",
        "two copies of NCCL are mapped in pods {}, which DeepEP refuses to run with; uninstall the one that torch brought",
        "gin",
        lambda e: on(e, lambda host: len(host.nccl_libraries) > 1),
    ),
    Fallback(
        "unproven",
        "no `Using network Libfabric` (or `via NET/Libfabric`) together with `Selected provider is efa`",
        "NCCL's log does not show EFA: it names network {}; see the report for the lines it wrote",
        "efa",
        lambda e: when(
            asked(e) and not e.over_efa,
            f"{' and '.join(e.findings.networks) or '(none)'} and provider {' and '.join(e.findings.providers) or '(none)'}",
        ),
    ),
    Fallback(
        "communicator-reused",
        "EP_REUSE_NCCL_COMM is not 0",
        "EP_REUSE_NCCL_COMM is {}, with which DeepEP reads a communicator that may not exist yet; leave it to Tandem, which"
        " uses the communicator first",
        "never",
        lambda e: variable(e, "EP_REUSE_NCCL_COMM", ("0",)),
    ),
    Fallback(
        "memory-lock",
        "the limit of locked memory is low",
        "pods {} may lock less than 16 GiB of memory, and EFA's queues are locked; raise memlock in the node's container"
        " runtime",
        "never",
        lambda e: on(
            e, lambda host: bool(host.uverbs) and host.memlock_mib is not None and host.memlock_mib < MEMLOCK_MIB
        ),
    ),
    Fallback(
        "huge-pages",
        "HugePages_Free is low",
        "pods {} see fewer free huge pages than libfabric maps, so it takes small ones; set kubernetes.train.hugepages_mib to"
        " 5120 and let the node set them aside",
        "never",
        lambda e: on(e, lambda host: bool(host.uverbs) and host.huge_pages_mib < HUGE_PAGES_MIB),
    ),
    Fallback(
        "shared-memory",
        "/dev/shm is small",
        "/dev/shm of pods {} has under 1 GiB, and NCCL's ranks of a node meet there; set shared_memory_gib in the hardware"
        " profile",
        "never",
        lambda e: on(
            e,
            lambda host: (
                e.wanted.gpus > 1 and host.shared_memory_mib is not None and host.shared_memory_mib < SHARED_MEMORY_MIB
            ),
        ),
    ),
    Fallback(
        "efa-protocol",
        "`fabric is efa` rather than efa-direct",
        "libfabric's fabric is {} rather than efa-direct, so its own protocol adds work to every message; take a newer EFA"
        " installer",
        "never",
        lambda e: when(e.over_efa and "efa" in e.findings.fabrics, "efa"),
    ),
    Fallback(
        "fork-safe",
        "RDMAV_FORK_SAFE is set",
        "RDMAV_FORK_SAFE is {}, which spoils registration of memory with current kernels; unset it in configmap tandem and the"
        " image",
        "never",
        lambda e: variable(e, "RDMAV_FORK_SAFE"),
    ),
    Fallback(
        "protocol-forced",
        "NCCL_PROTO is set",
        "NCCL_PROTO is {}, which takes NCCL's own choice away; unset it in configmap tandem and the image",
        "never",
        lambda e: variable(e, "NCCL_PROTO"),
    ),
    Fallback(
        "provider-forced",
        "FI_PROVIDER is set",
        "FI_PROVIDER is {}, which current plugins need not be told and which hides a missing EFA; unset it in configmap tandem"
        " and the image",
        "never",
        lambda e: variable(e, "FI_PROVIDER"),
    ),
    Fallback(
        "device-rdma-forced",
        "FI_EFA_USE_DEVICE_RDMA is set",
        "FI_EFA_USE_DEVICE_RDMA is {}, which current plugins need not be told; unset it in configmap tandem and the image",
        "never",
        lambda e: variable(e, "FI_EFA_USE_DEVICE_RDMA"),
    ),
)


COUNTED = frozenset({"no-traffic", "counters-unreadable", "over-ethernet"})
"""Rows that compare bytes, which say nothing of an exchange that failed."""


def judge(evidence: Evidence, counted: bool = True) -> list[Problem]:
    """The rows that hold, those that fail the run first; unless `counted`, without those that compare bytes."""
    wanted = evidence.wanted
    fatal = {"efa": wanted.efa, "gin": wanted.gin != "none", "gda": wanted.gin == "efa-gda", "never": False}
    found = [
        Problem(row.key, row.sentence.format(detail), wanted.efa and fatal[row.fails])
        for row in FALLBACKS
        if (counted or row.key not in COUNTED) and (detail := row.detail(evidence)) is not None
    ]
    return sorted(found, key=lambda problem: not problem.fails)
