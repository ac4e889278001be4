"""The common part of the tests' S3 servers: an endpoint, one pair of keys, a client, buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.servers.process import MissingServer, ServerProcess


class S3Server(ServerProcess):
    """S3 at `endpoint`."""

    region = "us-east-1"
    access_key = "test"
    secret_key = "testtest"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._clients: dict[str, Any] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, service: str = "s3") -> Any:
        """A plain boto3 client of this server; threads may share it."""
        if service in self._clients:
            return self._clients[service]
        try:
            import boto3  # noqa: PLC0415 - comes with the servers' packages
        except ImportError as error:
            raise MissingServer("boto3 is missing; install it with: pip install boto3") from error
        self._clients[service] = boto3.session.Session().client(
            service,
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
        )
        return self._clients[service]

    def ensure_bucket(self, name: str) -> str:
        """The bucket of this name, made if it isn't there; returns the name."""
        client = self.client()
        if name not in [found["Name"] for found in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=name)
        return name

    def make_bucket(self, name: str, *, versioned: bool = False) -> str:
        """A bucket of this name; returns the name."""
        client = self.client()
        client.create_bucket(Bucket=name)
        if versioned:
            client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        return name
