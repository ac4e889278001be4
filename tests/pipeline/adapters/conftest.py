"""Fixtures that several of the adapters' test modules use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.servers.faulty_http import FaultyHttp
from tests.servers.moto import MotoServer


@pytest.fixture
def bucket(s3_server: MotoServer, unique_name: Callable[[], str]) -> str:
    return s3_server.make_bucket(unique_name())


@pytest.fixture
def proxy(s3_server: MotoServer) -> Iterator[FaultyHttp]:
    """A proxy between a client and the S3 server that fails as configured."""
    with FaultyHttp(s3_server.endpoint) as proxy:
        yield proxy
