"""Settings of a tokenmill installation: arguments over environment over `tokenmill.toml` over defaults.

Environment variables start with TOKENMILL_, nested names are joined with two underscores
(`TOKENMILL_PLAN__SHARD_TOKENS=100000`). TOKENMILL_CONFIG names the TOML file; without it, `tokenmill.toml` in the
current folder is read when it exists.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from schemas.jobs.job import Tier
from schemas.jobs.job_options import Amount
from schemas.prices import ANY_REGION, Market
from schemas.requests.limits import Limits, PlanSettings, Positive, SpendLimits
from schemas.settings.autoscaling import AutoscaleOptions
from schemas.settings.gateway import GatewayOptions
from schemas.settings.ingest import BucketOptions, CeleryOptions, KafkaOptions, S3Options
from schemas.settings.observability import CloudWatchOptions, TracingOptions
from schemas.settings.releases import ReleaseRules, WarmupOptions

CONFIG_VARIABLE = "TOKENMILL_CONFIG"
DEFAULT_CONFIG = Path("tokenmill.toml")

InstructionSet = Literal["auto", "avx2", "avx512", "avx512_bf16", "amx"]
Attention = Literal["auto", "reference", "paged-sdpa", "native", "triton", "flash3", "flash2", "torch-varlen"]


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


class GpuOptions(BaseModel):
    """How an engine uses a CUDA device.

    Attributes:
        memory_utilization: share of its memory that may be taken, where the KV cache's size is not given: what weights
            and the largest step leave of it is the cache's.
        cuda_graphs: record the forward passes of small steps when the engine starts, which takes seconds and saves
            launches; None: where model and attention allow it. True: refuse to start where they don't.
        graph_tokens: most tokens of a step that is recorded.
        plan_ahead: plan a step while the one before it is computed; None: on a CUDA device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    cuda_graphs: bool | None = None
    graph_tokens: Positive = 512
    plan_ahead: bool | None = None


class MetricsOptions(BaseModel):
    """Figures for programs that watch.

    Attributes:
        port: on which each process tells its own, without a key; 0: any that is free; None: none. A gateway tells them
            among its routes, too.
        host: the address for that.
        workers: a gateway tells the figures of each worker that lives, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    workers: bool = True


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


class InstanceOptions(BaseModel):
    """What a worker runs on, by the names of the price book.

    Attributes:
        type: such as g6.xlarge; None: its price isn't looked up.  region: such as us-east-1; "any" fits all.
        market: how it is paid.
        workers: that share it, and its price.
        ask_ec2: a worker on Amazon's EC2 asks the instance for type, region and market.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Annotated[str, Field(min_length=1)] | None = None
    region: Annotated[str, Field(min_length=1)] = ANY_REGION
    market: Market = "on-demand"
    workers: Positive = 1
    ask_ec2: bool = False


class SpendingOptions(SpendLimits):
    """What tenants may spend.

    Attributes:
        per_day, per_month: of each tenant that `tenants` doesn't name.
        tenants: limits of those that have their own; those of the others don't hold for them.
        wait: jobs of a tenant that has reached its limit wait for its next day or month; else they end.
    """

    tenants: dict[str, SpendLimits] = Field(default_factory=dict)
    wait: bool = False

    @property
    def of_each(self) -> SpendLimits:
        """The limits of tenants that aren't named."""
        return SpendLimits(per_day=self.per_day, per_month=self.per_month)


