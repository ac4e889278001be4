"""Webhooks: every end of a batch is told at least once, signed, and nowhere else than where it should be."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from openai import OpenAI
from structlog.testing import capture_logs

from pipeline.gateway.webhook_sending import Endpoint, NotDelivered, Sender, is_public, signature_headers
from pipeline.gateway.webhooks import Notifier, NotifierSettings, endpoint_id, event_id
from pipeline.intake import IntakeSettings
from pipeline.notices import DUE, WANTED, Due, Wanted, want_notice
from pipeline.ports import World
from schemas.gateway_options import webhook_key
from schemas.settings import InvalidSettingsError, load_settings
from tests.pipeline.gateway.http_house import HttpHouse, http_house, lines
from tests.pipeline.gateway.receiver import Receiver
from tests.pipeline.simulation import MemoryStore

KEY = bytes(range(32))
SECRET = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
ALL = frozenset({"batch.completed", "batch.failed", "batch.expired", "batch.cancelled"})
HASTY = NotifierSettings(every=0.02, first=0.1, growth=0.1)
Waits = Callable[[Callable[[], Any], str], Any]


def until(what: Callable[[], Any], why: str, seconds: float = 10.0) -> Any:
    limit = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < limit, why
        time.sleep(0.01)
    return value


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.kill()


def endpoint(url: str, tenant: str = "default", events: frozenset[str] = ALL) -> Endpoint:
    return Endpoint(endpoint_id(tenant, url), tenant, url, KEY, events)


@contextmanager
def telling(
    world: World, *endpoints: Endpoint, settings: NotifierSettings = HASTY, timeout: float = 2.0
) -> Iterator[None]:
    """A notifier that works, until the block ends."""
    stop = threading.Event()
    notifier = Notifier(world, endpoints, Sender(timeout, allow_private=True), settings)
    thread = threading.Thread(target=notifier.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[HttpHouse]:
    with http_house(tmp_path, intake=IntakeSettings(noticed=frozenset({"default"}))) as house:
        yield house


def submit(house: HttpHouse, count: int = 3, data: bytes | None = None, **more: Any) -> Any:
    client = house.client()
    file = client.files.create(file=("a.jsonl", lines(count) if data is None else data), purpose="batch")
    wanted: Any = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
    return client.batches.create(**wanted)


def due(world: World) -> list[str]:
    return [info.key for prefix in (WANTED, DUE) for info in world.store.list(prefix)]


def test_openais_client_reads_the_end_of_a_batch(house: HttpHouse, receiver: Receiver) -> None:
    with telling(house.world, endpoint(receiver.url("/hook?token=1"))):
        batch = submit(house)
        until(lambda: receiver.received, "nothing was told")
        until(lambda: not due(house.world), "what was told stays due")
    (told,) = receiver.received
    event = OpenAI(api_key="x", webhook_secret=SECRET).webhooks.unwrap(told.body, told.headers)
    assert (event.type, event.object) == ("batch.completed", "event")
    assert isinstance(event, openai.types.webhooks.BatchCompletedWebhookEvent)
    assert event.data.id == batch.id
    assert event.id == told.headers["webhook-id"] == event_id(batch.id, "batch.completed")
    ended = house.client().batches.retrieve(batch.id)
    assert ended.output_file_id, "told when its files stand, and not before"
    assert event.created_at == ended.completed_at
    assert told.path == "/hook?token=1"
    assert told.headers["content-type"] == "application/json"
    for wrong in (told.body + b" ", told.body.replace(b"completed", b"cancelled")):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            OpenAI(api_key="x", webhook_secret=SECRET).webhooks.unwrap(wrong, told.headers)


def test_the_specifications_example_is_signed_like_this() -> None:
    """The example of the Standard Webhooks libraries' own tests."""
    key = webhook_key(_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"))
    at = datetime.fromtimestamp(1614265330, UTC)
    headers = signature_headers(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", at, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def _secret(text: str) -> Any:
    from pydantic import SecretStr  # noqa: PLC0415

    return SecretStr(text)


def test_each_way_to_end_is_told_to_whoever_wants_it(tmp_path: Path, receiver: Receiver) -> None:
    noticed = IntakeSettings(noticed=frozenset({"default"}))
    only = endpoint(receiver.url("/only"), events=frozenset({"batch.cancelled"}))
    other = endpoint(receiver.url("/other"), tenant="other")
    with (
        http_house(tmp_path, permits=0, intake=noticed) as house,
        telling(house.world, endpoint(receiver.url("/all")), only, other),
    ):
        cancelled = submit(house)
        until(lambda: house.client().batches.retrieve(cancelled.id).status == "in_progress", "it did not begin")
        house.client().batches.cancel(cancelled.id)
        until(lambda: receiver.received, "nothing was told")
        expired = submit(house)
        until(lambda: house.client().batches.retrieve(expired.id).status == "in_progress", "it did not begin")
        house.clock.ahead = 25 * 3_600
        until(lambda: len(receiver.received) >= 3, "its expiry was not told")
        failed = submit(house, data=b"no json\n")
        until(lambda: len(receiver.received) >= 4, "its failure was not told")
        until(lambda: not due(house.world), "something stays due")
    told = {(one.path, json.loads(one.body)["type"], json.loads(one.body)["data"]["id"]) for one in receiver.received}
    assert told == {
        ("/all", "batch.cancelled", cancelled.id),
        ("/only", "batch.cancelled", cancelled.id),
        ("/all", "batch.expired", expired.id),
        ("/all", "batch.failed", failed.id),
    }


def test_a_retry_is_told_too(tmp_path: Path, receiver: Receiver) -> None:
    noticed = IntakeSettings(noticed=frozenset({"default"}))
    with (
        http_house(tmp_path, permits=0, intake=noticed) as house,
        telling(house.world, endpoint(receiver.url())),
        house.http() as http,
    ):
        first = submit(house)
        house.client().batches.cancel(first.id)
        until(lambda: receiver.received, "nothing was told")
        house.permits.release(10)
        second = http.post(f"/v1/batches/{first.id}/retry").raise_for_status().json()
        until(lambda: len(receiver.received) == 2, "the retry was not told")
    told = [(json.loads(one.body)["type"], json.loads(one.body)["data"]["id"]) for one in receiver.received]
    assert told == [("batch.cancelled", first.id), ("batch.completed", second["id"])]


def test_a_dead_receiver_is_told_when_it_is_back_and_always_the_same(house: HttpHouse, receiver: Receiver) -> None:
    receiver.status = 500
    with telling(house.world, endpoint(receiver.url())):
        submit(house)
        until(lambda: len(receiver.received) >= 2, "it was not tried again")
        receiver.kill()
        time.sleep(0.3)
        receiver.status = 200
        count = len(receiver.received)
        receiver.start()
        until(lambda: len(receiver.received) > count, "it was not told when it was back")
        until(lambda: not due(house.world), "it stays due")
    assert len({(one.headers["webhook-id"], one.body) for one in receiver.received}) == 1
    last = receiver.received[-1]
    OpenAI(api_key="x", webhook_secret=SECRET).webhooks.unwrap(last.body, last.headers)
    assert abs(int(last.headers["webhook-timestamp"]) - last.at) <= 2, "the time is that of the try"


def test_whoever_dies_in_between_repeats_it_and_forgets_nothing(house: HttpHouse, receiver: Receiver) -> None:
    """Killed after each step: when the receiver has answered, when the due is written, and before anything."""
    world, told = house.world, endpoint(receiver.url())
    batch = submit(house)
    until(lambda: house.client().batches.retrieve(batch.id).status == "completed", "it did not end")
    assert due(world) == [WANTED + batch.id], "before anybody looked"
    with telling(world, told):
        until(lambda: len(receiver.received) == 1, "it was not told")
        until(lambda: not due(world), "it stays due")
    want_notice(world.store, batch.id, world.clock.now())  # as if it had died before it removed this
    with telling(world, told):
        until(lambda: len(receiver.received) == 2, "it was not told again")
        until(lambda: not due(world), "it stays due")
    kept = Due(id=event_id(batch.id, "batch.completed"), type="batch.completed", job=batch.id, at=world.clock.now())
    world.store.create(f"{DUE}{told.id}/{batch.id}", kept.to_json())  # as if it had died when it was answered
    with telling(world, told):
        until(lambda: len(receiver.received) == 3, "it was not told again")
    assert len({one.headers["webhook-id"] for one in receiver.received}) == 1


def test_an_endpoint_that_is_slow_or_dead_holds_up_nobody_else(house: HttpHouse, receiver: Receiver) -> None:
    slow, dead = Receiver(), Receiver()
    slow.slow = 1.5
    dead.kill()
    with telling(house.world, *(endpoint(one.url()) for one in (slow, dead, receiver)), timeout=1.0):
        began = time.monotonic()
        for _ in range(3):
            submit(house)
        until(lambda: len(receiver.received) == 3, "it waited for others")
        assert time.monotonic() - began < 3.0
        until(lambda: slow.received, "the slow one was left out")
        assert due(house.world)
    slow.kill()


def test_nobody_is_led_elsewhere(house: HttpHouse, receiver: Receiver) -> None:
    elsewhere = Receiver()
    receiver.status, receiver.location = 307, elsewhere.url("/stolen")
    with telling(house.world, endpoint(receiver.url())), capture_logs() as logs:
        submit(house)
        until(lambda: len(receiver.received) >= 2, "a redirect is a failure, and tried again")
    assert not elsewhere.received
    assert due(house.world)
    failed = next(log for log in logs if log["event"] == "webhook_failed")
    assert failed["reason"] == "answered 307"
    assert "/hook" not in str(failed), "where it is may be a secret"
    elsewhere.kill()


def test_what_could_not_be_told_for_days_is_given_up(world: World) -> None:
    class Nobody:
        async def post(self, endpoint: Endpoint, headers: Any, payload: bytes) -> int:
            tries.append(world.clock.now())
            raise NotDelivered("nobody is there")

    tries: list[datetime] = []
    told = endpoint("https://a.example/")
    now = world.clock.now()
    world.store.create(f"{DUE}{told.id}/job", Due(id="evt_1", type="batch.completed", job="job", at=now).to_json())
    world.store.create(f"{DUE}gone/job", Due(id="evt_1", type="batch.completed", job="job", at=now).to_json())
    world.store.create(f"{WANTED}never", Wanted(at=now).to_json())
    notifier = Notifier(world, [told], Nobody())

    async def wait() -> None:
        while due(world) and world.clock.now() < now + timedelta(days=10):
            await notifier.look()
            await notifier.settle()
            world.clock.sleep(5.0 if world.clock.now() < now + timedelta(hours=1) else 600.0)

    with capture_logs() as logs:
        asyncio.run(wait())
    assert isinstance(world.store, MemoryStore)
    assert not due(world)
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["webhook_given_up"]
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(tries)]
    assert timedelta(days=3) <= tries[-1] - now < timedelta(days=3, hours=8)
    assert gaps[0] < 20
    assert 4 * 3_600 < max(gaps) < 8 * 3_600
    assert 15 < len(tries) < 80


PRIVATE = (
    "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 "
    "255.255.255.255 ::1 :: fe80::1 fe80::1%eth0 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 "
    "64:ff9b::7f00:1 2002:7f00:1:: 2001:0:7f00:1:: ::7f00:1 fec0::1 64:ff9b:1::1 "
)


def test_private_addresses_are_known() -> None:
    assert [one for one in PRIVATE.split() if is_public(one)] == []
    public = "8.8.8.8 1.1.1.1 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808"
    assert [one for one in public.split() if not is_public(one)] == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "0"])
