"""Redis over TLS: an unauthenticated server receives no data, and above all no password."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
from celery import Celery
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from pipeline.adapters.celery.shard_queue import CeleryQueue, CeleryQueueSettings
from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.redis.heartbeats import RedisHeartbeats
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ingest.celery.ingest_worker import CeleryIngestSettings, make_app
from pipeline.ingest.celery.tasks import CeleryTasks
from pipeline.ingest.intake import Intake
from pipeline.inputs.open import pin_uri
from pipeline.ports import ShardTask, World
from pipeline.runtime.availability import ServiceUnavailable


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of "localhost", signed by itself; key and certificate in one file."""
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
    path = tmp_path / "localhost.pem"
    unlocked = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unlocked)
    path.write_bytes(pem + signed.public_bytes(serialization.Encoding.PEM))
    return path


class Listener(ThreadingTCPServer):
    """A TLS server that answers every command with an error, and records the received bytes."""

    daemon_threads = True

    def __init__(self, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.received = b""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate)


class Answer(BaseRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, Listener)
        try:
            with server.context.wrap_socket(self.request, server_side=True) as connection:
                while data := connection.recv(4096):
                    server.received += data
                    connection.sendall(b"-ERR received\r\n")
        except OSError:
            return  # the client doesn't trust it, which is the point


@pytest.fixture
def listener(certificate: Path) -> Iterator[Listener]:
    with Listener(certificate) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


Send = Callable[[str], object]
CLIENTS: dict[str, Send] = {
    "queue": lambda url: CeleryQueue(CeleryQueueSettings(url, timeout_seconds=1.0), SystemClock()).put(
        "q", ShardTask("j", 1)
    ),
    "heartbeats": lambda url: RedisHeartbeats(RedisSettings(url), 1.0).workers(),
}


@pytest.mark.parametrize("send", CLIENTS.values(), ids=CLIENTS)
def test_a_server_with_an_untrusted_certificate_receives_nothing(listener: Listener, send: Send) -> None:
    with pytest.raises(ServiceUnavailable, match=r"(?i)certificate"):
        send(f"rediss://me:s3cret@localhost:{listener.server_address[1]}/0")
    assert listener.received == b""


@pytest.mark.parametrize("send", CLIENTS.values(), ids=CLIENTS)
def test_a_server_with_a_trusted_certificate_receives_a_login(
    listener: Listener, certificate: Path, send: Send
) -> None:
    with pytest.raises(ServiceUnavailable):  # it is no Redis
        send(f"rediss://me:s3cret@localhost:{listener.server_address[1]}/0?ssl_ca_certs={certificate}")
    assert b"AUTH" in listener.received


def reach_broker(app: Celery) -> None:
    with app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=1.0)


def reach_backend(app: Celery) -> None:
    app.backend.client.ping()


@pytest.mark.parametrize("reach", [reach_broker, reach_backend])
@pytest.mark.slow
def test_celery_ingest_sends_an_untrusted_server_nothing_either(
    listener: Listener, certificate: Path, world: World, reach: Callable[[Celery], None]
) -> None:
    broker_url = f"rediss://me:s3cret@localhost:{listener.server_address[1]}/0"
    tasks = CeleryTasks(world, Intake(world), pin_uri)

    def app(url: str) -> Celery:
        return make_app(tasks, "q", "default", CeleryIngestSettings(url, timeout_seconds=1.0), SystemRandomness())

    with pytest.raises((OperationalError, RedisError), match=r"(?i)certificate"):
        reach(app(broker_url))
    assert listener.received == b""
    with pytest.raises((OperationalError, RedisError)):  # it is no Redis
        reach(app(f"{broker_url}?ssl_ca_certs={certificate}"))
    assert b"AUTH" in listener.received
