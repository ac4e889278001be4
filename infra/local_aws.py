"""Emulates AWS on this machine for `infra.apply_locally`: ministack, and moto for services that ministack lacks.

A proxy serves both at one address. It records the sender of each request, so that policies can be checked against the
requests. It corrects four differences from AWS:

- ministack answers DescribeServices of an ECS service on the host's network with an empty networkConfiguration, where
  AWS sends none. Terraform's provider fails on that, so the proxy removes it.
- ministack has no Application Auto Scaling. moto has it, but requires the ECS service, so the proxy creates one there.
- ministack sends the whole object for a range of an object version, so the proxy cuts out the range.
- moto doesn't return the tags of a scalable target, so the proxy stores them and returns them.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from tests.servers.moto import MotoServer
from tests.servers.process import MissingServer, ServerProcess, answers

REGION: Final = "us-east-1"
HOP_BY_HOP: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "expect"})
SCALING: Final = "application-autoscaling"
UPSTREAM_SECONDS: Final = 120.0

_CREDENTIAL: Final = re.compile(r"Credential=([^/]+)/\d+/[^/]+/([^/]+)/")


@dataclass(frozen=True, slots=True)
class AwsRequest:
    """A signed request to AWS. key: the sender's access key.  body: only where the rights depend on it."""

    key: str
    service: str
    method: str
    path: str
    query: dict[str, list[str]]
    target: str
    body: bytes
    status: int


class MiniStack(ServerProcess):
    """Most of AWS's API in memory. `program`: its command, installed in a separate environment."""

    name = "ministack"

    def __init__(self, folder: Path, program: str) -> None:
        super().__init__(folder)
        self._program = program

    def command(self) -> list[str]:
        found = shutil.which(self._program)
        if found is None:
            raise MissingServer(f"{self._program} is missing; `make infra-apply` installs it")
        return [str(Path(found).absolute())]  # the server starts in another folder

    def environment(self) -> dict[str, str]:
        return {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(self.port), "MINISTACK_REGION": REGION}

    def is_ready(self) -> bool:
        return answers(self.port, b"GET /_ministack/health HTTP/1.0\r\n\r\n", b"HTTP/1.1 200")


class LocalAws:
    """Both servers behind `endpoint`. Use `local_aws`.

    Attributes:
        requests: all requests so far.
    """

    def __init__(self, mini: MiniStack, moto: MotoServer) -> None:
        self.mini = mini
        self.moto = moto
        self.requests: list[AwsRequest] = []
        self._scaled: set[str] = set()
        self._tags: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"aws": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def client(self, service: str) -> Any:
        """A boto3 client of the emulation."""
        import boto3

        return boto3.session.Session().client(
            service,
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id="operator",
            aws_secret_access_key="testtest",
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def record(self, request: AwsRequest) -> None:
        """Add a request to `requests`."""
        with self._lock:
            self.requests.append(request)

    def create_scaled_service(self, body: bytes) -> None:
        """Create the ECS service of a scalable target in moto."""
        resource = str(json.loads(body).get("ResourceId", ""))
        _, cluster, service = resource.split("/")
        ecs = self.moto.client("ecs")
        with self._lock:
            if resource in self._scaled:
                return
            self._scaled.add(resource)
            ecs.create_cluster(clusterName=cluster)
            container = {"name": "any", "image": "any", "memory": 128}
            ecs.register_task_definition(family="any", containerDefinitions=[container])
            ecs.create_service(cluster=cluster, serviceName=service, taskDefinition="any", desiredCount=0)

    def store_tags(self, body: bytes, answer: bytes) -> None:
        """Store the tags of a new scalable target."""
        self._tags[str(json.loads(answer).get("ScalableTargetARN"))] = json.loads(body).get("Tags", {})

    def tags_of(self, body: bytes) -> bytes:
        """Response to ListTagsForResource."""
        return json.dumps({"Tags": self._tags.get(str(json.loads(body).get("ResourceARN")), {})}).encode()


@contextmanager
def local_aws(folder: Path, program: str) -> Iterator[LocalAws]:
    """Run the emulation until the block ends. Raises `MissingServer`."""
    with MiniStack(folder / "ministack", program) as mini, MotoServer(folder / "moto") as moto:
        assert isinstance(mini, MiniStack)
        assert isinstance(moto, MotoServer)
        aws = LocalAws(mini, moto)
        try:
            yield aws
        finally:
            aws.close()


class _Handler(BaseHTTPRequestHandler):
    """Forwards requests to ministack or moto, and returns their responses."""

    aws: LocalAws
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Log nothing: both servers write their own logs."""

    def _handle(self) -> None:
        body = self._body()
        found = _CREDENTIAL.search(self.headers.get("Authorization", ""))
        key, service = found.groups() if found else ("", "")
        target = self.headers.get("X-Amz-Target", "")
        if service == SCALING and target.endswith(".ListTagsForResource"):
            self._reply(200, [("Content-Type", "application/x-amz-json-1.1")], self.aws.tags_of(body))
            return
        registers = service == SCALING and target.endswith(".RegisterScalableTarget")
        if registers:
            self.aws.create_scaled_service(body)
        port = self.aws.moto.port if service == SCALING else self.aws.mini.port
        status, headers, answer = self._ask(port, body)
        if registers and status == 200:
            self.aws.store_tags(body, answer)
        if service == "s3" and status == 200 and self.command == "GET" and (wanted := self.headers.get("Range")):
            status, headers, answer = cut_out(wanted, headers, answer)
        if service == "ecs":
            answer = _without_empty_networks(answer)
        if service == "sqs":  # a queue's URL holds the address of the server
            answer = answer.replace(f"127.0.0.1:{port}".encode(), self.aws.endpoint.removeprefix("http://").encode())
        parts = urlsplit(self.path)
        has_relevant_body = service in ("sqs", "monitoring") or "delete" in parts.query
        self.aws.record(
            AwsRequest(
                key,
                service,
                self.command,
                parts.path,
                parse_qs(parts.query, keep_blank_values=True),
                target,
                body if has_relevant_body else b"",
                status,
            )
        )
        self._reply(status, headers, answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _handle  # noqa: N815 - the base class looks for these

    def _body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        whole = bytearray()
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers
            pass
        return bytes(whole)

    def _ask(self, port: int, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        headers["Content-Length"] = str(len(body))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=UPSTREAM_SECONDS)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _reply(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        length = next((value for name, value in headers if name.lower() == "content-length"), None)
        for name, value in headers:
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length or "0" if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def cut_out(wanted: str, headers: list[tuple[str, str]], whole: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
    """Response to a Range header that ministack ignored."""
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    begin = int(first) if first else max(0, len(whole) - int(last))
    end = min(len(whole), int(last) + 1) if first and last else len(whole)
    kept = [(name, value) for name, value in headers if not name.lower().startswith("x-amz-checksum-")]  # of the whole
    content_range = ("Content-Range", f"bytes {begin}-{end - 1}/{len(whole)}")
    return HTTPStatus.PARTIAL_CONTENT, [*kept, content_range], whole[begin:end]


def _without_empty_networks(body: bytes) -> bytes:
    """ECS's response without the empty networkConfiguration of services on the host's network."""
    try:
        document = json.loads(body)
    except ValueError:
        return body
    services = [*document.get("services", []), document.get("service") or {}]
    for service in services:
        for holder in (service, *service.get("deployments", [])):
            if holder.get("networkConfiguration") == {}:
                del holder["networkConfiguration"]
    return json.dumps(document).encode()
