"""AWS on this machine, for `infra.apply_locally`: ministack, with moto for what it lacks, behind one address.

What stands at that address also writes down who asked for what, so that policies can be held against it. It helps in
four places, and nowhere else:

- ministack answers DescribeServices of an ECS service on the host's network with an empty networkConfiguration, where
  AWS has none; Terraform's provider breaks off at that, so it is taken out.
- ministack has no Application Auto Scaling. moto has, but wants to know the ECS service: it is told of one by the name.
- ministack sends the whole object where a range of one version of it is asked for: the range is cut out.
- moto doesn't tell what tags a scalable target has: they are told from here, as they were given.
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
class InferenceRequest:
    """A request as it was signed: by whose key, of which service; body: only where it says what is asked for."""

    key: str
    service: str
    method: str
    path: str
    query: dict[str, list[str]]
    target: str
    body: bytes
    status: int


class MiniStack(ServerProcess):
    """Most of AWS's API in memory. `program`: its command, in an environment of its own."""

    name = "ministack"

    def __init__(self, folder: Path, program: str) -> None:
        super().__init__(folder)
        self._program = program

    def command(self) -> list[str]:
        found = shutil.which(self._program)
        if found is None:
            raise MissingServer(f"{self._program} is missing; `make infra-apply` installs it")
        return [str(Path(found).absolute())]  # it is started in a folder of its own

    def environment(self) -> dict[str, str]:
        return {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(self.port), "MINISTACK_REGION": REGION}

    def is_ready(self) -> bool:
        return answers(self.port, b"GET /_ministack/health HTTP/1.0\r\n\r\n", b"HTTP/1.1 200")


class LocalAws:
    """Both servers behind `endpoint`. Use `local_aws`.

    Attributes:
        asked: all requests so far.
    """

    def __init__(self, mini: MiniStack, moto: MotoServer) -> None:
        self.mini = mini
        self.moto = moto
        self.asked: list[InferenceRequest] = []
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
        """A boto3 client of all that."""
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

    def note(self, request: InferenceRequest) -> None:
        """Remember a request."""
        with self._lock:
            self.asked.append(request)

    def tell_moto_of(self, body: bytes) -> None:
        """Let moto know the ECS service that is to be scaled."""
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

    def keep_tags(self, body: bytes, answer: bytes) -> None:
        """Remember what tags a scalable target was given."""
        self._tags[str(json.loads(answer).get("ScalableTargetARN"))] = json.loads(body).get("Tags", {})

    def tags_of(self, body: bytes) -> bytes:
        """The answer to ListTagsForResource."""
        return json.dumps({"Tags": self._tags.get(str(json.loads(body).get("ResourceARN")), {})}).encode()


@contextmanager
def local_aws(folder: Path, program: str) -> Iterator[LocalAws]:
    """AWS until the block ends. Raises `MissingServer`."""
    with MiniStack(folder / "ministack", program) as mini, MotoServer(folder / "moto") as moto:
        assert isinstance(mini, MiniStack)
        assert isinstance(moto, MotoServer)
        aws = LocalAws(mini, moto)
        try:
            yield aws
        finally:
            aws.close()


class _Handler(BaseHTTPRequestHandler):
    """Passes requests on, and answers back."""

    aws: LocalAws
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Nothing: servers have logs of their own."""

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
            self.aws.tell_moto_of(body)
        port = self.aws.moto.port if service == SCALING else self.aws.mini.port
        status, headers, answer = self._ask(port, body)
        if registers and status == 200:
            self.aws.keep_tags(body, answer)
        if service == "s3" and status == 200 and self.command == "GET" and (wanted := self.headers.get("Range")):
            status, headers, answer = cut_out(wanted, headers, answer)
        if service == "ecs":
            answer = _without_empty_networks(answer)
        if service == "sqs":  # queues are named by the address that was asked
            answer = answer.replace(f"127.0.0.1:{port}".encode(), self.aws.endpoint.removeprefix("http://").encode())
        parts = urlsplit(self.path)
        speaks = service in ("sqs", "monitoring") or "delete" in parts.query
        self.aws.note(
            InferenceRequest(
                key,
                service,
                self.command,
                parts.path,
                parse_qs(parts.query, keep_blank_values=True),
                target,
                body if speaks else b"",
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
    """The answer to a Range that was overlooked."""
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    begin = int(first) if first else max(0, len(whole) - int(last))
    end = min(len(whole), int(last) + 1) if first and last else len(whole)
    kept = [(name, value) for name, value in headers if not name.lower().startswith("x-amz-checksum-")]  # of the whole
    told = ("Content-Range", f"bytes {begin}-{end - 1}/{len(whole)}")
    return HTTPStatus.PARTIAL_CONTENT, [*kept, told], whole[begin:end]


def _without_empty_networks(body: bytes) -> bytes:
    """ECS's answer, in which services without a network of their own say nothing of one."""
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
