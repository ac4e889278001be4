"""Dry run of a job on this machine or another: with the shards, cache and schedule of `run`, but without a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from engine.adapters.adapter import digest_adapter
from engine.config import EngineConfig, Quantize
from engine.dry_run import DryRun
from engine.engine import Engine, resolve_device, resolve_dtype
from engine.errors import OutOfMemory
from engine.models.base import ModelSpec
from engine.models.encoders.settings import embedding_settings
from engine.models.load import describe_shape, stored_bytes
from engine.plan import CacheGroup
from engine.runner.device_memory import choose_for_device
from engine.runner.memory import available_bytes, block_bytes, plan_cache
from engine.runner.step_size import with_step_size
from pipeline.adapters.system_clock import SystemClock
from pipeline.planner import InputEstimate
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.job import Job
from tokenmill.config.engine_options import EngineOptions
from tokenmill.local.run_plan import MIN_TOKENS_PER_SEQUENCE, rows_for
from workers.model.loaded_model import AdapterFiles, LoadedModel
from workers.shards.dry_run import DryRunResult, ShardDryRun
from workers.shards.shard_reader import ShardReader

ENOUGH_BYTES = 1 << 60

_DENSE = 2.0
"""Bytes of a weight in 16 bits."""
_AT_LOAD: Mapping[str, float] = {"dense": _DENSE, "int8": 1.0, "int8-weight-only": 1.0, "fp8": 1.0, "int4": 0.5}
"""What `--quantize` makes of a weight, in bytes, without its factors."""


def cache_groups(spec: ModelSpec, config: EngineConfig, limit: int) -> tuple[CacheGroup, ...]:
    """The cache's pools; where this machine's memory is too small, those of a machine with enough."""
    device = resolve_device(config.device)
    native = device.type == "cpu" and config.attention in ("auto", "native")
    planned = spec, config.cache, config.schedule, limit, device, config.kv_dtype
    try:
        return plan_cache(*planned, native=native)
    except OutOfMemory:
        return plan_cache(spec, replace(config.cache, memory_bytes=ENOUGH_BYTES), *planned[2:], native=native)


def cache_bytes(engine: Engine) -> int:
    """Bytes available for the cache of such an engine on this machine; this engine's own cache counts as free."""
    config, spec = engine.config, engine.spec
    device = resolve_device(config.device)
    share = config.cache.gpu_memory_utilization if device.type == "cuda" else config.cache.memory_fraction
    native = engine.attention_name.startswith("native")
    held = sum(
        (group.num_blocks - 1) * block_bytes(spec, group, config.cache.block_tokens, config.kv_dtype, native=native)
        for group in engine.scheduler.groups
    )
    return int(share * (available_bytes(device) + held))


def sized(config: EngineConfig, spec: ModelSpec, path: Path) -> EngineConfig:
    """The settings with the size of a step that loading the model at `path` would choose here, if it fits."""
    device = resolve_device(config.device)
    if device.type != "cuda":
        return config
    weights = int(spec.num_parameters * bytes_per_parameter(path, spec, config.quantize)) // config.num_ranks
    free = available_bytes(device) - weights
    return with_step_size(config, choose_for_device(config, spec, device, free, ranks=config.num_ranks))


def bytes_per_parameter(path: Path, spec: ModelSpec, quantize: Quantize) -> float:
    """Of the weights as they are computed with: quantized at load, or at most as large as they are stored."""
    if (width := _AT_LOAD.get(quantize)) is not None:
        return width
    return min(_DENSE, stored_bytes(path) / spec.num_parameters)


def engine_config(amount: InputEstimate, options: EngineOptions, *, alone: bool) -> EngineConfig:
    """The engine's settings of `run`, which depend on the job (`alone`), or of a worker."""
    if not alone or amount.segments > 1 or not amount.sequences:
        return options.config()
    mean = -(-(amount.prompt_tokens + amount.max_tokens) // amount.sequences)
    rows = rows_for(amount.max_tokens, amount.certain_tokens)
    return options.config(max(MIN_TOKENS_PER_SEQUENCE, mean), amount.sequences, rows)


def dry_run(job: Job, tables: list[pa.Table], path: Path, config: EngineConfig) -> DryRunResult:
    """Dry-run these shards of the job on one worker; the job's first model is at `path`, others are its adapters.

    Raises what reading a model raises; `UnsupportedModel` for an encoder.
    """
    pin = job.models[0].without_adapter
    dtype = resolve_dtype(pin.dtype, resolve_device(config.device))
    spec, _ = describe_shape(path, dtype=dtype)
    config = sized(config, spec, path)
    groups = cache_groups(spec, config, min(config.max_model_len or spec.max_position, spec.max_position))
    stand_in = replace(config, dtype=pin.dtype)
    enough = -(-spec.max_position // config.cache.block_tokens) + 1  # it computes nothing
    model = LoadedModel.without_weights(path, name=pin.name, config=stand_in, num_blocks=enough, digest=pin.digest)
    embedding = embedding_settings(path)
    if embedding is not None:
        limits = replace(model.limits, embedding=embedding, embedding_size=embedding.size(spec.hidden_size))
        model = replace(model, limits=limits)
    adapters = {one.name: one.adapter for one in job.models if one.adapter is not None}
    files = {name: AdapterFiles(folder, digest_adapter(Path(folder)).hex()) for name, folder in adapters.items()}
    if (merged := job.models[0]).merged:
        model = replace(model, name=merged.name, base=pin.name, merged=files[merged.name])
    else:
        model = replace(model, adapters=files)
    clock = SystemClock()
    works = (
        ShardWork(job, number, attempt=1, attempt_id="rehearsal", table=table, started_at=clock.now())
        for number, table in enumerate(tables)
    )
    engine = DryRun(config, spec, groups)
    return ShardDryRun(ShardReader(model), engine, config.schedule.rows).run(works)
