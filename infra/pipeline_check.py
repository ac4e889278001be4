"""Runs our processes with exactly what `terraform apply` gives their containers, and looks whether the pipeline works.

A process gets the command and the variables of its container, and the values of its secrets, read as ECS reads them.
What can't be the same on one machine is replaced, and told: see `Installation.help`.
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
from tests.cluster.null_worker import Answers
from tests.servers.instance_metadata import MetadataServer
from tests.servers.process import free_port
from tests.servers.redis import RedisServer
from tests.waiting import wait_for

ROOT: Final = Path(__file__).parents[1]
SECONDS: Final = 180.0
ROWS: Final = 500


@dataclass
class Installation:
    """What was applied, as processes of this machine.

    Attributes:
        outputs: of the Terraform root.  helped: what was replaced, and by what, without secrets.
    """

    aws: LocalAws
    outputs: Mapping[str, Any]
    folder: Path
    redis_address: str
    certificate: Path
    metadata: MetadataServer
    helped: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start the process as its container would be."""
        described = self.outputs["processes"][name]
        given = self._secrets(described["secrets"]) | dict(described["environment"])
        variables = given | self.help(name, given)
        command = list(described["command"])
        # A model that costs nothing; all around it is real.
        program = [*NULL_WORKER, *command[1:]] if command[0] == "worker" else ["-m", "tokenmill", *command]
        if command[0] == "gateway":
            self.ports[name] = free_port()
            program = [*program[:-1], str(self.ports[name])]
            self.helped["--port 8000"] = "one that is free"
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *program], stdout=log, stderr=log, cwd=self.folder, env=variables
            )

    def help(self, name: str, given: Mapping[str, str]) -> dict[str, str]:
        """What this machine needs that AWS doesn't: addresses, credentials, folders."""
        token = urlsplit(given["TOKENMILL_REDIS_URL"])
        replaced = {
            "AWS_ENDPOINT_URL": self.aws.endpoint,
            "TOKENMILL_S3__ENDPOINT": self.aws.endpoint,
            "AWS_ACCESS_KEY_ID": name,
            "AWS_SECRET_ACCESS_KEY": "testtest",
            "TOKENMILL_REDIS_URL": (
                f"{token.scheme}://:{token.password}@{self.redis_address}/0?ssl_ca_certs={self.certificate}"
            ),
        }
        if "TOKENMILL_METRICS__PORT" in given:  # containers have one each of their own
            self.ports[name] = free_port()
            replaced["TOKENMILL_METRICS__PORT"] = str(self.ports[name])
        if name.startswith("worker"):
            replaced |= {
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.metadata.endpoint,
                "TOKENMILL_MODEL_CACHE": str(self.folder / "cache"),
                "XDG_CACHE_HOME": str(self.folder / "cache"),
                "TRITON_CACHE_DIR": str(self.folder / "cache"),
                "TOKENMILL_NATIVE_CACHE": str(self.folder / "cache"),
            }
        self.helped |= dict.fromkeys(replaced, "for this machine")
        self.helped["TOKENMILL_REDIS_URL"] = "the token of the secret, at a Valkey of this machine behind TLS"
        here = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return here | replaced

    def _secrets(self, arns: Mapping[str, str]) -> dict[str, str]:
        client = self.aws.client("secretsmanager")
        return {name: str(client.get_secret_value(SecretId=arn)["SecretString"]) for name, arn in arns.items()}

    @property
    def bucket(self) -> str:
        return str(self.outputs["root"]).removeprefix("s3://")

    def is_well(self, name: str) -> bool:
        """What the container's health check says."""
        _, *command = self.outputs["processes"][name]["health"]
        program = re.sub(r":\d+/", f":{self.ports[name]}/", command[-1])
        asked = [sys.executable, *command[1:-1], program]
        return subprocess.run(asked, capture_output=True, check=False, timeout=30).returncode == 0

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def running(self) -> None:
        """Raises `RuntimeError` when a process has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{self.log(name)[-3000:]}")

    def wait(self, what: Callable[[], Any], why: str) -> Any:
        """Its first true value, while all processes run."""

        def look() -> Any:
            self.running()
            return what()

        return wait_for(look, why)

    def keys(self, prefix: str) -> list[str]:
        """Names of the bucket's objects below the prefix."""
        pages = self.aws.client("s3").get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def outcomes(self) -> list[str]:
        """Ids of the jobs that have ended."""
        return [key.split("/")[1] for key in self.keys("jobs/") if key.endswith("/manifest.json")]

    def listed(self, place: str, since: int = 0) -> bool:
        """Whether an intake has looked for drops there by listing, after the first `since` requests."""
        return any(
            asked.key == "intake" and asked.service == "s3" and asked.query.get("prefix", [""])[0].startswith(place)
            for asked in self.aws.asked[since:]
            if not asked.path.strip("/").partition("/")[2]
        )

    def stop_all(self) -> dict[str, tuple[int, float, float]]:
        """Each by `stop`."""
        return {name: self.stop(name) for name in list(self.processes)}

    def stop(self, name: str) -> tuple[int, float, float]:
        """Tell it to end, as ECS does; exit code, seconds that it took, and that it may take."""
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
    """What was applied, ready to be started; ends all of it."""
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
    """A file of requests, and their bodies."""
    bodies = [{"model": model, "prompt": f"Row {row} of many. Say so.", "max_tokens": 16} for row in range(ROWS)]
    lines = [
        json.dumps({"custom_id": f"r{row}", "method": "POST", "url": "/v1/completions", "body": body})
        for row, body in enumerate(bodies)
    ]
    return "\n".join(lines).encode(), bodies


