"""Runs tokenmill's processes as `terraform apply` configures their containers, and checks that the pipeline works.

A process gets the command, the variables and the secrets of its container, read as ECS reads them. Values that can't be
the same on one machine are replaced and reported: see `Installation.overrides`.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, Final
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from infra.local_aws import LocalAws
from tests.cluster.cluster import NULL_WORKER
from tests.cluster.null_worker import ExpectedAnswers
from tests.servers.instance_metadata import MetadataServer
from tests.servers.process import free_port
from tests.servers.redis import RedisServer
from tests.waiting import wait_for

ROOT: Final = Path(__file__).parents[1]
SECONDS: Final = 180.0
ROWS: Final = 500


@dataclass
class Installation:
    """An applied installation, as processes of this machine.

    Attributes:
        outputs: of the Terraform root.  replaced: variables and options, and what replaces them, without secrets.
    """

    aws: LocalAws
    outputs: Mapping[str, Any]
    folder: Path
    redis_address: str
    certificate: Path
    metadata: MetadataServer
    replaced: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start the process as ECS starts its container."""
        described = self.outputs["processes"][name]
        given = self._secrets(described["secrets"]) | dict(described["environment"])
        variables = given | self.overrides(name, given)
        command = list(described["command"])
        # The null worker computes nothing; everything else is real.
        program = [*NULL_WORKER, *command[1:]] if command[0] == "worker" else ["-m", "tokenmill", *command]
        if command[0] == "gateway":
            self.ports[name] = free_port()
            program = [*program[:-1], str(self.ports[name])]
            self.replaced["--port 8000"] = "a free port"
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *program], stdout=log, stderr=log, cwd=self.folder, env=variables
            )

    def overrides(self, name: str, given: Mapping[str, str]) -> dict[str, str]:
        """Variables that differ on this machine: addresses, credentials, folders."""
        token = urlsplit(given["TOKENMILL_REDIS_URL"])
        substitutes = {
            "AWS_ENDPOINT_URL": self.aws.endpoint,
            "TOKENMILL_S3__ENDPOINT": self.aws.endpoint,
            "AWS_ACCESS_KEY_ID": name,
            "AWS_SECRET_ACCESS_KEY": "testtest",
            "TOKENMILL_REDIS_URL": (
                f"{token.scheme}://:{token.password}@{self.redis_address}/0?ssl_ca_certs={self.certificate}"
            ),
        }
        if "TOKENMILL_METRICS__PORT" in given:  # each container has a network of its own
            self.ports[name] = free_port()
            substitutes["TOKENMILL_METRICS__PORT"] = str(self.ports[name])
        if name.startswith("worker"):
            substitutes |= {
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.metadata.endpoint,
                "TOKENMILL_MODEL_CACHE": str(self.folder / "cache"),
                "XDG_CACHE_HOME": str(self.folder / "cache"),
                "TRITON_CACHE_DIR": str(self.folder / "cache"),
                "TOKENMILL_NATIVE_CACHE": str(self.folder / "cache"),
            }
        self.replaced |= dict.fromkeys(substitutes, "a value for this machine")
        self.replaced["TOKENMILL_REDIS_URL"] = "the secret's token, at a Valkey of this machine behind TLS"
        here = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return here | substitutes

    def _secrets(self, arns: Mapping[str, str]) -> dict[str, str]:
        client = self.aws.client("secretsmanager")
        return {name: str(client.get_secret_value(SecretId=arn)["SecretString"]) for name, arn in arns.items()}

    @property
    def bucket(self) -> str:
        return str(self.outputs["root"]).removeprefix("s3://")

    def is_well(self, name: str) -> bool:
        """Whether the container's health check passes."""
        _, *command = self.outputs["processes"][name]["health"]
        program = re.sub(r":\d+/", f":{self.ports[name]}/", command[-1])
        check = [sys.executable, *command[1:-1], program]
        return subprocess.run(check, capture_output=True, check=False, timeout=30).returncode == 0

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def running(self) -> None:
        """Raises `RuntimeError` when a process has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{self.log(name)[-3000:]}")

    def wait(self, what: Callable[[], Any], why: str) -> Any:
        """Wait for a true value, and return it. Raises `RuntimeError` when a process has ended."""

        def poll() -> Any:
            self.running()
            return what()

        return wait_for(poll, why)

    def keys(self, prefix: str) -> list[str]:
        """Names of the bucket's objects below the prefix."""
        pages = self.aws.client("s3").get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def outcomes(self) -> list[str]:
        """Ids of the jobs that have ended."""
        return [key.split("/")[1] for key in self.keys("jobs/") if key.endswith("/manifest.json")]

    def listed(self, prefix: str, since: int = 0) -> bool:
        """Whether an intake has listed the prefix, after the first `since` requests."""
        return any(
            request.key == "intake"
            and request.service == "s3"
            and request.query.get("prefix", [""])[0].startswith(prefix)
            for request in self.aws.requests[since:]
            if not request.path.strip("/").partition("/")[2]
        )

    def stop_all(self) -> dict[str, tuple[int, float, float]]:
        """Stop each process, as `stop` does."""
        return {name: self.stop(name) for name in list(self.processes)}

    def stop(self, name: str) -> tuple[int, float, float]:
        """Stop a process as ECS does; returns its exit code, the seconds that it took, and its limit."""
        process, begun = self.processes.pop(name), time.monotonic()
        process.send_signal(signal.SIGTERM)
        allowed = float(self.outputs["processes"][name]["stop"])
        try:
            code = process.wait(allowed)
        except subprocess.TimeoutExpired:
            process.kill()
            code = -9
        return code, time.monotonic() - begun, allowed


