"""A client of one S3 server, with retries and readable errors. Its time-outs, of retries too: `settings.py`.

botocore retries a request a few times by itself. Beyond that an operation is retried, with growing, random waits, until
its retry time-out. So the client rides out a server that restarts or is busy for a minute, and reports one that stays
unavailable. At a URL that has worked before, refusals are retried for a shorter time: credentials and rights that are
being changed work again within a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

from pipeline.adapters.s3.outage import OutageLog
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.store_clock import TimeOffset
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ports import Clock, Randomness, StoreError, StoreUnavailable

try:
    import boto3
    from botocore import exceptions as failures
    from botocore.config import Config
except ModuleNotFoundError as error:
    raise StoreError("S3: boto3 is not installed; install it with: pip install 'tokenmill[aws]'") from error

Answer = TypeVar("Answer")

QUICK_ATTEMPTS: Final = 3
"""Attempts of one request by botocore itself."""

FIRST_WAIT: Final = 0.25
MAX_WAIT: Final = 5.0
"""Seconds between attempts; the wait is random below a bound that doubles from the first to the second value."""

_BUSY_CODES: Final = frozenset(
    {
        *("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "RequestTimeoutException", "Throttling"),
        *(
            "ThrottlingException",
            "TooManyRequests",
            "RequestLimitExceeded",
            "BandwidthLimitExceeded",
            "XAmzContentSHA256Mismatch",
        ),
        *("ConditionalRequestConflict", "OperationAborted", "BadDigest"),
    }
)
_BUSY_STATUS: Final = frozenset({408, 409, 429, 500, 502, 503, 504})
_UNREACHED: Final = (failures.ConnectionError, failures.HTTPClientError)
_TRANSIENT: Final = (*_UNREACHED, failures.IncompleteReadError, failures.FlexibleChecksumError)
_MISSING: Final = frozenset({"NoSuchKey", "NoSuchVersion", "NoSuchUpload", "404"})

_DENIED = (
    "access is denied",
    "allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket there, and the use of its KMS key, if any",
)
_OTHER_REGION = ("the bucket lies in another region", "set the region")
_EXPIRED = ("the credentials have expired", "renew them")
_REASONS: Final = {
    "NoSuchBucket": ("there is no such bucket", "create it or correct the URL"),
    "AccessDenied": _DENIED,
    "403": _DENIED,
    "InvalidAccessKeyId": ("the server does not know the access key", "correct the credentials"),
    "SignatureDoesNotMatch": ("the secret key does not fit the access key", "correct the credentials"),
    "ExpiredToken": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set it"),
    "PermanentRedirect": _OTHER_REGION,
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    "301": _OTHER_REGION,
    "KMS.NotFoundException": ("there is no such KMS key", "correct it, or leave encryption to the bucket"),
    "KMS.DisabledException": ("the KMS key is disabled", "enable it or name another"),
    "NotImplemented": ("the server cannot do that", "use S3 or a server that can"),
    "EntityTooLarge": ("the object is too large for the server", "let larger objects be sent in parts"),
}


_DENIALS: Final = frozenset({"AccessDenied", "403", "InvalidAccessKeyId", "ExpiredToken", "InvalidToken"})
"""Error codes that are transient while credentials or rights are being changed."""


class MissingObject(Exception):
    """Raised when the object, version or upload of a request doesn't exist."""


class ConditionFailed(Exception):
    """Raised when the condition of a request does not hold (412)."""


