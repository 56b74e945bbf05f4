"""Names, addresses and folders of the test cluster, in one place so that nothing else on the machine is touched."""

from __future__ import annotations

from pathlib import Path

import platformdirs

NAME = "tandem-test"
"""Name of the node, of the kubeconfig's context and of the bucket."""

CACHE = platformdirs.user_cache_path(NAME) / "cluster"
STATE = CACHE / "state"
SOCKETS = Path("/run/tandem-cluster")
KUBECONFIG = CACHE / "kubeconfig"
CONTAINERD_SOCKET = SOCKETS / "containerd.sock"

# The node's address lives on a bridge of its own, so that no other interface carries it.
BRIDGE = "tandem-test0"
NODE_ADDRESS = "10.211.0.1"
POD_SUBNET = "10.212.0.0/16"
SERVICE_SUBNET = "10.213.0.0/16"
API_SERVICE = "10.213.0.1"
DNS_SERVICE = "10.213.0.10"
S3_SERVICE = "10.213.0.20"
API_PORT = 6443
ETCD_PORT = 23790
DNS_HEALTH_PORT = 8088
DOMAIN = "cluster.local"
API_SERVER = f"https://{NODE_ADDRESS}:{API_PORT}"

INFRASTRUCTURE = "tandem-infra"
"""Namespace of what the tests need beside Kubernetes: the S3 server."""


def pki(name: str) -> Path:
    """Path of a certificate or key of the cluster."""
    return STATE / "pki" / name


def configuration(name: str) -> Path:
    """Path of a component's configuration."""
    return STATE / "etc" / name


def log(name: str) -> Path:
    """Path of a component's log."""
    return STATE / "log" / f"{name}.log"
