"""Certificates, keys and kubeconfigs of the cluster."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import ipaddress
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.cluster import layout

VALID_DAYS = 3650
MASTERS = "system:masters"
NODES = "system:nodes"
NODE_USER = f"system:node:{layout.NAME}"
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Authority:
    """A key that signs, with its own certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def write() -> None:
    """Make everything once per wiped state: two authorities, the servers' and clients' certificates, kubeconfigs."""
    if layout.pki("complete").exists():
        if not layout.KUBECONFIG.exists():
            _write_kubeconfig("admin", layout.KUBECONFIG)
        return
    layout.pki("").mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = _authority("ca")
    front = _authority("front-proxy-ca")
    names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names += [f"kubernetes.default.svc.{layout.DOMAIN}", LOOPBACK, layout.NODE_ADDRESS, layout.API_SERVICE]
    _issue(authority, "apiserver", "kube-apiserver", names=names)
    _issue(authority, "kubelet-serving", NODE_USER, NODES, names=[layout.NAME, layout.NODE_ADDRESS, LOOPBACK])
    _issue(authority, "apiserver-kubelet", "apiserver-kubelet", MASTERS)
    _issue(front, "front-proxy", "front-proxy-client")
    _issue(authority, "kubelet", NODE_USER, NODES)
    store = _authority("etcd-ca")
    _issue(store, "etcd", "etcd", names=[LOOPBACK])
    _issue(store, "etcd-client", "kube-apiserver")
    _issue(authority, "admin", "admin", MASTERS)
    for component in ("kube-controller-manager", "kube-scheduler", "kube-proxy", "coredns"):
        _issue(authority, component, f"system:{component}")
    accounts = ec.generate_private_key(ec.SECP256R1())
    _write_key("service-accounts", accounts)
    public = accounts.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    layout.pki("service-accounts.pub").write_bytes(public)
    for user in ("kubelet", "kube-controller-manager", "kube-scheduler", "kube-proxy", "coredns"):
        _write_kubeconfig(user, layout.configuration(f"{user}.conf"))
    _write_kubeconfig("admin", layout.KUBECONFIG)
    layout.pki("complete").touch()


def _authority(name: str) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(name, "")
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(subject, subject, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_pair(name, key, certificate)
    return Authority(key, certificate)


def _issue(authority: Authority, file: str, user: str, group: str = "", names: list[str] | None = None) -> None:
    """A certificate for a server with `names` (host names and addresses), or for a client without."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = _builder(_subject(user, group), authority.certificate.subject, key).add_extension(
        x509.ExtendedKeyUsage([usage]), critical=False
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_name(each) for each in names]), critical=False)
    _write_pair(file, key, builder.sign(authority.key, hashes.SHA256()))


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _subject(user: str, group: str) -> x509.Name:
    group_part = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*group_part, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _write_pair(name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    _write_key(name, key)
    layout.pki(f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_key(name: str, key: ec.EllipticCurvePrivateKey) -> None:
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_private(layout.pki(f"{name}.key"), text)


def _write_kubeconfig(user: str, path: Path) -> None:
    def encoded(name: str) -> str:
        return base64.b64encode(layout.pki(name).read_bytes()).decode()

    cluster = {"server": layout.API_SERVER, "certificate-authority-data": encoded("ca.crt")}
    credentials = {
        "client-certificate-data": encoded(f"{user}.crt"),
        "client-key-data": encoded(f"{user}.key"),
    }
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": layout.NAME, "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": layout.NAME, "context": {"cluster": layout.NAME, "user": user}}],
        "current-context": layout.NAME,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_private(path, yaml.safe_dump(content).encode())


def _write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(content)