class S3Connection:
    """One client with its settings. Threads may share it; create it in the process that uses it, not before a fork.

    Raises:
        StoreError: the client can't be made, such as without a region.
    """

    def __init__(
        self, settings: S3Settings | None = None, clock: Clock | None = None, random: Randomness | None = None
    ) -> None:
        self.settings = settings or S3Settings()
        self.random = random or SystemRandomness()
        self.clock = clock or SystemClock()
        self.time_offset = TimeOffset(self.clock)
        self._outages = OutageLog(self.clock)
        self._proven: tuple[str, ...] = ()
        try:
            self.client = _make_client(self.settings)
        except (failures.BotoCoreError, ValueError) as error:
            raise StoreError(f"S3: can't be used: {error}; correct the settings") from error
        events = self.client.meta.events
        events.register("before-call.s3", self._before_call)
        events.register("after-call.s3", self._after_call)
        events.register("needs-retry.s3", self._after_try)

    def record_proven(self, where: str) -> None:
        """Record that operations below this URL have worked: from now on a refusal there is retried."""
        self._proven = (*self._proven, where)

    def run(
        self, what: str, where: str, action: Callable[[], Answer], *, retry_timeout_seconds: float | None = None
    ) -> Answer:
        """Run `action`, and retry it while it fails for transient reasons.

        Args:
            what: the operation, in an error after "can't".  where: its URL.
            action: makes requests; must be repeatable.
            retry_timeout_seconds: retry time-out in seconds; None: the settings'. No new attempt begins later.

        Raises:
            MissingObject, ConditionFailed: the server's answer.
            StoreError: any other failure: what, where, what to do.
        """
        allowed = self.settings.retry_timeout_seconds if retry_timeout_seconds is None else retry_timeout_seconds
        began, bound, retried = self.clock.monotonic(), FIRST_WAIT, False
        try:
            while True:
                try:
                    answer = action()
                except (failures.ClientError, failures.BotoCoreError) as error:
                    if isinstance(error, failures.ClientError):
                        _raise_expected(error)
                    seconds = self._seconds_to_retry(error, where, allowed)
                    if self.clock.monotonic() - began >= seconds:
                        raise self._explain(error, what, where, seconds) from error
                    if not retried:
                        retried = True
                        self._outages.begin_retrying()
                    self._outages.record_failure(what, where, self._reason(error)[0])
                else:
                    return answer
                self.pause(bound)
                bound = min(MAX_WAIT, 2 * bound)
        finally:
            if retried:
                self._outages.end_retrying()

    def _seconds_to_retry(self, error: Exception, where: str, allowed: float) -> float:
        """Retry time-out of an operation that failed with `error`; 0: no retry."""
        if _is_transient(error):
            return allowed
        if _is_denial(error) and where.startswith(self._proven):
            return min(allowed, self.settings.denied_retry_timeout_seconds)
        return 0.0

    def _before_call(self, context: dict[str, Any], **_: Any) -> None:
        context["tokenmill_began"] = self.clock.monotonic()

    def _after_call(self, http_response: Any, parsed: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        """Update the clock offset from the answer's date; an answer without a failure ends an outage."""
        headers = parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        seconds = self.clock.monotonic() - context.get("tokenmill_began", -math.inf)
        self.time_offset.record_answer(headers.get("date"), seconds)
        if http_response.status_code < 400:
            self._outages.record_success()

    def _after_try(self, operation: Any, caught_exception: Exception | None = None, **_: Any) -> None:
        """Record time-outs that botocore retries itself. A hanging server blocks it for minutes before `run`
        notices."""
        if isinstance(caught_exception, failures.ReadTimeoutError | failures.ConnectTimeoutError):
            self._outages.record_failure(
                operation.name, self.settings.endpoint or "", self._reason(caught_exception)[0]
            )

    def pause(self, bound: float) -> None:
        """Wait for a random time below `bound` seconds, so that colliding writers don't collide again."""
        self.clock.sleep(bound * int.from_bytes(self.random.token(4), "big") / 2**32)

    def _explain(self, error: Exception, what: str, where: str, retry_timeout_seconds: float) -> StoreError:
        reason, advice = self._reason(error)
        tried = f" for {retry_timeout_seconds:g} s" if retry_timeout_seconds or _is_transient(error) else ""
        kind = StoreUnavailable if _is_transient(error) else StoreError
        return kind(f"{where}: can't {what}: {reason}{tried}; {advice}")

    def _reason(self, error: Exception) -> tuple[str, str]:
        server = self.settings.endpoint or "AWS S3"
        if isinstance(error, failures.ClientError):
            code, status = code_of(error), status_of(error)
            if code in _REASONS:
                return _REASONS[code]
            if _is_transient(error):
                return f"{server} was busy or failing ({code}, {status})", "try again later"
            message = " ".join(str(error.response.get("Error", {}).get("Message", "")).split())
            return f"{server} refused it ({code}, {status}: {message})", "see what it says"
        if isinstance(error, failures.NoCredentialsError | failures.PartialCredentialsError):
            return "no credentials were found", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role"
        if isinstance(error, failures.CredentialRetrievalError | failures.TokenRetrievalError):
            return "the credentials could not be fetched", "log in again, or check the role"
        if isinstance(error, failures.SSLError):
            return f"{server} could not be trusted or gave up the handshake", "check the endpoint and its certificate"
        if isinstance(error, failures.ReadTimeoutError):
            return f"{server} did not answer in {self.settings.read_seconds:g} s", "try again later"
        if isinstance(error, _UNREACHED):
            return f"{server} could not be reached ({type(error).__name__})", "check the endpoint and the network"
        return f"{type(error).__name__}: {' '.join(str(error).split())}", "correct the settings"


def code_of(error: failures.ClientError) -> str:
    """The server's error code; for answers without one (to HEAD), the status."""
    return str(error.response.get("Error", {}).get("Code", "")) or str(status_of(error))


def status_of(error: failures.ClientError) -> int:
    """The HTTP status of the answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _raise_expected(error: failures.ClientError) -> None:
    """Raise `MissingObject` or `ConditionFailed` for answers that callers may expect."""
    code = code_of(error)
    if code in _MISSING:
        raise MissingObject(code) from error
    if code == "PreconditionFailed" or status_of(error) == 412:
        raise ConditionFailed(code) from error


def _is_transient(error: Exception) -> bool:
    """Whether a retry may succeed."""
    if isinstance(error, failures.ClientError):
        code = code_of(error)
        return code not in _REASONS and (code in _BUSY_CODES or status_of(error) in _BUSY_STATUS)
    return isinstance(error, _TRANSIENT)


def _is_denial(error: Exception) -> bool:
    """Whether credentials or rights were refused, or could not be fetched."""
    if isinstance(error, failures.ClientError):
        return code_of(error) in _DENIALS
    return isinstance(error, failures.CredentialRetrievalError | failures.TokenRetrievalError)


def _make_client(settings: S3Settings) -> Any:
    path_style = settings.endpoint is not None if settings.path_style is None else settings.path_style
    config = Config(
        signature_version="s3v4",
        connect_timeout=settings.connect_seconds,
        read_timeout=settings.read_seconds,
        max_pool_connections=settings.connections,
        retries={"mode": "standard", "total_max_attempts": QUICK_ATTEMPTS},
        s3={"addressing_style": "path" if path_style else "virtual"},
        request_checksum_calculation=settings.checksums,
        response_checksum_validation=settings.checksums,
        tcp_keepalive=True,
        user_agent_extra="tokenmill",
    )
    session = boto3.session.Session(
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        aws_session_token=settings.session_token,
        region_name=settings.region,
    )
    # A server that isn't AWS's has no regions, but a signature needs one.
    region = settings.region or session.region_name or ("us-east-1" if settings.endpoint else None)
    return session.client("s3", endpoint_url=settings.endpoint, region_name=region, config=config)
