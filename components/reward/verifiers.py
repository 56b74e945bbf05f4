"""Verifiers: functions that score the completions of one prompt against its reference.

A verifier is `verify(completions, answer) -> rewards`, one float a completion. Built-in ones are named in the run file;
`reward.verifier: package.module:function` names any other.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

import httpx

from configs.failure import BadConfig
from configs.run import RewardConfig


class Completion(NamedTuple):
    """What a verifier sees of one completion."""

    text: str
    """Decoded tokens, special tokens left out."""
    finish: str
    """`stop` if the policy ended it, `length` if it was cut."""


Verifier = Callable[[list[Completion], str], list[float]]

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def exact_match(completions: list[Completion], answer: str) -> list[float]:
    """1 if the completion is the answer and the policy ended it itself, else 0."""
    return [float(c.finish == "stop" and c.text == answer) for c in completions]


def contains(completions: list[Completion], answer: str) -> list[float]:
    """1 if the answer stands anywhere in the completion, else 0."""
    return [float(answer in c.text) for c in completions]


def numeric(completions: list[Completion], answer: str) -> list[float]:
    """1 if the last number in the completion equals the answer as a number (thousands separators ignored), else 0."""

    def value(text: str) -> Decimal | None:
        found = NUMBER.findall(text.replace(",", ""))
        try:
            return Decimal(found[-1]) if found else None
        except InvalidOperation:
            return None

    expected = value(answer)
    return [float(expected is not None and value(c.text) == expected) for c in completions]


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match, "contains": contains, "numeric": numeric}


def http_verifier(url: str, timeout_s: float) -> Verifier:
    """A verifier behind HTTP: POST {"completions": [{"text", "finish"}], "answer"} answers {"rewards": [float]}."""
    token = os.environ.get("REWARD_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    client = httpx.Client(timeout=timeout_s, transport=httpx.HTTPTransport(retries=2), headers=headers)

    def verify(completions: list[Completion], answer: str) -> list[float]:
        body = {"completions": [c._asdict() for c in completions], "answer": answer}
        response = client.post(url, json=body).raise_for_status()
        return [float(reward) for reward in response.json()["rewards"]]

    return verify


def load_verifier(config: RewardConfig) -> Verifier:
    """The verifier that the configuration names.

    Raises:
        BadConfig: the name is neither built in nor importable.
    """
    name = config.verifier
    if name in VERIFIERS:
        return VERIFIERS[name]
    if name == "http":
        return http_verifier(config.url, config.timeout_s)
    module_name, separator, attribute = name.partition(":")
    if not separator:
        raise BadConfig(
            f"reward.verifier '{name}' is unknown; choose {', '.join(VERIFIERS)}, http, or package.module:function"
        )
    try:
        verifier = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise BadConfig(
            f"reward.verifier '{name}' cannot be imported ({error}); check the name and PYTHONPATH"
        ) from None
    if not callable(verifier):
        raise BadConfig(f"reward.verifier '{name}' is not a function; name one that takes completions and the answer")
    return verifier
