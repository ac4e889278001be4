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
from schemas.settings.answers import AnswerOptions
from schemas.settings.autoscaling import AutoscaleOptions
from schemas.settings.gateway import GatewayOptions
from schemas.settings.ingest import BucketOptions, CeleryOptions, KafkaOptions, S3Options
from schemas.settings.kv_transfer import KVTransferOptions
from schemas.settings.lane import LaneOptions
from schemas.settings.observability import CloudWatchOptions, TracingOptions
from schemas.settings.overload import OverloadOptions
from schemas.settings.releases import ReleaseRules, WarmupOptions

CONFIG_VARIABLE = "TOKENMILL_CONFIG"
DEFAULT_CONFIG = Path("tokenmill.toml")

InstructionSet = Literal["auto", "avx2", "avx512", "avx512_bf16", "amx"]
Engine = Literal["auto", "tokenmill", "vllm", "transformers"]
GenerationConfig = Literal["auto", "ignore"]
Attention = Literal["auto", "reference", "paged-sdpa", "native", "triton", "flash3", "flash2", "torch-varlen"]


def check_speculate(given: str) -> str:
    """Validate a method of speculative decoding; raises ValueError."""
    method, _, path = given.partition(":")
    if given in ("off", "ngram", "auto") or (method in ("draft", "eagle3") and path):
        return given
    raise ValueError(
        f"{given!r} is no method of speculative decoding; give off, ngram, draft:MODEL, eagle3:HEAD or auto"
    )


class InvalidSettingsError(ValueError):
    """Raised for invalid settings; the message is one line that names the setting and the valid values."""


class TierCaps(BaseModel):
    """The largest max_tokens of a request, by tier.

    Attributes:
        interactive, standard, bulk: tokens; a larger max_tokens is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    interactive: Positive = 8_192
    standard: Positive = 32_768
    bulk: Positive = 131_072

    def of(self, tier: Tier) -> int:
        return {Tier.INTERACTIVE: self.interactive, Tier.STANDARD: self.standard, Tier.BULK: self.bulk}[tier]


class VLLMOptions(BaseModel):
    """vLLM as an engine: any further name is an option of vLLM's own (`EngineArgs`), such as tensor_parallel_size,
    pipeline_parallel_size, quantization, gpu_memory_utilization or speculative_config (JSON).

    Attributes:
        python: the interpreter of an environment in which vLLM and tokenmill are installed; None: this one.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    python: Path | None = None

    @property
    def options(self) -> dict[str, Any]:
        """vLLM's own options, by name."""
        return dict(self.model_extra or {})


class GpuOptions(BaseModel):
    """Settings of an engine on a CUDA device.

    Attributes:
        memory_utilization: share of its memory to use, where the KV cache's size is not given: the cache gets what
            weights and the largest step leave of it.
        cuda_graphs: record the forward passes of small steps at the engine's start, which takes seconds and saves
            launches; None: where model and attention allow it. True: refuse to start where they don't.
        max_graph_tokens: most tokens of a recorded step that doesn't only decode; None: 512 to 4,096, by
            device and model.
        async_scheduling: plan a step while the previous one is computed; None: on a CUDA device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    cuda_graphs: bool | None = None
    max_graph_tokens: Positive | None = None
    async_scheduling: bool | None = None


class MetricsOptions(BaseModel):
    """Settings of the metrics endpoint.

    Attributes:
        port: where each process exports its metrics, without a key; 0: any free one; None: none. A gateway exports them
            among its routes, too.
        host: its address.
        workers: a gateway also exports the metrics of each live worker.
        max_tenants: most tenants with a label of their own, those with the first answers of a process; the others are
            counted together as "other".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    workers: bool = True
    max_tenants: Annotated[int, Field(ge=0, le=10_000, strict=False)] = 100


class RetentionOptions(BaseModel):
    """Settings of retention: amounts of time, such as "30d".

    Attributes:
        outputs: of results, from the end of a job without a retention of its own; None: for ever.
        deadletters: from their creation; None: for ever.
        intake: of the records that identify repeated events. Must be longer than any source repeats its events.
        interval: of garbage collections by `serve` and `dispatcher`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    outputs: Amount | None = None
    deadletters: Amount | None = None
    intake: Amount = timedelta(days=30)
    interval: Amount = timedelta(days=1)


class InstanceOptions(BaseModel):
    """The machine of a worker, by the names of the price book.

    Attributes:
        type: such as g6.xlarge; None: without a price from the book.  region: such as us-east-1; "any" fits all.
        market: on demand or spot.
        workers: number of workers that share it, and its price.
        use_ec2_metadata: on Amazon's EC2, read type, region and market from the instance's metadata.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Annotated[str, Field(min_length=1)] | None = None
    region: Annotated[str, Field(min_length=1)] = ANY_REGION
    market: Market = "on-demand"
    workers: Positive = 1
    use_ec2_metadata: bool = False


class SpendingOptions(SpendLimits):
    """Spending limits of tenants.

    Attributes:
        per_day, per_month: of each tenant that `tenants` doesn't name.
        tenants: tenant -> its own limits, in place of these.
        wait: jobs of a tenant at its limit wait for the next day or month; else they end.
    """

    tenants: dict[str, SpendLimits] = Field(default_factory=dict)
    wait: bool = False

    @property
    def of_each(self) -> SpendLimits:
        """The limits of tenants that aren't named."""
        return SpendLimits(per_day=self.per_day, per_month=self.per_month)