@contextmanager
def installation(aws: LocalAws, outputs: Mapping[str, Any], folder: Path) -> Iterator[Installation]:
    """The applied installation, ready to be started. Kills its processes at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    arns = next(iter(outputs["processes"].values()))["secrets"]
    url = aws.client("secretsmanager").get_secret_value(SecretId=arns["TOKENMILL_REDIS_URL"])["SecretString"]
    certificate = _certificate(folder / "localhost.pem")
    with (
        GuardedRedis(folder / "redis", str(urlsplit(url).password)) as redis,
        TlsFront(certificate, redis.port) as front,
        closing(MetadataServer()) as metadata,
    ):
        threading.Thread(target=front.serve_forever, daemon=True).start()
        made = Installation(aws, outputs, folder, f"localhost:{front.server_address[1]}", certificate, metadata)
        try:
            yield made
        finally:
            for process in made.processes.values():
                process.kill()
                process.wait()
            front.shutdown()


def requests(model: str) -> tuple[bytes, list[dict[str, Any]]]:
    """An input file of requests, and their bodies."""
    bodies = [{"model": model, "prompt": f"Row {row} of many. Say so.", "max_tokens": 16} for row in range(ROWS)]
    lines = [
        json.dumps({"custom_id": f"r{row}", "method": "POST", "url": "/v1/completions", "body": body})
        for row, body in enumerate(bodies)
    ]
    return "\n".join(lines).encode(), bodies


def check_results(made: Installation, job: str, texts: list[str]) -> None:
    """Check that the job's Parquet has each row once, with the expected text. Raises `AssertionError`."""
    s3 = made.aws.client("s3")
    parts = [key for key in made.keys(f"jobs/{job}/results/") if key.endswith(".parquet")]
    read = (s3.get_object(Bucket=made.bucket, Key=key)["Body"].read() for key in parts)
    table = pa.concat_tables([pq.read_table(io.BytesIO(data)) for data in read]).sort_by("row")
    assert table["row"].to_pylist() == list(range(len(texts))), "rows are missing, or twice"
    assert set(table["status"].to_pylist()) == {"succeeded"}, set(table["status"].to_pylist())
    assert table["text"].to_pylist() == texts, "texts are wrong"


def drop_a_file(made: Installation, model: Path, name: str, prefix: str) -> str:
    """Drop a file into the bucket; check notification, job and Parquet. Returns the job's id. Raises AssertionError."""
    data, bodies = requests(name)
    before = len(made.aws.requests)
    made.aws.client("s3").put_object(Bucket=made.bucket, Key=f"{prefix}rows.jsonl", Body=data)
    job = str(made.wait(made.outcomes, "the job did not end")[0])
    check_results(made, job, ExpectedAnswers(model).texts(bodies))
    sent = [request for request in made.aws.requests[before:] if request.key == "intake" and request.service == "sqs"]
    assert any(request.target.endswith("DeleteMessage") for request in sent), "no message came over the queue"
    assert not made.listed(prefix, since=before), "a listing may have found the file before the queue did"
    return job


def scale_up_from_none(made: Installation, model: Path, name: str, prefix: str, worker: str) -> tuple[float, int]:
    """Drop a file while no worker runs, then start one, which completes the job. Returns the desired workers that
    CloudWatch got, and the workers that the applied policy starts for these. Raises `AssertionError`."""
    code, _, _ = made.stop(worker)
    assert code == 0, f"{worker} ended with {code}"
    data, bodies = requests(name)
    ended = set(made.outcomes())
    made.aws.client("s3").put_object(Bucket=made.bucket, Key=f"{prefix}later.jsonl", Body=data)
    desired = float(made.wait(lambda: desired_workers(made, name), "CloudWatch got no desired workers"))
    made.start(worker)
    (job,) = made.wait(lambda: set(made.outcomes()) - ended, "the job did not end")
    check_results(made, str(job), ExpectedAnswers(model).texts(bodies))
    return desired, workers_for(made, desired)