def check_results(made: Installation, job: str, texts: list[str]) -> None:
    """The job's Parquet has each row once, with the text that anybody can work out. Raises `AssertionError`."""
    s3 = made.aws.client("s3")
    parts = [key for key in made.keys(f"jobs/{job}/results/") if key.endswith(".parquet")]
    read = (s3.get_object(Bucket=made.bucket, Key=key)["Body"].read() for key in parts)
    table = pa.concat_tables([pq.read_table(io.BytesIO(data)) for data in read]).sort_by("row")
    assert table["row"].to_pylist() == list(range(len(texts))), "rows are missing, or twice"
    assert set(table["status"].to_pylist()) == {"succeeded"}, set(table["status"].to_pylist())
    assert table["text"].to_pylist() == texts, "texts are wrong"


def drop_a_file(made: Installation, model: Path, name: str, place: str) -> str:
    """A file dropped into the bucket: notification, job, Parquet. Returns the job's id. Raises `AssertionError`."""
    data, bodies = requests(name)
    before = len(made.aws.asked)
    made.aws.client("s3").put_object(Bucket=made.bucket, Key=f"{place}rows.jsonl", Body=data)
    job = str(made.wait(made.outcomes, "the job did not end")[0])
    check_results(made, job, Answers(model).texts(bodies))
    messages = [asked for asked in made.aws.asked[before:] if asked.key == "intake" and asked.service == "sqs"]
    assert any(asked.target.endswith("DeleteMessage") for asked in messages), "no message came over the queue"
    assert not made.listed(place, since=before), "a listing may have found it before the queue told of it"
    return job


def wake_from_none(made: Installation, model: Path, name: str, place: str, worker: str) -> tuple[float, int]:
    """A file dropped while no worker lives: the workers that CloudWatch is told to be wished for, and how many the
    applied policy starts for that; one is started, and does it. Raises `AssertionError`."""
    code, _, _ = made.stop(worker)
    assert code == 0, f"{worker} ended with {code}"
    data, bodies = requests(name)
    ended = set(made.outcomes())
    made.aws.client("s3").put_object(Bucket=made.bucket, Key=f"{place}later.jsonl", Body=data)
    wished = float(made.wait(lambda: workers_were_wished_for(made, name), "CloudWatch was told of no wish"))
    made.start(worker)
    (job,) = made.wait(lambda: set(made.outcomes()) - ended, "the job did not end")
    check_results(made, str(job), Answers(model).texts(bodies))
    return wished, workers_for(made, wished)


def workers_for(made: Installation, wished: float) -> int:
    """What the applied step policy sets, for so many workers above its alarm's threshold of none."""
    policies = made.aws.moto.client("application-autoscaling").describe_scaling_policies(ServiceNamespace="ecs")
    (policy,) = (one for one in policies["ScalingPolicies"] if one["PolicyName"].endswith("-work"))
    configuration = policy["StepScalingPolicyConfiguration"]
    assert configuration["AdjustmentType"] == "ExactCapacity", configuration
    return next(
        int(step["ScalingAdjustment"])
        for step in configuration["StepAdjustments"]
        if step["MetricIntervalLowerBound"] <= wished < step.get("MetricIntervalUpperBound", math.inf)
    )


def workers_were_wished_for(made: Installation, model: str) -> float:
    """The most workers of the model's pool that CloudWatch heard of; 0: of none."""
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
    """Let the metadata service say that the instance goes; seconds until the worker has ended in order."""
    notice = '{"action": "terminate", "time": "2030-01-01T10:00:00Z"}'
    made.metadata.notices = [(200, notice)]
    begun = time.monotonic()
    code = made.processes.pop(name).wait(110)
    assert code == 0, f"{name} ended with {code}:\n{made.log(name)[-2000:]}"
    return time.monotonic() - begun


class GuardedRedis(RedisServer):
    """With a password, as ElastiCache has one."""

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
    """TLS before a server that has none: no Valkey that can be had from the package index speaks it."""

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
            return  # whoever hung up has nothing more to say


def _certificate(path: Path) -> Path:
    """Of localhost, signed by itself; key and certificate in one file."""
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
