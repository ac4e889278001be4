"""URLs in messages: enough to find the server, nothing to get in."""

from __future__ import annotations

import pytest

from pipeline.runtime.availability import redacted


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:s3cret@host:6379/1", "redis://host:6379/1"),
        ("rediss://me:s3cret@host/0?ssl_ca_certs=/x&password=s3cret", "rediss://host/0"),
        ("redis://me:s3/cr?e#t@et@host/0", "redis://host/0"),
        ("amqp://a:s3cret@one//;amqp://b:s3cret@two//", "amqp://one//;amqp://two//"),
        ("sqs://KEY:s3cret@", "sqs://"),
        ("s3cret", "(a URL without a scheme)"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert redacted(url) == shown
