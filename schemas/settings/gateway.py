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
    """An endpoint that is told when a batch of its tenant has ended.

    Attributes:
        url: https://…; it may hold what only the receiver knows, so it is shown nowhere.
        secret: the key of the signatures: "whsec_" and 24 to 64 random bytes in base64.
        events: that it wants.
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
    """The bytes of a secret as the Standard Webhooks specification writes it; raises ValueError, without it."""
    text = secret.get_secret_value()
    try:
        key = b64decode(text.removeprefix("whsec_"), validate=True)
    except ValueError:
        key = b""
    if not text.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ValueError('give "whsec_" and 24 to 64 random bytes in base64')
    return key


class WebhooksOptions(BaseModel):
    """Who is told when batches have ended.

    Attributes:
        endpoints: tenant -> its endpoints.
        allow_http: endpoints may be http://.  allow_private: they may be in a private network, or on this machine.
        timeout_seconds: of one try.
        give_up_after: such as "3d": an event that couldn't be told for so long is dropped.
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


class CacheOptions(BaseModel):
    """Answers that are given again to the same request, where it asks for that (`tokenmill: {"cache": true}`).

    Attributes:
        always: also where it says nothing, as far as its answer is always the same.
        keep: an amount of time, such as "1h".
        entries: of each tenant.  entry_bytes: of the largest.
        memory_bytes: of all of them, where there is no Redis.  tenant_bytes: of each tenant's, on Redis.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    always: bool = False
    keep: Amount = timedelta(hours=1)
    entries: Positive = 10_000
    entry_bytes: Annotated[int, Field(ge=1, le=1 << 19, strict=False)] = 1 << 18
    memory_bytes: Positive = 256 << 20
    tenant_bytes: Positive = 64 << 20


class GatewayOptions(BaseModel):
    """How HTTP is served.

    Attributes:
        auth: when API keys are needed. "auto": as soon as there is one; "keys": always; "off": never.
        max_upload_bytes: of an uploaded file.  uploads_at_once: by one gateway, half of them of one tenant;
            further ones are refused.
        max_body_bytes: of any other request.  bodies_at_once: bytes of those that are being read, and of messages over
            WebSockets, of all together, half of them of one tenant; further ones are refused. At least twice
            max_body_bytes.
        max_message_bytes: of a message over a WebSocket; no more than of a body. Larger requests go over HTTP.
        max_websockets: open at one gateway.  max_tenant_websockets: of them, of one tenant; further ones are refused.
        idle_seconds: a sender that is silent for so long in the middle of a request is not waited for.
        request_seconds: after which a request to a model is given up, or earlier if it says so.
        drain_seconds: that requests have to come to their end when the gateway is told to stop.
        keep_alive_seconds: for which a connection may idle between two requests; a proxy in front should give up
            earlier.
        requests_at_once: by one gateway; further ones are refused.
        stream_bytes: of a stream, that wait for its reader; one that lets more pile up ends with an error.
        unsent_bytes: of any answer, that wait in the kernel beyond what is on its way.
        write_seconds: who takes nothing of an answer for so long is cut off.
        hosts: names, without ports, by which a gateway that needs no keys may be asked, besides localhost, the one that
            it listens at, and addresses.
        tls_certificate, tls_key: PEM files; both or none.
        tenant_limits: of each tenant, over all of its keys.  tenants: tenant -> its own, in place of these.
        key_limits: of each key that brings none of its own.
        default_limits: "auto": a tenant with API keys for which neither it nor its key has a limit of running requests
            rows has one of rows: `default_rows_per_worker` for each live worker. It may store 100 GiB and 100,000
            files, unless it or its key has other limits. "off": none of this holds.
        default_rows_per_worker: None: half of the batch where one process does everything, else 64.
        webhooks: who is told when batches have ended.  cache: of answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    auth: Literal["auto", "keys", "off"] = "auto"
    max_upload_bytes: Positive = 2 << 30
    uploads_at_once: Positive = 8
    max_body_bytes: Positive = 10 << 20
    bodies_at_once: Positive = 1 << 30
    max_message_bytes: Positive = 1 << 20
    max_websockets: Positive = 1_000
    max_tenant_websockets: Positive = 200
    idle_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    request_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    drain_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 25.0
    keep_alive_seconds: Positive = 75
    requests_at_once: Positive = 2_000
    stream_bytes: Positive = 1 << 20
    unsent_bytes: Positive = 64 << 10
    write_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    hosts: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tenant_limits: RateLimits = RateLimits()
    tenants: dict[str, RateLimits] = Field(default_factory=dict)
    key_limits: RateLimits = RateLimits()
    default_limits: Literal["auto", "off"] = "auto"
    default_rows_per_worker: Positive | None = None
    webhooks: WebhooksOptions = WebhooksOptions()
    cache: CacheOptions = CacheOptions()

    @model_validator(mode="after")
    def _both(self) -> GatewayOptions:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together; set both")
        if self.bodies_at_once < 2 * self.max_body_bytes:
            raise ValueError(
                f"bodies_at_once is {self.bodies_at_once}, but a tenant has half of it, and one body may have "
                f"{self.max_body_bytes} bytes (max_body_bytes); set at least {2 * self.max_body_bytes}"
            )
        return self
