"""Refusals of S3 in one line: what, where, what to do, and never a secret."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from pipeline.adapters.s3.url import split_url
from pipeline.ports import StoreError
from tests.pipeline.s3_stores import open_s3, settings_for
from tests.servers.faulty_http import FaultyHttp
from tests.servers.moto import MotoServer
from tests.servers.process import free_port
from tests.servers.seaweedfs import SeaweedServer

SECRET = "hush-hush-hush"


def refusal(open_it: Callable[[], object]) -> str:
    """The error's one line."""
    with pytest.raises(StoreError) as caught:
        open_it()
    message = str(caught.value)
    assert "\n" not in message
    assert SECRET not in message
    return message


@pytest.mark.slow
def test_a_bucket_that_is_not_there(s3_server: MotoServer, tmp_path: Path) -> None:
    for read_only in (False, True):
        connection = S3Connection(settings_for(s3_server, tmp_path))
        message = refusal(lambda: S3Store("no-such-bucket", "a", connection, read_only=read_only))  # noqa: B023
        assert message.startswith("s3://no-such-bucket/a/")
        assert message.endswith(" it: there is no such bucket; create it or correct the URL")


def test_missing_credentials(
    s3_server: MotoServer, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    message = refusal(lambda: open_s3(s3_server, bucket, "", tmp_path, access_key=None, secret_key=None))
    assert ": can't create it: no credentials were found; set AWS_ACCESS_KEY_ID and" in message


@pytest.mark.slow
def test_credentials_that_the_server_does_not_know(
    durable_s3_server: SeaweedServer, unique_name: Callable[[], str], tmp_path: Path
) -> None:
    server = durable_s3_server
    bucket = server.make_bucket(unique_name())
    message = refusal(lambda: open_s3(server, bucket, "", tmp_path, access_key="unknown", secret_key=SECRET))
    assert message.endswith("the server does not know the access key; correct the credentials")
    message = refusal(lambda: open_s3(server, bucket, "", tmp_path, secret_key=SECRET))
    assert message.endswith("the secret key does not fit the access key; correct the credentials")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "AccessDenied", "access is denied; allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket"),
        (400, "ExpiredToken", "the credentials have expired; renew them"),
        (403, "RequestTimeTooSkewed", "this machine's clock is wrong; set it"),
        (400, "KMS.NotFoundException", "there is no such KMS key; correct it, or leave encryption to the bucket"),
        (501, "NotImplemented", "the server cannot do that; use S3 or a server that can"),
        (418, "Teapot", r"refused it \(Teapot, 418: injected fault\); see what it says"),
        (503, "SlowDown", r"was busy or failing \(SlowDown, 503\) for 0.2 s; try again later"),
    ],
)
@pytest.mark.slow
def test_what_the_server_says_in_plain_words(
    proxy: FaultyHttp, s3_server: MotoServer, bucket: str, tmp_path: Path, status: int, code: str, said: str
) -> None:
    store = open_s3(s3_server, bucket, "root", tmp_path, endpoint=proxy.endpoint, retry_timeout_seconds=0.2)
    proxy.add("status", status=status, code=code)
    for what, call in (("create", lambda: store.create("k", b"")), ("read", lambda: store.read("k"))):
        with pytest.raises(StoreError, match=rf"^s3://{bucket}/root/k: can't {what} it: .*{said}"):
            call()


def test_a_refusal_to_a_request_that_gets_no_words(
    proxy: FaultyHttp, s3_server: MotoServer, bucket: str, tmp_path: Path
) -> None:
    """S3 answers HEAD without a body, and "denied" instead of "missing" to who may not list."""
    store = open_s3(s3_server, bucket, "", tmp_path, endpoint=proxy.endpoint)
    proxy.add("status", method="HEAD", status=403)
    with pytest.raises(StoreError, match=r"can't look at it: access is denied; .*s3:ListBucket"):
        store.info("key")


def test_a_server_out_of_reach(s3_server: MotoServer, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    message = refusal(
        lambda: open_s3(s3_server, "bucket", "", tmp_path, endpoint=endpoint, opening_retry_timeout_seconds=0.1)
    )
    assert f"{endpoint} could not be reached" in message
    assert message.endswith("for 0.1 s; check the endpoint and the network")


@pytest.mark.slow
def test_a_server_that_does_not_answer(s3_server: MotoServer, bucket: str, tmp_path: Path) -> None:
    store = open_s3(s3_server, bucket, "", tmp_path, read_seconds=0.2, retry_timeout_seconds=0.1)
    s3_server.pause()
    with pytest.raises(StoreError, match=r"did not answer in 0\.2 s for 0\.1 s; try again later"):
        store.read("key")
    s3_server.resume()
    assert store.info("key") is None


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"endpoint": f"https://me:{SECRET}@host"}, "the endpoint holds credentials"),
        ({"endpoint": "localhost:9000"}, "is no URL such as https://s3.example.com:9000"),
        ({"access_key": "me"}, "access key and secret key go together"),
        ({"secret_key": SECRET}, "access key and secret key go together"),
        ({"kms_key": "k"}, "a KMS key is given, but encryption is not aws:kms"),
        ({"part_bytes": 1}, "at least 5242880 bytes"),
        ({"read_bytes": 0}, "are at least 1"),
        ({"read_seconds": 0.0}, "are above 0"),
    ],
)
def test_settings_that_make_no_sense(facts: dict[str, object], said: str) -> None:
    assert said in refusal(lambda: S3Settings(**facts))  # type: ignore[arg-type]


def test_secrets_are_never_shown(
    s3_server: MotoServer, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = settings_for(s3_server, tmp_path, access_key="AKME", secret_key=SECRET, session_token=SECRET + "2")
    assert SECRET not in repr(settings)
    assert "AKME" not in repr(settings)
    store = S3Store.from_url(f"s3://{bucket}/x", settings)
    store.create("key", b"1")
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://bucket/a/b c?d#e%20.jsonl", ("bucket", "a/b c?d#e%20.jsonl")),
        ("s3://my.bucket-1/x@y", ("my.bucket-1", "x@y")),
    ],
)
def test_a_url_is_taken_as_it_stands(url: str, found: tuple[str, str]) -> None:
    assert split_url(url) == found


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{SECRET}@bucket/in.jsonl",
        f"s3://bucket/in.jsonl?X-Amz-Credential=k&X-Amz-Signature={SECRET}",
        f"https://bucket.s3.amazonaws.com/in.jsonl?AWSAccessKeyId=k&Signature={SECRET}",
    ],
)
def test_a_url_that_carries_a_secret_is_refused_and_not_repeated(url: str) -> None:
    message = refusal(lambda: split_url(url))
    assert "carries credentials or a signature; give plain s3://bucket/key" in message
    assert "in.jsonl" in message


@pytest.mark.parametrize("url", ["bucket/key", "https://host/key", "s3:/bucket/key", "s3://", "s3:///key", "s3://a/b"])
def test_what_is_no_s3_url_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match=r"give (one|a URL) such as s3://bucket/key"):
        split_url(url)
