"""Configuration files and command lines of every component, each bound to loopback or to the node's bridge."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import layout
from tests.cluster.binaries import PARTS
from tests.cluster.host import SEARCH_PATH, program
from tests.cluster.image import PAUSE
from tests.cluster.process import Program

_UNUSED_PLUGINS = (
    *(f"io.containerd.snapshotter.v1.{name}" for name in ("btrfs", "zfs", "devmapper", "blockfile", "erofs")),
    "io.containerd.differ.v1.erofs",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.internal.v1.tracing",
    "io.containerd.nri.v1.nri",
)


def write_configurations() -> None:
    """Write every file whose content differs: kube-proxy ends itself when its file is touched."""
    for name in ("etc", "cni", "log", "volume-plugins"):
        (layout.STATE / name).mkdir(parents=True, exist_ok=True)
    _write(layout.configuration("containerd.toml"), _containerd())
    _write(layout.STATE / "cni" / "10-pods.conflist", json.dumps(_pod_network(), indent=1))
    _write(layout.configuration("resolv.conf"), "nameserver 127.0.0.1\n")
    _write(layout.configuration("kubelet.yaml"), yaml.safe_dump(_kubelet()))
    _write(layout.configuration("kube-proxy.yaml"), yaml.safe_dump(_proxy()))
    _write(layout.configuration("Corefile"), _corefile())


def etcd() -> Program:
    """The store. It needs no fsync: what a power cut may cost is a test cluster."""
    clients = f"https://127.0.0.1:{layout.ETCD_PORT}"
    peers = f"http://127.0.0.1:{layout.ETCD_PORT + 1}"
    return Program(
        "etcd",
        (
            str(PARTS["etcd"].binary()),
            f"--name={layout.NAME}",
            f"--data-dir={layout.STATE / 'etcd'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster={layout.NAME}={peers}",
            f"--cert-file={layout.pki('etcd.crt')}",
            f"--key-file={layout.pki('etcd.key')}",
            f"--trusted-ca-file={layout.pki('etcd-ca.crt')}",
            "--client-cert-auth",
            "--enable-grpc-gateway=false",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ),
    )


def containerd() -> Program:
    """The container runtime; it finds its shim beside itself and runc on the path."""
    folder = PARTS["containerd"].folder
    path = f"{folder}:{os.environ.get('PATH', '')}:{SEARCH_PATH}"
    command = (str(folder / "containerd"), f"--config={layout.configuration('containerd.toml')}")
    return Program("containerd", command, {"PATH": path})


def api_server() -> Program:
    """The API server, on the bridge alone; pods reach it there through the service `kubernetes`."""
    pki = layout.pki
    return _kube(
        "kube-apiserver",
        f"--bind-address={layout.NODE_ADDRESS}",
        f"--advertise-address={layout.NODE_ADDRESS}",
        f"--secure-port={layout.API_PORT}",
        f"--etcd-servers=https://127.0.0.1:{layout.ETCD_PORT}",
        f"--etcd-cafile={pki('etcd-ca.crt')}",
        f"--etcd-certfile={pki('etcd-client.crt')}",
        f"--etcd-keyfile={pki('etcd-client.key')}",
        f"--service-cluster-ip-range={layout.SERVICE_SUBNET}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--client-ca-file={pki('ca.crt')}",
        f"--tls-cert-file={pki('apiserver.crt')}",
        f"--tls-private-key-file={pki('apiserver.key')}",
        f"--kubelet-client-certificate={pki('apiserver-kubelet.crt')}",
        f"--kubelet-client-key={pki('apiserver-kubelet.key')}",
        f"--kubelet-certificate-authority={pki('ca.crt')}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-issuer=https://kubernetes.default.svc.{layout.DOMAIN}",
        f"--service-account-key-file={pki('service-accounts.pub')}",
        f"--service-account-signing-key-file={pki('service-accounts.key')}",
        f"--requestheader-client-ca-file={pki('front-proxy-ca.crt')}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki('front-proxy.crt')}",
        f"--proxy-client-key-file={pki('front-proxy.key')}",
        "--endpoint-reconciler-type=lease",
        "--profiling=false",
    )


def controller_manager() -> Program:
    """The controllers of Kubernetes itself."""
    return _kube(
        "kube-controller-manager",
        f"--kubeconfig={layout.configuration('kube-controller-manager.conf')}",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={layout.pki('service-accounts.key')}",
        f"--root-ca-file={layout.pki('ca.crt')}",
        f"--cluster-signing-cert-file={layout.pki('ca.crt')}",
        f"--cluster-signing-key-file={layout.pki('ca.key')}",
        f"--flex-volume-plugin-dir={layout.STATE / 'volume-plugins'}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--profiling=false",
    )


def scheduler() -> Program:
    """The scheduler."""
    kubeconfig = layout.configuration("kube-scheduler.conf")
    return _kube(
        "kube-scheduler",
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--profiling=false",
    )


def kubelet() -> Program:
    """The node's agent."""
    return _kube(
        "kubelet",
        f"--config={layout.configuration('kubelet.yaml')}",
        f"--kubeconfig={layout.configuration('kubelet.conf')}",
        f"--hostname-override={layout.NAME}",
        f"--node-ip={layout.NODE_ADDRESS}",
        f"--root-dir={layout.STATE / 'kubelet'}",
        f"--cert-dir={layout.STATE / 'pki'}",
    )


