"""What SGLang engines need, looked at before any is started."""

from __future__ import annotations

import subprocess

import httpx

from components.rollout.sglang_flags import check
from components.rollout.sglang_server import find_python
from configs.failure import BadConfig, ServiceGone
from configs.hardware import HardwareProfile
from configs.run import RunConfig
from configs.stack import Stack

ASK_S = 60.0
"""Seconds an interpreter may take to start, or a server to answer."""
VERSION = "from importlib.metadata import version; print(version('sglang'))"


def check_engines(config: RunConfig, stack: Stack, hardware: HardwareProfile) -> str:
    """Check that the engines the configuration asks for can be had.

    Returns:
        The version of SGLang that generates; empty where it is not known yet, or another engine does.

    Raises:
        BadConfig: the options do not go together, or there is no SGLang.
        ServiceGone: a server to join does not answer.
    """
    if config.rollout.engine != "sglang":
        return ""
    check(config.sglang, config.weights, hardware, stack)
    if config.loop.roles == "kubernetes" or config.sglang.service:
        return stack.sglang
    if config.sglang.urls:
        _check_joined(config.sglang.urls)
        return stack.sglang
    python = find_python(config.sglang)
    try:
        asked = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadConfig(f"{python}: does not run ({error}); name SGLang's interpreter in sglang.python") from None
    if asked.returncode:
        raise BadConfig(
            f"{python}: holds no SGLang; run `make sglang-env`, or name the interpreter of an environment that does in"
            " sglang.python"
        )
    version = asked.stdout.strip()
    if stack.sglang and version != stack.sglang:
        raise BadConfig(f"{python}: holds sglang {version}, but stack {stack.name} was tested with {stack.sglang}")
    return version


def _check_joined(urls: tuple[str, ...]) -> None:
    for url in urls:
        try:
            # The key is for what changes a server; this only looks.
            answer = httpx.get(f"{url}/health", timeout=ASK_S)
        except httpx.HTTPError as error:
            raise ServiceGone(f"sglang.urls: {url} does not answer ({error}); start it or take it out") from None
        if answer.status_code >= 500:
            raise ServiceGone(f"sglang.urls: {url} says it is not ready ({answer.status_code}); wait or take it out")
