"""What S3 and boto3 refuse, as the sentence for the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from s3transfer.exceptions import RetriesExceededError

from configs.failure import BadConfig, BadData, Failure, ServiceGone

try:
    from awscrt.exceptions import AwsCrtError

    _CRT_ERRORS: tuple[type[Exception], ...] = (AwsCrtError,)
except ImportError:  # awscrt has no wheel for this platform; boto3 then uses its own transfers
    _CRT_ERRORS = ()

NOT_FOUND = frozenset({"NoSuchKey", "404", "NotFound"})
_FORBIDDEN = frozenset(
    {"403", "AccessDenied", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
)
_NO_BUCKET = frozenset({"NoSuchBucket", "InvalidBucketName"})
_FULL = frozenset({"QuotaExceeded", "InsufficientStorage", "507", "XMinioStorageFull"})


@contextlib.contextmanager
def explained_s3(uri: str) -> Iterator[None]:
    """Turn what S3 refuses inside into the sentence for the user.

    Args:
        uri: Place to name.

    Raises:
        BadData: no such object.
        BadConfig: no such bucket, no credentials, or credentials without the right.
        ServiceGone: the server does not answer or cannot serve, after all retries.
    """
    try:
        yield
    except ClientError as error:
        raise _refused(error, uri) from None
    except (
        NoCredentialsError,
        PartialCredentialsError,
        CredentialRetrievalError,
        SSOError,
        TokenRetrievalError,
    ) as error:
        raise BadConfig(
            f"{uri}: no usable AWS credentials ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile,"
            " or give this machine a role"
        ) from None
    except (BotoConnectionError, HTTPClientError, RetriesExceededError, *_CRT_ERRORS) as error:
        raise ServiceGone(
            f"{uri}: the object store does not answer ({error}); check storage.endpoint_url and the network, then resume"
        ) from None
    except BotoCoreError as error:
        raise BadConfig(f"{uri}: boto3 refuses these settings ({error}); check the URI and the AWS settings") from None


def _refused(error: ClientError, uri: str) -> Failure:
    code = str(error.response["Error"].get("Code", ""))
    message = error.response["Error"].get("Message") or code
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _NO_BUCKET:
        return BadConfig(f"{uri}: no such bucket ({message}); create it or mend the bucket's name")
    if code in NOT_FOUND:
        return BadData(f"{uri}: no such object; check the URI")
    if code in _FORBIDDEN:
        return BadConfig(
            f"{uri}: access is refused ({code}: {message}); use credentials that may list, read and write there"
        )
    if code in _FULL or status == 507:
        return BadConfig(
            f"{uri}: the object store is full ({message}); nothing written earlier was lost, so free space and resume"
        )
    if status >= 500 or code in ("SlowDown", "RequestTimeout", "Throttling"):
        return ServiceGone(f"{uri}: the object store fails ({code}: {message}); try again when it has recovered")
    return BadConfig(f"{uri}: {error.operation_name} is refused ({code}: {message}); check the storage settings")
