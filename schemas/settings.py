"""Settings of a tokenmill installation: arguments over environment over `tokenmill.toml` over defaults.

Environment variables start with TOKENMILL_, nested names are joined with two underscores
(`TOKENMILL_PLAN__SHARD_TOKENS=100000`). TOKENMILL_CONFIG names the TOML file; without it, `tokenmill.toml` in the
current folder is read when it exists.
"""

from __future__ import annotations

import os
from base64 import b64decode
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from schemas.job import Tier
from schemas.limits import Limits, PlanSettings, Positive, RateLimits
from schemas.options import Amount

CONFIG_VARIABLE = "TOKENMILL_CONFIG"
DEFAULT_CONFIG = Path("tokenmill.toml")

BatchEvent = Literal["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]
InstructionSet = Literal["auto", "avx2", "avx512", "avx512_bf16", "amx"]


def check_speculate(given: str) -> str:
    """A way to guess tokens, as it was given; raises ValueError."""
    method, _, path = given.partition(":")
    if given in ("off", "ngram", "auto") or (method in ("draft", "eagle3") and path):
        return given
    raise ValueError(f"{given!r} is no way to guess tokens; give off, ngram, draft:MODEL, eagle3:HEAD or auto")


class InvalidSettingsError(ValueError):
    """Raised when settings can't be used; the message is one line that names the setting and what would be right."""


class TierCaps(BaseModel):
    """The largest max_tokens a request of each tier may ask for, in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    interactive: Positive = 8_192
    standard: Positive = 32_768
    bulk: Positive = 131_072

    def of(self, tier: Tier) -> int:
        return {Tier.INTERACTIVE: self.interactive, Tier.STANDARD: self.standard, Tier.BULK: self.bulk}[tier]


class S3Options(BaseModel):
    """How to reach S3. Credentials are found where AWS's tools look for them, and never stand here.

    Attributes:
        endpoint: URL of another server than AWS's.  path_style: the bucket in the path; None: with an endpoint.
        encryption: at rest: SSE-S3 ("AES256"), SSE-KMS ("aws:kms"), or as the bucket is set up ("").
        kms_key: id or ARN of the key for SSE-KMS.
        checksums: "when_required" for servers that don't know S3's newer checksums.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str | None = None
    region: str | None = None
    path_style: bool | None = None
    encryption: Literal["", "AES256", "aws:kms", "aws:kms:dsse"] = ""
    kms_key: str | None = None
    checksums: Literal["when_supported", "when_required"] = "when_supported"


class BucketOptions(BaseModel):
    """Where files are dropped, when the root is a bucket.

    Attributes:
        places: prefix below the root -> the tenant whose place it is.
        queue_url: the SQS queue that the bucket tells of new objects; None: only sweeps find them.
        queue_endpoint: URL of another server than AWS's; None: as for S3.
        sweep_seconds: between two listings of the places.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    places: dict[str, str] = Field(default_factory=lambda: {"incoming/": "default"})
    queue_url: str | None = None
    queue_endpoint: str | None = None
    sweep_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0


class KafkaOptions(BaseModel):
    """How Kafka is reached, and what of it is used.

    Attributes:
        bootstrap: "host:port" of some brokers; none: Kafka is not used.
        security, mechanism, username, password, ca_file, cert_file, key_file, key_password: as Kafka's clients know
            them.
        topic_prefix: of requests, jobs, results, events and deadletter.
        requests, jobs: topic -> tenant; empty: the prefix's topic, for the tenant "default".
        group: of the consumers.  epoch: names the cluster, where its topics have no ids.
        start: where a group begins that has no offset, or one out of range.
        batch_records, batch_seconds: a batch is stored when it has so many records, or its first has waited so long.
        reply_topics: topics that a record's `reply_to` may name.
        uri_prefixes: tenant -> beginnings of the URIs that its jobs may name.
        announce_all: jobs of other doors, too.
        idempotence: of the producer.
        session_timeout: seconds without a sign of life after which a consumer's partitions go to others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap: tuple[str, ...] = ()
    security: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "AWS_MSK_IAM"] | None = None
    username: str | None = None
    password: SecretStr | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password: SecretStr | None = None
    topic_prefix: str = "tokenmill"
    requests: dict[str, str] = Field(default_factory=dict)
    jobs: dict[str, str] = Field(default_factory=dict)
    group: str = "tokenmill-intake"
    epoch: str | None = None
    start: Literal["earliest", "latest", "stop"] = "earliest"
    batch_records: Positive = 5_000
    batch_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    reply_topics: tuple[str, ...] = ()
    uri_prefixes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    announce_all: bool = False
    idempotence: bool = True
    session_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 45.0