def test_our_own_network_is_not_asked(receiver: Receiver, host: str) -> None:
    with pytest.raises(NotDelivered, match="private network"):
        asyncio.run(Sender().post(endpoint(receiver.url(host=host)), {}, b"{}"))
    assert not receiver.received
    assert asyncio.run(Sender(allow_private=True).post(endpoint(receiver.url()), {}, b"{}")) == 200


def test_what_cant_be_told_says_why_in_time(receiver: Receiver) -> None:
    def why(url: str) -> str:
        began = time.monotonic()
        with pytest.raises(NotDelivered) as error:
            asyncio.run(Sender(0.5, allow_private=True).post(endpoint(url), {}, b"{}"))
        assert time.monotonic() - began < 3.0
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


def test_over_tls_the_receiver_must_be_who_it_says(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("url", "secret", "why"),
    [
        ("http://a.example/", SECRET, "https"),
        ("ftp://a.example/", SECRET, "https"),
        ("https://user:hunter2@a.example/", SECRET, "without user"),
        ("https:///hunter2", SECRET, "https"),
        ("https://a.example/\r\nhunter2", SECRET, "printable"),
        ("https://a.example/", "whsec_hunter2", "random bytes"),
        ("https://a.example/", SECRET.removeprefix("whsec_"), "random bytes"),
    ],
)
def test_settings_that_are_wrong_are_refused_and_not_shown(url: str, secret: str, why: str) -> None:
    with pytest.raises(InvalidSettingsError, match=why) as error:
        load_settings(gateway={"webhooks": {"endpoints": {"a": [{"url": url, "secret": secret}]}}})
    assert "hunter2" not in str(error.value)
    assert SECRET not in str(error.value)


def test_settings_show_no_secret() -> None:
    webhooks = {"endpoints": {"a": [{"url": "http://a.example/hunter2", "secret": SECRET}]}, "allow_http": True}
    shown = repr(load_settings(gateway={"webhooks": webhooks}))
    assert "hunter2" not in shown
    assert SECRET not in shown
    assert "hunter2" not in repr(endpoint("http://a.example/hunter2"))
