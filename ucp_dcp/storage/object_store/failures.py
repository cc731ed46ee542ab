"""What an exception of botocore means: see :data:`~.client.Kind`."""

from __future__ import annotations

from typing import Any

from .client import Failed, Kind

__all__ = ["failed_of"]

# Codes of answers below 500 that nevertheless pass.
_PASSING = frozenset((
    "SlowDown", "RequestTimeout", "RequestTimeoutException", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException",
    "ThrottledException", "RequestThrottled", "TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded",
    "BandwidthLimitExceeded", "PriorRequestNotComplete", "ConditionalRequestConflict", "OperationAborted", "BadDigest", "IncompleteBody",
    "XAmzContentSHA256Mismatch",
))  # fmt: skip
_HELP = {
    "AccessDenied": "the credentials lack the right to do this",
    "403": "the credentials lack the right to do this, or to list the bucket, without which a missing object looks like this",
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "ExpiredToken": "the credentials have expired",
    "InvalidToken": "the session token is not valid",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "NoSuchBucket": "the bucket does not exist",
    "PermanentRedirect": "the bucket is in another region",
    "AuthorizationHeaderMalformed": "the bucket is in another region",
    "IllegalLocationConstraintException": "the bucket is in another region",
    "301": "the bucket is in another region",
}


def failed_of(error: BaseException, operation: str, *, wanted: str | None = None) -> Failed:
    """The failure of a request. ``wanted``: the key, when a 404 can mean that."""
    from botocore import exceptions as known
    from urllib3.exceptions import HTTPError

    if isinstance(error, Failed):
        return error
    if isinstance(error, known.ClientError):
        return _answered(error, operation, wanted)
    text = f"{operation}: {type(error).__name__}: {_plain(error)}"
    if isinstance(error, (known.NoCredentialsError, known.PartialCredentialsError, known.CredentialRetrievalError)):
        return Failed("refused", f"{text}; give key= and secret=, a profile=, or anon=True in storage_options")
    if isinstance(error, RecursionError):  # botocore follows redirects without end
        return Failed("refused", f'{operation}: the server redirects without naming a region; say client_kwargs={{"region_name": ...}}')
    if isinstance(error, known.SSLError):
        return Failed("refused", text)
    if isinstance(error, (known.ConnectTimeoutError, known.EndpointConnectionError, known.ProxyConnectionError)):
        return Failed("transient", text, unreached=True)  # nothing was sent
    if isinstance(error, (known.HTTPClientError, known.ResponseStreamingError, known.IncompleteReadError, known.FlexibleChecksumError)):
        return Failed("transient", text, unsure=True)
    if isinstance(error, (HTTPError, ConnectionError, TimeoutError)) or type(error).__name__ == "ResponseParserError":
        return Failed("transient", text, unsure=True)
    if isinstance(error, (known.BotoCoreError, OSError, ValueError)):
        return Failed("refused", text)
    raise error  # a bug of ours must not look like one of the server


def _answered(error: Any, operation: str, wanted: str | None) -> Failed:
    about = error.response.get("ResponseMetadata", {})
    status = int(about.get("HTTPStatusCode") or 0)
    code = str(error.response.get("Error", {}).get("Code", ""))
    message = str(error.response.get("Error", {}).get("Message", ""))
    headers = about.get("HTTPHeaders", {})
    text = f"{operation}: {status} {code}" + (f": {message}" if message and message != code else "")
    if code in _HELP:
        text += f" ({_HELP[code]})"
    region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region")
    if region and status in (301, 307, 400):
        text += f'; the server names the region {region}: client_kwargs={{"region_name": "{region}"}}'
    kind = _kind(status, code, wanted)
    wait = headers.get("retry-after", "")
    # A gateway may say 503 for a server that did it.
    return Failed(kind, text, unsure=kind == "transient", wait=float(wait) if wait.isdigit() else None)


def _kind(status: int, code: str, wanted: str | None) -> Kind:
    if code == "NoSuchUpload":
        return "lost"
    if code == "NoSuchBucket":
        return "refused" if wanted is not None else "missing"
    if code == "NotImplemented" or status == 501:
        return "unconditional"
    if code in _PASSING or status == 429 or status >= 500:
        return "transient"
    if status == 412 or code == "PreconditionFailed":
        return "condition"
    if status == 416 or code == "InvalidRange":
        return "range"
    if status == 404 or code in ("NoSuchKey", "404"):
        return "missing"
    return "refused"


def _plain(error: BaseException) -> str:
    text = str(error)
    return text if len(text) < 300 else text[:300] + "..."
