"""Logs in the shape in which NCCL and aws-ofi-nccl write them, put together from the lines that decide."""

from __future__ import annotations

PREFIXES = (
    "p5en-{rank}:1234:1301 [0] NCCL INFO ",
    "[2026-11-03 10:22:0{rank}] ip-10-0-0-{rank}.ec2.internal:77:91 [3] NCCL INFO ",
    "[rank{rank}]: 10-0-0-{rank}:8:8 [{rank}] nccl info ",
    "",
)
"""What stands before NCCL's words: old and new releases, launchers that add a rank, and none at all."""

EFA_DIRECT = """\
NCCL version 2.31.2+cuda13.0
NET/Plugin: Loaded net plugin Libfabric (v11)
NET/OFI Initializing aws-ofi-nccl 1.21.1
NET/OFI Using Libfabric version 2.6
NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)
NET/OFI Using transport protocol RDMA (platform set)
NCCL_GIN_TYPE set by environment to 5.
NET/OFI gin GDAKI: createContext done (nContexts 4)
NET/Plugin: Failed to find ncclCollNetPlugin_v11 symbol.
Using network Libfabric
Channel 00/0 : 0[0] -> 1[0] [receive] via NET/Libfabric/0/GDRDMA/flush=None
Channel 00/0 : 1[0] -> 0[0] [send] via NET/Libfabric/0/GDRDMA
"""
OLD_EFA = """\
NET/Socket : Using [0]eth0:10.0.0.1<0>
NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.
NET/OFI Initializing aws-ofi-nccl 1.7.4-aws
NET/OFI Selected Provider is efa (found 4 nics)
NET/OFI Using transport protocol SENDRECV
Using network AWS Libfabric
Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/1/GDRDMA
"""
"""An old NCCL names its sockets although it goes on to use EFA."""
SOCKETS = """\
NET/Plugin: Could not find: libnccl-net-ofi.so libnccl-net.so.
NET/Socket : Using [0]eth0:10.0.0.1<0>
Using network Socket
Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
NO_PROVIDER = """\
NET/OFI Initializing aws-ofi-nccl 1.21.1
NET/OFI No eligible providers were found
NET/Plugin: Failed to initialize plugin
Using network Socket
"""
INFINIBAND = """\
NET/IB : Using [0]mlx5_0:1/IB
Using network IB
Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0(1)/GDRDMA
"""
TCP_PROVIDER = EFA_DIRECT.replace("provider is efa, fabric is efa-direct", "provider is tcp, fabric is tcp")
PROXY = EFA_DIRECT.replace(
    "NCCL_GIN_TYPE set by environment to 5.",
    "NCCL_GIN_TYPE set by environment to 2.\nGIN/Plugin: Skipping plugin Libfabric_GDAKI index 0 type 5",
).replace("NET/OFI gin GDAKI: createContext done (nContexts 4)\n", "")
NO_GIN_TYPE = EFA_DIRECT.replace("NCCL_GIN_TYPE set by environment to 5.\n", "")
OLD_PLUGIN = EFA_DIRECT.replace("aws-ofi-nccl 1.21.1", "aws-ofi-nccl 1.19.2")
NO_GIN = EFA_DIRECT + "Assertion failed: NCCL GIN is unavailable\n"
NO_GPU_DIRECT = EFA_DIRECT.replace("/GDRDMA", "")
FEW = EFA_DIRECT.replace("found 16 nics", "found 2 nics")
SEND_RECEIVE = EFA_DIRECT.replace("protocol RDMA", "protocol SENDRECV")
THROUGH_EFA = EFA_DIRECT.replace("efa-direct", "efa")
OLDEST_EFA = OLD_EFA.replace("Initializing aws-ofi-nccl 1.7.4-aws", "Using aws-ofi-nccl 1.5.0aws")
MIXED = EFA_DIRECT + SOCKETS
NOTHING = "NCCL version 2.31.2+cuda13.0\nChannel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"


def written(text: str, prefix: str, ranks: int = 2) -> str:
    """The lines as several ranks write them in turn into one place."""
    return "\n".join(prefix.format(rank=rank) + line for line in text.splitlines() for rank in range(ranks))