class Settings(BaseSettings):
    """All settings. Make one with `load_settings`, which turns mistakes into one clear line.

    Attributes:
        default_max_tokens: tokens a request without max_tokens may generate (or what is left of the context, if less).
        max_output_tokens: the tiers' caps.
        price_per_hour: of a worker, for what its work costs; in whatever currency. None: as the price book says of
            `instance`.
        price_book: a file of prices; None: the one that comes with tokenmill.
        instance: what a worker runs on.
        spending: what tenants may spend.
        model_cache: where pulled weights are kept.
        root: the folder or s3:// URL that holds all jobs of this installation.
        s3: how to reach S3.  bucket, kafka, celery: the doors there.  gateway: HTTP.  lane: for requests whose callers
            wait.
        redis_url: for heartbeats and locks.  broker_url: that Celery uses for shards; None: the same Redis.
        default_model: of jobs that name none; None: their rows may name any model that is served.
        default_tier: of jobs that name none.
        tenant_tokens: a tenant with so many tokens in open jobs is taken no more from; None: no limit.
        tenant_weights: in the sharing of what is computed; others have 1.
        planners: jobs planned at once by one dispatcher, each in a process of its own. Where there are several, one
            tenant occupies at most all but one.
        planner_memory_bytes: that planning a job may take; a job that needs more fails. Counted are the process's
            private writable pages, of which about 140 MiB are there before any job.
        planner_stuck_seconds: a planner process that has read nothing, checked no row and stored no shard for so long
            is killed, and planning has failed once.
        retention: how long things are kept.  metrics: figures for programs that watch.
        cloudwatch: where the backlog is told.  autoscale: how many workers are wished for.
        tracing: what traces hold.  log_format: how long-running commands write their logs.
        warmup: what a worker computes before it serves.  releases: when a new version of a model is promoted.
        checkpoint_seconds: between two checkpoints of what is being computed; what a kill costs at most.
        request_timeout: seconds that a request may compute; None: as long as it takes.
        stuck_seconds: a worker that has made no step for so long ends itself, to be started again.
        rank_seconds: that a process waits in a step for others that share its model, before the engine ends.
        spot_notice: a worker ends in order when Amazon says that its spot instance will be taken away.
        instruction_set: of the native CPU kernels; "auto": the most that the processor has.
        gpu: how an engine uses a CUDA device.
        attention: what attends; "auto": the best that the device, the model and what is installed allow.
        kv_block_size: tokens of a block of the KV cache; flash2 and torch-varlen take multiples of 256 only.
        speculate: how the next tokens are guessed, where a command doesn't say: off, ngram, draft:MODEL,
            eagle3:HEAD or auto.
        content_policies: judge prompts and answers, where a command doesn't say: NAME or NAME:ARGUMENT each.
    """

    model_config = SettingsConfigDict(
        env_prefix="TOKENMILL_", env_nested_delimiter="__", frozen=True, extra="forbid", validate_default=True
    )

    limits: Limits = Limits()
    plan: PlanSettings = PlanSettings()
    default_max_tokens: Positive = 4_096
    max_output_tokens: TierCaps = TierCaps()
    price_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    price_book: Path | None = None
    instance: InstanceOptions = InstanceOptions()
    spending: SpendingOptions = SpendingOptions()
    checkpoint_seconds: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    request_timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    stuck_seconds: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    rank_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    spot_notice: bool = False
    instruction_set: InstructionSet = "auto"
    gpu: GpuOptions = GpuOptions()
    attention: Attention = "auto"
    kv_block_size: int = Field(default=32, ge=1, le=1024)
    speculate: Annotated[str, AfterValidator(check_speculate)] = "auto"
    content_policies: tuple[Annotated[str, Field(min_length=1)], ...] = ()
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
    planner_memory_bytes: Annotated[int, Field(ge=512 << 20, strict=False)] = 2 << 30
    planner_stuck_seconds: float = Field(default=600.0, ge=10, allow_inf_nan=False)
    retention: RetentionOptions = RetentionOptions()
    metrics: MetricsOptions = MetricsOptions()
    cloudwatch: CloudWatchOptions = CloudWatchOptions()
    autoscale: AutoscaleOptions = AutoscaleOptions()
    tracing: TracingOptions = TracingOptions()
    log_format: Literal["text", "json"] = "text"
    warmup: WarmupOptions = WarmupOptions()
    releases: ReleaseRules = ReleaseRules()
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