def workers_for(made: Installation, desired: float) -> int:
    """Workers that the applied step policy starts for so many desired ones; its alarm's threshold is 0."""
    policies = made.aws.moto.client("application-autoscaling").describe_scaling_policies(ServiceNamespace="ecs")
    (policy,) = (one for one in policies["ScalingPolicies"] if one["PolicyName"].endswith("-work"))
    configuration = policy["StepScalingPolicyConfiguration"]
    assert configuration["AdjustmentType"] == "ExactCapacity", configuration
    return next(
        int(step["ScalingAdjustment"])
        for step in configuration["StepAdjustments"]
        if step["MetricIntervalLowerBound"] <= desired < step.get("MetricIntervalUpperBound", math.inf)
    )


def desired_workers(made: Installation, model: str) -> float:
    """Maximum of the metric DesiredWorkers that CloudWatch has for the model's pool; 0 without a sample."""
    settings = made.outputs["processes"]["dispatcher"]["environment"]
    pools = json.loads(settings["TOKENMILL_AUTOSCALE__POOLS"])
    pool = next(name for name, one in pools.items() if model in one["models"])
    dimensions = {"Installation": settings["TOKENMILL_CLOUDWATCH__INSTALLATION"], "Pool": pool}
    now = datetime.now(UTC)
    answer = made.aws.client("cloudwatch").get_metric_statistics(
        Namespace=settings["TOKENMILL_CLOUDWATCH__NAMESPACE"],
        MetricName="DesiredWorkers",
        Dimensions=[{"Name": name, "Value": value} for name, value in dimensions.items()],
        StartTime=now - timedelta(hours=1),
        EndTime=now + timedelta(hours=1),
        Period=3600,
        Statistics=["Maximum"],
    )
    return max((float(point["Maximum"]) for point in answer["Datapoints"]), default=0.0)


def take_the_spot_instance(made: Installation, name: str) -> float:
    """Send a spot interruption notice by the metadata service; returns the seconds until the worker exits cleanly."""
    notice = '{"action": "terminate", "time": "2030-01-01T10:00:00Z"}'
    made.metadata.notices = [(200, notice)]
    begun = time.monotonic()
    code = made.processes.pop(name).wait(110)
    assert code == 0, f"{name} ended with {code}:\n{made.log(name)[-2000:]}"
    return time.monotonic() - begun


class GuardedRedis(RedisServer):
    """Redis with a password, as in ElastiCache."""

    def __init__(self, folder: Path, password: str) -> None:
        super().__init__(folder)
        self._password = password

    def command(self) -> list[str]:
        return [*super().command(), "--requirepass", self._password]

    def is_ready(self) -> bool:
        from tests.servers.process import answers

        return answers(self.port, b"PING\r\n", b"-NOAUTH")

    def __enter__(self) -> GuardedRedis:
        self.start()
        return self


class TlsFront(ThreadingTCPServer):
    """A TLS proxy before Valkey: no Valkey on the package index supports TLS."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, certificate: Path, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Tunnel)
        self.port = port
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate)


class _Tunnel(BaseRequestHandler):
    def handle(self) -> None:
        import selectors
        import socket

        front = self.server
        assert isinstance(front, TlsFront)
        try:
            with (
                front.context.wrap_socket(self.request, server_side=True) as outer,
                socket.create_connection(("127.0.0.1", front.port)) as inner,
                selectors.DefaultSelector() as ready,
            ):
                ready.register(outer, selectors.EVENT_READ, inner)
                ready.register(inner, selectors.EVENT_READ, outer)
                while True:
                    for found, _ in ready.select():
                        source, target = found.fileobj, found.data
                        assert isinstance(source, socket.socket)
                        if not (data := source.recv(1 << 16)):
                            return
                        target.sendall(data)
                        while isinstance(source, ssl.SSLSocket) and source.pending():
                            target.sendall(source.recv(1 << 16))
        except OSError:
            return  # a peer has closed the connection


def _certificate(path: Path) -> Path:
    """Create a self-signed certificate of localhost; key and certificate are in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    unlocked = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unlocked)
    path.write_bytes(pem + signed.public_bytes(serialization.Encoding.PEM))
    return path