class CeleryOptions(BaseModel):
    """The door for Celery's tasks.

    Attributes:
        queues: queue -> the tenant whose it is; none: there is no such door.
        result_url: of the result backend; None: the broker, where that is Redis.
        uri_prefixes: tenant -> beginnings of the URIs that its jobs may name; each ends with "/".
        generate_seconds: after which a request whose caller waits is given up, or earlier if it says so.
        generate_waiting: such requests of one process at once; further ones are tried again later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    queues: dict[str, str] = Field(default_factory=dict)
    result_url: SecretStr | None = None
    uri_prefixes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    generate_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    generate_waiting: Positive = 1_000


class PaceOptions(BaseModel):
    """What requests whose callers wait are promised by a worker's engine, and what it weighs against other work.

    Attributes:
        hold_back: other work is held back where the promises can't be kept beside it.
        ttft_seconds: from a request's arrival in the engine until its first token.
        itl_seconds: between two of its tokens.
        quantile: share of the first tokens, and of the later ones, that should be in time.
        weight_ttft, weight_itl, weight_drops: of those that are late, and of requests that run out of time.
        weight_utilisation: of other work that is held back. The larger, the more may be late.
        least_tokens: of an engine's step that other work always keeps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hold_back: bool = True
    ttft_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    itl_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.97
    weight_ttft: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    weight_itl: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    weight_utilisation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.3
    weight_drops: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    least_tokens: Positive = 1


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
        memory_bytes: of all of them, where there is no Redis.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    always: bool = False
    keep: Amount = timedelta(hours=1)
    entries: Positive = 10_000
    entry_bytes: Annotated[int, Field(ge=1, le=1 << 19, strict=False)] = 1 << 18
    memory_bytes: Positive = 256 << 20


class GatewayOptions(BaseModel):
    """How HTTP is served.

    Attributes:
        auth: when API keys are needed. "auto": as soon as there is one; "keys": always; "off": never.
        max_upload_bytes: of an uploaded file.  uploads_at_once: by one gateway; further ones are refused.
        max_body_bytes: of any other request.
        idle_seconds: a sender that is silent for so long in the middle of a request is not waited for.
        request_seconds: after which a request to a model is given up, or earlier if it says so.
        drain_seconds: that requests have to come to their end when the gateway is told to stop.
        requests_at_once: by one gateway; further ones are refused.
        tls_certificate, tls_key: PEM files; both or none.
        tenant_limits: of each tenant, over all of its keys.  tenants: tenant -> its own, in place of these.
        key_limits: of each key that brings none of its own.
        webhooks: who is told when batches have ended.  cache: of answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    auth: Literal["auto", "keys", "off"] = "auto"
    max_upload_bytes: Positive = 2 << 30
    uploads_at_once: Positive = 8
    max_body_bytes: Positive = 10 << 20
    idle_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    request_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    drain_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 25.0
    requests_at_once: Positive = 2_000
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tenant_limits: RateLimits = RateLimits()
    tenants: dict[str, RateLimits] = Field(default_factory=dict)
    key_limits: RateLimits = RateLimits()
    webhooks: WebhooksOptions = WebhooksOptions()
    cache: CacheOptions = CacheOptions()

    @model_validator(mode="after")
    def _both(self) -> GatewayOptions:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together; set both")
        return self


class LaneOptions(BaseModel):
    """How a worker serves the requests whose callers wait.

    Attributes:
        most_requests: that a worker has at once; None: a few more than its batch has rows.
        drain_seconds: that they have to come to their end when the worker is told to stop; the others go on elsewhere.
        pace: what they are promised.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    most_requests: Positive | None = None
    drain_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20.0
    pace: PaceOptions = PaceOptions()


