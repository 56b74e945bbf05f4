"""Kubeconfigs with nothing but the token of a ServiceAccount."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

TOKEN_S = 3600


def kubeconfig_of(cluster: Any, account: str, namespace: str, folder: Path) -> Path:
    """Write a kubeconfig by which one is that account; returns the file."""
    asked = {"spec": {"expirationSeconds": TOKEN_S}}
    token = cluster.api.core.create_namespaced_service_account_token(account, namespace, asked).status.token
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    for user in content["users"]:
        user["user"] = {"token": token}
    file = folder / f"{account}.yaml"
    file.touch(mode=0o600)
    file.write_text(yaml.safe_dump(content))
    return file
