"""Addresses in a configuration: checked, and without secrets."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _address(value: str) -> str:
    """Refuse a secret in an address: the configuration is shown, logged and published."""
    if "@" in value.partition("://")[2].partition("/")[0]:
        raise ValueError(
            "holds a user or a password, but the configuration is logged; give secrets by environment variables"
            " (REDIS_PASSWORD, MLFLOW_TRACKING_USERNAME and _PASSWORD, REWARD_TOKEN)"
        )
    return value


def _web_address(value: str) -> str:
    """An http address, or empty."""
    if value and not value.startswith(("http://", "https://")):
        raise ValueError(f"{value} is no http address; write it as http://host:port")
    return _address(value)


Address = Annotated[str, AfterValidator(_address)]
WebAddress = Annotated[str, AfterValidator(_web_address)]