class RetentionOptions(BaseModel):
    """How long things are kept: amounts of time, such as "30d".

    Attributes:
        outputs: results, from the end of a job that doesn't say so itself; None: for ever.
        deadletters: from when they were written; None: for ever.
        intake: what intakes wrote down to know an event again. Longer than any source repeats its events.
        every: between two collections by `serve` and `dispatcher`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    outputs: Amount | None = None
    deadletters: Amount | None = None
    intake: Amount = timedelta(days=30)
    every: Amount = timedelta(days=1)


class Settings(BaseSettings):
    """All settings. Make one with `load_settings`, which turns mistakes into one clear line.

    Attributes:
        default_max_tokens: tokens a request without max_tokens may generate (or what is left of the context, if less).
        max_output_tokens: the tiers' caps.
        price_per_hour: of this machine, for the cost in summaries and estimates; in whatever currency.
        model_cache: where pulled weights are kept.
        root: the folder or s3:// URL that holds all jobs of this installation.
        s3: how to reach S3.  bucket, kafka, celery: the doors there.  gateway: HTTP.  lane: for requests whose callers
            wait.
        redis_url: for heartbeats and locks.  broker_url: that Celery uses for shards; None: the same Redis.
        default_model: of jobs that name none; None: their rows may name any model that is served.
        default_tier: of jobs that name none.
        tenant_tokens: a tenant with so many tokens in open jobs is taken no more from; None: no limit.
        tenant_weights: in the sharing of what is computed; others have 1.
        planners: jobs planned at once by one dispatcher.
        retention: how long things are kept.
        checkpoint_seconds: between two checkpoints of what is being computed; what a kill costs at most.
        request_timeout: seconds that a request may compute; None: as long as it takes.
        stuck_seconds: a worker that has made no step for so long ends itself, to be started again.
        spot_notice: a worker ends in order when Amazon says that its spot instance will be taken away.
        instruction_set: of the native CPU kernels; "auto": the most that the processor has.
        speculate: how the next tokens are guessed, where a command doesn't say: off, ngram, draft:MODEL,
            eagle3:HEAD or auto.
    """

    model_config = SettingsConfigDict(
        env_prefix="TOKENMILL_", env_nested_delimiter="__", frozen=True, extra="forbid", validate_default=True
    )

    limits: Limits = Limits()
    plan: PlanSettings = PlanSettings()
    default_max_tokens: Positive = 4_096
    max_output_tokens: TierCaps = TierCaps()
    price_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    checkpoint_seconds: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    request_timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    stuck_seconds: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    spot_notice: bool = False
    instruction_set: InstructionSet = "auto"
    speculate: Annotated[str, AfterValidator(check_speculate)] = "auto"
    root: str | None = None
    s3: S3Options = S3Options()
    bucket: BucketOptions = BucketOptions()
    kafka: KafkaOptions = KafkaOptions()
    celery: CeleryOptions = CeleryOptions()
    gateway: GatewayOptions = GatewayOptions()
    lane: LaneOptions = LaneOptions()
    redis_url: SecretStr | None = None
    broker_url: SecretStr | None = None
    default_model: str | None = None
    default_tier: Literal[Tier.STANDARD, Tier.BULK] = Tier.STANDARD
    tenant_tokens: Positive | None = None
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    planners: Positive = 2
    retention: RetentionOptions = RetentionOptions()
    model_cache: Path = Field(default_factory=lambda: _cache_home() / "tokenmill" / "models")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        named = os.environ.get(CONFIG_VARIABLE)
        return (
            init_settings,
            env_settings,
            TomlConfigSettingsSource(settings_cls, toml_file=Path(named) if named else DEFAULT_CONFIG),
        )


def load_settings(**overrides: Any) -> Settings:
    """Settings with `overrides` on top; raises `InvalidSettingsError`."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named and not Path(named).is_file():
        raise InvalidSettingsError(f"{CONFIG_VARIABLE} names {named}, which is no file; correct it or unset it")
    source = named or str(DEFAULT_CONFIG)
    try:
        return Settings(**overrides)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        name = ".".join(str(step) for step in detail["loc"])
        what = "is not a setting; remove it" if detail["type"] == "extra_forbidden" else f"is wrong: {detail['msg']}"
        raise InvalidSettingsError(
            f"setting {name} {what} (from arguments, TOKENMILL_ variables or {source})"
        ) from error
    except SettingsError as error:
        raise InvalidSettingsError(f"a TOKENMILL_ variable can't be read: {error}") from error
    except (ValueError, OSError) as error:  # tomllib's errors are ValueErrors
        raise InvalidSettingsError(f"{source} can't be read as TOML: {error}") from error


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