class Settings(BaseSettings):
    """All settings. `load_settings` creates one and reports invalid settings in one line.

    Attributes:
        default_max_tokens: max_tokens of requests without it (or what is left of the context, if less).
        max_output_tokens: the tiers' caps.
        price_per_hour: of a worker, for the cost of its work; in any currency. None: the price book's of `instance`.
        price_book: a file of prices; None: the one that comes with tokenmill.
        instance: the machine of a worker.
        spending: spending limits of tenants.
        model_cache: folder of pulled weights.
        root: the folder or s3:// URL that holds all jobs of this installation.
        s3: connection to S3.  bucket, kafka, celery: ingest sources.  gateway: HTTP.  lane: interactive requests.
        overload: when requests are refused, and steps of degradation.
        kv_transfer: of KV blocks between workers.
        redis_url: for heartbeats and locks.  broker_url: that Celery uses for shards; None: the same Redis.
        default_model: of jobs that name none; None: their rows may name any served model.
        default_tier: of jobs that name none.
        max_tenant_tokens: most tokens of a tenant's open jobs; further jobs are not accepted. None: no limit.
        tenant_weights: tenant -> its weight in fair sharing; default: 1.
        planners: most jobs that a dispatcher plans concurrently, each in a process of its own. Where there are several,
            one tenant occupies at most all but one.
        planner_memory_bytes: memory limit of planning a job; a job that needs more fails. Counted are the process's
            private writable pages, of which about 140 MiB are there before any job.
        planner_stuck_seconds: a planner process that has read nothing, checked no row and stored no shard for so long
            is killed, and planning has failed once.
        retention: retention of stored objects.  answers: the answer store.  metrics: the metrics endpoint.
        cloudwatch: metrics of the backlog.  autoscale: the autoscaler.
        tracing: traces.  log_format: format of long-running commands' logs.
        warmup: a worker's warm-up.  releases: rules of promoting a new version of a model.
        checkpoint_seconds: interval of checkpoints; the most work that a kill loses.
        request_timeout_seconds: longest time in seconds that a request may compute; None: no limit.
        stuck_seconds: a worker without a step for so long exits, to be restarted.
        rank_timeout_seconds: longest wait in a step for the other ranks of a model, before the engine ends.
        spot_notice: a worker stops gracefully at Amazon's notice that its spot instance will be interrupted.
        engine: that computes models; "auto": ours where it has kernels for the model, else vLLM where it is installed,
            else transformers' code.
        vllm: vLLM as an engine.
        instruction_set: of the native CPU kernels; "auto": the best of the processor.
        gpu: the engine on a CUDA device.
        attention: the attention kernels; "auto": the best that device, model and installed packages allow; on a GPU the
            fastest, as measured at the start.
        kv_block_size: tokens of a block of the KV cache; flash2 and torch-varlen take multiples of 256 only. None: 32,
            or 256 with these.
        max_model_len: most tokens of a prompt and its answer together; none: the model's own limit. Phi's LongRoPE uses
            its short factors only where this is at most the original context.
        generation_config: whether a model's own sampling defaults (generation_config.json) apply, where a command sets
            none: auto, or ignore.
        speculate: the method of speculative decoding, where a command sets none: off, ngram, draft:MODEL, eagle3:HEAD
            or auto.
        content_policies: checks of prompts and answers, where a command sets none: NAME or NAME:ARGUMENT each.
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
    request_timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    stuck_seconds: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    rank_timeout_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    spot_notice: bool = False
    engine: Engine = "auto"
    vllm: VLLMOptions = VLLMOptions()
    instruction_set: InstructionSet = "auto"
    gpu: GpuOptions = GpuOptions()
    attention: Attention = "auto"
    kv_block_size: int | None = Field(default=None, ge=1, le=1024)
    max_model_len: int | None = Field(default=None, ge=1)
    generation_config: GenerationConfig = "auto"
    speculate: Annotated[str, AfterValidator(check_speculate)] = "auto"
    content_policies: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    root: str | None = None
    s3: S3Options = S3Options()
    bucket: BucketOptions = BucketOptions()
    kafka: KafkaOptions = KafkaOptions()
    celery: CeleryOptions = CeleryOptions()
    gateway: GatewayOptions = GatewayOptions()
    lane: LaneOptions = LaneOptions()
    overload: OverloadOptions = OverloadOptions()
    kv_transfer: KVTransferOptions = KVTransferOptions()
    redis_url: SecretStr | None = None
    broker_url: SecretStr | None = None
    default_model: str | None = None
    default_tier: Literal[Tier.STANDARD, Tier.BULK] = Tier.STANDARD
    max_tenant_tokens: Positive | None = None
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    planners: Positive = 2
    planner_memory_bytes: Annotated[int, Field(ge=512 << 20, strict=False)] = 2 << 30
    planner_stuck_seconds: float = Field(default=600.0, ge=10, allow_inf_nan=False)
    retention: RetentionOptions = RetentionOptions()
    answers: AnswerOptions = AnswerOptions()
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
