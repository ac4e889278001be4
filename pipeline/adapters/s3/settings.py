"""Settings of S3, or of a server with its protocol. Without boto3, so that settings can be created anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pipeline.ports import StoreError

MIN_PART_BYTES = 5 << 20
"""S3's own limit for all parts of an upload but the last."""


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Connection settings; the defaults suit S3 itself. Credentials then come from AWS's usual sources (environment,
    profile, role of the machine or the pod).

    Attributes:
        endpoint: URL of another server than AWS's.  region: None: as AWS's tools would choose.
        path_style: the bucket in the path and not in the host's name; None: when there is an endpoint.
        access_key, secret_key, session_token: None: from AWS's usual sources. Never shown.
        encryption: at rest: "" leaves it to the bucket; "AES256" (SSE-S3); "aws:kms" or "aws:kms:dsse" (SSE-KMS).
        kms_key: id or ARN of the key for SSE-KMS; None: the account's key for S3.
        checksums: "when_required" for servers that don't know S3's newer checksums.
        connect_seconds, read_seconds: how long a connection, and then each piece of an answer, may take.
        retry_timeout_seconds: retry time-out of an operation while the server fails, is busy or unreachable.
        denied_retry_timeout_seconds: retry time-out of an operation that is refused where others have worked.
        opening_retry_timeout_seconds: retry time-out while a store is opened, where a wrong address is the likelier
            cause.
        connections: maximum number of connections.
        multipart_bytes: objects from this size on are sent in parts.  part_bytes: of a part (at least 5 MiB).
        part_threads: parts of one object that are sent at once.
        read_bytes: the smallest piece that a stream asks for.
        scratch: a local folder for files being built; None: below the system's folder for temporary files.
    """

    endpoint: str | None = None
    region: str | None = None
    path_style: bool | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    encryption: Literal["", "AES256", "aws:kms", "aws:kms:dsse"] = ""
    kms_key: str | None = None
    checksums: Literal["when_supported", "when_required"] = "when_supported"
    connect_seconds: float = 5.0
    read_seconds: float = 30.0
    retry_timeout_seconds: float = 120.0
    denied_retry_timeout_seconds: float = 60.0
    opening_retry_timeout_seconds: float = 10.0
    connections: int = 32
    multipart_bytes: int = 64 << 20
    part_bytes: int = 16 << 20
    part_threads: int = 4
    read_bytes: int = 4 << 20
    scratch: Path | None = None

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
        if (self.access_key is None) != (self.secret_key is None):
            raise StoreError("S3 settings: access key and secret key go together; give both or neither")
        if self.kms_key is not None and not self.encryption.startswith("aws:kms"):
            raise StoreError("S3 settings: a KMS key is given, but encryption is not aws:kms; set encryption too")
        if self.part_bytes < MIN_PART_BYTES or self.multipart_bytes < MIN_PART_BYTES:
            raise StoreError(f"S3 settings: parts and objects sent in parts have at least {MIN_PART_BYTES} bytes")
        if min(self.connections, self.part_threads, self.read_bytes) < 1:
            raise StoreError("S3 settings: connections, part threads and bytes to read are at least 1")
        if min(self.connect_seconds, self.read_seconds) <= 0:
            raise StoreError("S3 settings: the seconds that a connection or an answer may take are above 0")

    def encryption_arguments(self) -> dict[str, str]:
        """Arguments of every writing request."""
        arguments: dict[str, str] = {}
        if self.encryption:
            arguments["ServerSideEncryption"] = self.encryption
        if self.kms_key is not None:
            arguments["SSEKMSKeyId"] = self.kms_key
        return arguments


def _check_endpoint(endpoint: str) -> None:
    """Check the endpoint's URL; raises `StoreError`, without the endpoint if it may contain a password."""
    parts = urlsplit(endpoint)
    if "@" in endpoint:
        raise StoreError("S3 settings: the endpoint holds credentials; give them as access key and secret key")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        shown = f"{parts.scheme}://{parts.netloc}" if parts.scheme else parts.path
        raise StoreError(f"S3 settings: the endpoint {shown} is no URL such as https://s3.example.com:9000; correct it")
