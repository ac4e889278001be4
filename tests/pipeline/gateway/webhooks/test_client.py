"""The webhook sender: signatures, time-outs, and no requests to private networks."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import SecretStr

from pipeline.gateway.webhooks.client import NotDelivered, Sender, is_public
from pipeline.gateway.webhooks.signature import signature_headers
from schemas.settings.gateway import webhook_key
from tests.pipeline.gateway.webhooks.receiver import Receiver
from tests.pipeline.gateway.webhooks.webhook_tools import endpoint

PRIVATE = (
    "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 "
    "255.255.255.255 ::1 :: fe80::1 fe80::1%eth0 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 "
    "64:ff9b::7f00:1 2002:7f00:1:: 2001:0:7f00:1:: ::7f00:1 fec0::1 64:ff9b:1::1 "
    "192.88.99.1 ::ffff:192.88.99.1 64:ff9b::c058:6301 3fff::1 3fff:fff::1 "
)


def test_the_signature_matches_the_specifications_example() -> None:
    """The example of the Standard Webhooks libraries' own tests."""
    key = webhook_key(SecretStr("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"))
    at = datetime.fromtimestamp(1614265330, UTC)
    headers = signature_headers(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", at, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_private_addresses_are_not_public() -> None:
    assert [one for one in PRIVATE.split() if is_public(one)] == []
    public = "8.8.8.8 1.1.1.1 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808"
    assert [one for one in public.split() if not is_public(one)] == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "0"])
def test_private_networks_are_not_contacted(receiver: Receiver, host: str) -> None:
    with pytest.raises(NotDelivered, match="private network"):
        asyncio.run(Sender().post(endpoint(receiver.url(host=host)), {}, b"{}"))
    assert not receiver.received
    assert asyncio.run(Sender(allow_private=True).post(endpoint(receiver.url()), {}, b"{}")) == 200


@pytest.mark.slow
def test_a_failed_delivery_has_a_reason_within_the_time_out(receiver: Receiver) -> None:
    def why(url: str) -> str:
        with pytest.raises(NotDelivered) as error:
            asyncio.run(Sender(0.5, allow_private=True).post(endpoint(url), {}, b"{}"))
        return str(error.value)

    url = receiver.url()
    receiver.slow = 1.0
    assert why(url) == "no answer within 0.5 s"
    receiver.kill()
    assert "can't be reached" in why(url)
    with _drips() as port:
        assert why(f"http://127.0.0.1:{port}/") == "no answer within 0.5 s", "one byte now and then is no answer"


@contextmanager
def _drips() -> Iterator[int]:
    """A server that never comes to the end of its answer."""
    import socket  # noqa: PLC0415

    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.05)
        except OSError:
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.getsockname()[1]
    server.close()
    thread.join()


def test_the_receivers_tls_certificate_is_verified(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path, "localhost")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    receiver = Receiver(serving)
    trusting = ssl.create_default_context(cafile=str(certificate))

    def post(host: str, context: ssl.SSLContext | None) -> int:
        sender = Sender(allow_private=True, context=context)
        return asyncio.run(sender.post(endpoint(receiver.url(host=host)), {}, b"{}"))

    assert post("localhost", trusting) == 200
    for host, context in (("127.0.0.1", trusting), ("localhost", None)):
        with pytest.raises(NotDelivered, match="can't be reached"):
            post(host, context)
    assert len(receiver.received) == 1
    receiver.kill()


def _certificate(folder: Path, name: str) -> tuple[Path, Path]:
    private, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(private.public_key())
        .serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(private, hashes.SHA256())
    )  # fmt: skip
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return certificate, key
