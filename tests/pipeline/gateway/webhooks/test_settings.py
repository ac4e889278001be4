"""Settings of webhooks: invalid ones are refused, and secrets are hidden."""

from __future__ import annotations

import pytest

from schemas.settings.settings import InvalidSettingsError, load_settings
from tests.pipeline.gateway.webhooks.webhook_tools import SECRET, endpoint


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
def test_invalid_settings_are_refused_without_showing_secrets(url: str, secret: str, why: str) -> None:
    with pytest.raises(InvalidSettingsError, match=why) as error:
        load_settings(gateway={"webhooks": {"endpoints": {"a": [{"url": url, "secret": secret}]}}})
    assert "hunter2" not in str(error.value)
    assert SECRET not in str(error.value)


def test_settings_hide_secrets() -> None:
    webhooks = {"endpoints": {"a": [{"url": "http://a.example/hunter2", "secret": SECRET}]}, "allow_http": True}
    shown = repr(load_settings(gateway={"webhooks": webhooks}))
    assert "hunter2" not in shown
    assert SECRET not in shown
    assert "hunter2" not in repr(endpoint("http://a.example/hunter2"))
