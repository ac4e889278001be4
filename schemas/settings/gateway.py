"""Settings of HTTP."""

from __future__ import annotations

from base64 import b64decode
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from schemas.jobs.job_options import Amount
from schemas.requests.limits import Positive, RateLimits

BatchEvent = Literal["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]


class WebhookOptions(BaseModel):
    """An endpoint that receives a notification when a batch of its tenant has ended.

    Attributes:
        url: https://…; it may contain secrets, so it is never shown.
        secret: the key of the signatures: "whsec_" and 24 to 64 random bytes in base64.
        events: its subscriptions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr
    secret: SecretStr
    events: Annotated[tuple[BatchEvent, ...], Field(min_length=1)] = get_args(BatchEvent)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        text = url.get_secret_value()
        try:
            parts = urlsplit(text)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if (
            not good
            or "@" in parts.netloc
            or parts.fragment
            or not text.isascii()
            or not text.isprintable()
            or " " in text
        ):
            raise ValueError("give an https:// URL of printable ASCII, without user, password and fragment")
        return url

    @field_validator("secret")
    @classmethod
    def _check_secret(cls, secret: SecretStr) -> SecretStr:
        webhook_key(secret)
        return secret


def webhook_key(secret: SecretStr) -> bytes:
    """Decode a secret in the format of the Standard Webhooks specification; raises ValueError, without the secret."""
    text = secret.get_secret_value()
    try:
        key = b64decode(text.removeprefix("whsec_"), validate=True)
    except ValueError:
        key = b""
    if not text.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ValueError('give "whsec_" and 24 to 64 random bytes in base64')
    return key


class WebhooksOptions(BaseModel):
    """Settings of webhooks, which report the ends of batches.

    Attributes:
        endpoints: tenant -> its endpoints.
        allow_http: endpoints may be http://.  allow_private: they may be in a private network, or on this machine.
        timeout_seconds: of one attempt.
        give_up_after: such as "3d": an event that couldn't be delivered for so long is discarded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoints: dict[str, tuple[WebhookOptions, ...]] = Field(default_factory=dict)
    allow_http: bool = False
    allow_private: bool = False
    timeout_seconds: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = 10.0
    give_up_after: Amount = timedelta(days=3)

    @model_validator(mode="after")
    def _check_schemes(self) -> WebhooksOptions:
        urls = (one.url.get_secret_value() for endpoints in self.endpoints.values() for one in endpoints)
        if not self.allow_http and any(not url.startswith("https://") for url in urls):
            raise ValueError("an endpoint is not https://; correct it, or set allow_http")
        return self


class GatewayOptions(BaseModel):
    """Settings of HTTP.

    Attributes:
        auth: when API keys are required. "auto": as soon as one exists; "keys": always; "off": never.
        max_upload_bytes: of an uploaded file.
        max_concurrent_uploads: of a gateway, at most half of them by one tenant; further ones are refused.
        max_body_bytes: of any other request.
        max_buffered_body_bytes: of all bodies that are being read, and of messages over WebSockets, at most half of
            them by one tenant; further ones are refused. At least twice max_body_bytes.
        max_message_bytes: of a message over a WebSocket; at most that of a body. Larger requests need HTTP.
        max_websockets: most open ones of a gateway.  max_tenant_websockets: of one tenant; further ones are refused.
        idle_seconds: time-out of a sender that is silent in the middle of a request.
        request_timeout_seconds: time-out of a request to a model; a request may set an earlier one.
        drain_seconds: time for running requests to end after the stop signal.
        keep_alive_seconds: idle time of a connection between two requests; a proxy in front should have a shorter one.
        max_concurrent_requests: of a gateway; further ones are refused.
        max_stream_buffer_bytes: of one stream; a reader that falls further behind gets an error.
        max_unsent_bytes: bytes of an answer that wait in the kernel, beyond those in flight.
        write_timeout_seconds: time-out of a client that reads nothing of an answer.
        hosts: host names, without ports, that a gateway without keys accepts, besides localhost, its own listening
            address, and IP addresses.
        tls_certificate, tls_key: PEM files; both or none.
        tenant_limits: of each tenant, over all of its keys.  tenants: tenant -> its own limits, in place of these.
        key_limits: of each key without its own.
        default_limits: "auto": a tenant with API keys for which neither it nor its key has a limit of running requests
            or rows gets a limit of rows: `default_rows_per_worker` for each live worker. It may store 100 GiB and
            100,000 files, unless it or its key has other limits. "off": no default limits.
        default_rows_per_worker: None: half of the worker's batch; 64 until it has loaded a model.
        webhooks: notifications of ended batches.  cache: of responses.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    auth: Literal["auto", "keys", "off"] = "auto"
    max_upload_bytes: Positive = 2 << 30
    max_concurrent_uploads: Positive = 8
    max_body_bytes: Positive = 10 << 20
    max_buffered_body_bytes: Positive = 1 << 30
    max_message_bytes: Positive = 1 << 20
    max_websockets: Positive = 1_000
    max_tenant_websockets: Positive = 200
    idle_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    request_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    drain_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 25.0
    keep_alive_seconds: Positive = 75
    max_concurrent_requests: Positive = 2_000
    max_stream_buffer_bytes: Positive = 1 << 20
    max_unsent_bytes: Positive = 64 << 10
    write_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    hosts: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tenant_limits: RateLimits = RateLimits()
    tenants: dict[str, RateLimits] = Field(default_factory=dict)
    key_limits: RateLimits = RateLimits()
    default_limits: Literal["auto", "off"] = "auto"
    default_rows_per_worker: Positive | None = None
    webhooks: WebhooksOptions = WebhooksOptions()

    @model_validator(mode="after")
    def _both(self) -> GatewayOptions:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together; set both")
        if self.max_buffered_body_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_buffered_body_bytes is {self.max_buffered_body_bytes}, but a tenant has half of it, and one body "
                f"may have {self.max_body_bytes} bytes (max_body_bytes); set at least {2 * self.max_body_bytes}"
            )
        return self
