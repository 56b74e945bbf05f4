"""The engine contract on a real SGLang server."""

from tests.rollout.contract import *  # noqa: F403