def proxy() -> Program:
    """What makes the addresses of services work."""
    return _kube("kube-proxy", f"--config={layout.configuration('kube-proxy.yaml')}")


def coredns() -> Program:
    """DNS of the cluster's names, as a process on the node; it answers for nothing else."""
    command = (str(PARTS["coredns"].binary()), "-conf", str(layout.configuration("Corefile")))
    return Program("coredns", command)


def _kube(component: str, *flags: str) -> Program:
    return Program(component, (str(PARTS["kube"].binary()), component, *flags), {"PATH": _path()})


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{SEARCH_PATH}"


def _containerd() -> str:
    disabled = json.dumps(_UNUSED_PLUGINS)
    return f"""version = 3
root = "{layout.STATE / "containerd"}"
state = "{layout.SOCKETS / "containerd"}"
disabled_plugins = {disabled}
[grpc]
address = "{layout.CONTAINERD_SOCKET}"
[ttrpc]
address = "{layout.CONTAINERD_SOCKET}.ttrpc"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.runtime"]
# Lowering a process's OOM score needs CAP_SYS_RESOURCE, which containers and some machines of CI lack.
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{PARTS["cni"].folder}"]
conf_dir = "{layout.STATE / "cni"}"
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{program("runc")}"
SystemdCgroup = false
"""


def _pod_network() -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": str(layout.SOCKETS / "addresses"),
        "ranges": [[{"subnet": layout.POD_SUBNET}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    pairs = {"type": "ptp", "ipMasq": False, "mtu": 1500, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": layout.NAME, "plugins": [pairs]}


def _kubelet() -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": layout.NODE_ADDRESS,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki("ca.crt"))},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(layout.pki("kubelet-serving.crt")),
        "tlsPrivateKeyFile": str(layout.pki("kubelet-serving.key")),
        "containerRuntimeEndpoint": f"unix://{layout.CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "protectKernelDefaults": False,
        "clusterDNS": [layout.DNS_SERVICE],
        "clusterDomain": layout.DOMAIN,
        "resolvConf": str(layout.configuration("resolv.conf")),
        # Images come from imports alone: one that is collected as garbage could not be had again.
        "imageGCHighThresholdPercent": 100,
        "imageMinimumGCAge": "720h",
        "evictionHard": {
            "memory.available": "200Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        # Controllers make their certificates after they started, and wait until the kubelet has mounted them: a minute
        # and more at its usual pace.
        "syncFrequency": "5s",
        "maxPods": 250,
        "registryPullQPS": 0,
        "volumePluginDir": str(layout.STATE / "volume-plugins"),
        "podLogsDir": str(layout.STATE / "pod-logs"),
        "shutdownGracePeriod": "0s",
    }


def _proxy() -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": layout.POD_SUBNET,
        "hostnameOverride": layout.NAME,
        "clientConnection": {"kubeconfig": str(layout.configuration("kube-proxy.conf"))},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "nodePortAddresses": [f"{layout.NODE_ADDRESS}/32"],
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _corefile() -> str:
    return f""".:53 {{
  bind {layout.NODE_ADDRESS}
  errors
  health 127.0.0.1:{layout.DNS_HEALTH_PORT}
  kubernetes {layout.DOMAIN} in-addr.arpa {{
    kubeconfig {layout.configuration("coredns.conf")}
    pods insecure
    ttl 5
  }}
  cache 5
}}
"""


def _write(path: Path, content: str) -> None:
    if not path.exists() or path.read_text() != content:
        path.write_text(content)
