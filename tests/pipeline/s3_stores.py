"""Stores and settings for the S3 servers of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from tests.servers.s3 import S3Server


def settings_for(server: S3Server, scratch: Path, **more: Any) -> S3Settings:
    """How to reach the server; `more` replaces and adds."""
    facts: dict[str, Any] = {
        "endpoint": server.endpoint,
        "region": server.region,
        "access_key": server.access_key,
        "secret_key": server.secret_key,
        "connect_seconds": 2.0,
        "read_seconds": 20.0,
        "retry_timeout_seconds": 30.0,
        "denied_retry_timeout_seconds": 0.0,
        "scratch": scratch,
    }
    return S3Settings(**(facts | more))


def open_s3(server: S3Server, bucket: str, prefix: str, scratch: Path, **more: Any) -> S3Store:
    """One more store on the same root."""
    return S3Store(bucket, prefix, S3Connection(settings_for(server, scratch, **more)))
