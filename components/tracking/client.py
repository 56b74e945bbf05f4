"""MLflow's client, with bounded retries and a sentence when the tracking server is gone.

MLflow costs three seconds to import, so it is imported where it is first used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from configs.failure import BadConfig, ServiceGone

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from configs.run import RunConfig

_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Five tries over some 15 s when the server refuses; MLflow's own default is eight over four minutes."""
_LOOPBACK = ("127.0.0.1", "localhost")


def tracking_uri(config: RunConfig) -> str:
    """Address of the tracking server: the configuration's, else `MLFLOW_TRACKING_URI`.

    Raises:
        BadConfig: neither names one.
    """
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise BadConfig(
            "no tracking server: tracking.uri is empty and MLFLOW_TRACKING_URI is not set;"
            " set one, or start the run with `tandem run`, which starts a server"
        )
    return uri


def open_client(uri: str) -> MlflowClient:
    """A client of the tracking server and model registry at `uri`; nothing is sent yet."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if urlsplit(uri).hostname in _LOOPBACK:
        bypassed = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
        if _LOOPBACK[0] not in bypassed.split(","):
            os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [bypassed, *_LOOPBACK]))
    # MLflow's artifact proxy reads the address from the environment, whatever the client was given.
    os.environ["MLFLOW_TRACKING_URI"] = uri
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextlib.contextmanager
def answering(uri: str) -> Iterator[None]:
    """Tell failures of the tracking server in one sentence; other errors pass through.

    Raises:
        ServiceGone: it cannot be reached, or failed on its side.
        BadConfig: it refused this client.
    """
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    try:
        yield
    except MlflowException as error:
        status = error.get_http_status_code()
        if status >= 500:
            raise ServiceGone(_gone(uri, error)) from error
        if status in (401, 403):
            raise BadConfig(
                f"the tracking server at {uri} refused this client ({error.error_code});"
                " set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            ) from None
        raise
    except RequestException as error:
        raise ServiceGone(_gone(uri, error)) from error


def _gone(uri: str, error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"the tracking server at {uri} does not answer; check that it runs ({words[:200]})"
