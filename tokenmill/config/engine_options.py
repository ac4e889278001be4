"""The engine's options, from a command's options and the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from engine.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    KVDType,
    LoraConfig,
    Quantize,
    ScheduleConfig,
    SloConfig,
    Speculate,
    SpeculationConfig,
)
from engine.engine import resolve_device
from engine.vllm.settings import parse_options
from schemas.settings.kv_transfer import Role
from schemas.settings.settings import Engine, GenerationConfig, GpuOptions, Settings
from tokenmill.errors import ModelError, UserError
from tokenmill.models import sources
from tokenmill.output import say
from workers.model.loaded_model import model_path


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine's options of the command line; `kv_cache_bytes` None: chosen by the machine and the work;
    `kv_offloading_bytes`, `kv_cache_dir` None: the prefix cache has no second tier in host memory, on a disk."""

    dtype: DType = "auto"
    device: Device = "auto"
    threads: int | None = None
    max_num_seqs: int | None = None  # as in ScheduleConfig
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    kv_offloading_bytes: int | None = None
    kv_cache_dir: Path | None = None
    kv_cache_dir_bytes: int = CacheConfig().tier_bytes
    kv_exchange_bytes: int | None = None  # as in CacheConfig
    quantize: Quantize = "none"
    kv_dtype: KVDType = "auto"
    instruction_set: str = "auto"
    attention: str = "auto"
    kv_block_size: int | None = None  # as in CacheConfig
    max_model_len: int | None = None
    speculate: str = "off"  # or ngram, auto, draft:PATH, eagle3:PATH
    gpu: GpuOptions = field(default_factory=GpuOptions)
    slo: SloConfig | None = None
    tensor_parallel: int = 1  # devices that share each layer
    pipeline_parallel: int = 1  # stages of so many devices
    micro_batches: int | None = None  # as in EngineConfig
    expert_parallel: bool = False  # whether each of them holds whole experts
    rank_timeout_seconds: float = EngineConfig().rank_timeout_seconds
    replicas: int = 1  # engines, each with a share of the processor's threads, and of its memory
    generation_config: GenerationConfig = "auto"  # whether the model's own sampling defaults apply
    engine: Engine = "auto"
    vllm: Mapping[str, Any] = field(default_factory=dict)  # its own options, by name
    vllm_given: bool = False  # whether a command's option is among these
    adapters: tuple[tuple[str, str], ...] = ()  # as in LoraConfig
    max_loras: int = LoraConfig().max_loras
    merge_adapter: bool = False  # as in LoraConfig
    vllm_python: Path | None = None  # of an environment with vLLM

    def config(
        self, tokens_per_sequence: int | None = None, sequences: int | None = None, rows: int | None = None
    ) -> EngineConfig:
        """The engine's settings for `sequences` of this mean length (tokens), at most `rows` of them concurrently."""
        sharing = 1 if self.on_gpus else self.replicas  # those that compute on one processor
        return EngineConfig(
            dtype=self.dtype,
            device=self.device,
            threads=self.threads if sharing == 1 else max(1, (self.threads or torch.get_num_threads()) // sharing),
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            micro_batches=self.micro_batches,
            expert_parallel=self.expert_parallel,
            rank_timeout_seconds=self.rank_timeout_seconds,
            instruction_set=self.instruction_set,
            attention=self.attention,
            quantize=self.quantize,
            kv_dtype=self.kv_dtype,
            max_model_len=self.max_model_len,
            async_scheduling=self.gpu.async_scheduling,
            cuda_graphs=self.gpu.cuda_graphs,
            max_graph_tokens=self.gpu.max_graph_tokens,
            cache=CacheConfig(
                block_size=self.kv_block_size,
                memory_bytes=self.kv_cache_bytes,
                memory_fraction=CacheConfig().memory_fraction / sharing,
                gpu_memory_utilization=self.gpu.memory_utilization,
                sequences=sequences,
                tokens_per_sequence=tokens_per_sequence,
                host_bytes=self.kv_offloading_bytes,
                tier_folder=None if self.kv_cache_dir is None else str(self.kv_cache_dir),
                tier_bytes=self.kv_cache_dir_bytes,
                exchange_bytes=self.kv_exchange_bytes,
            ),
            schedule=ScheduleConfig(self.max_num_seqs, self.max_num_batched_tokens, slo=self.slo, needed_seqs=rows),
            speculation=self._speculation(),
            lora=LoraConfig(self.adapters, self.max_loras, merge=self.merge_adapter),
        )

    @property
    def without_adapters(self) -> EngineOptions:
        """The same for the model alone."""
        return replace(self, adapters=(), max_loras=LoraConfig().max_loras, merge_adapter=False)

    @property
    def num_ranks(self) -> int:
        """Devices that share the model."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def on_gpus(self) -> bool:
        """Whether the engine computes on GPUs."""
        return resolve_device(self.device).type == "cuda"

    def _speculation(self) -> SpeculationConfig:
        method, _, model = self.speculate.partition(":")
        return SpeculationConfig(cast(Speculate, method), model or None)


def slo_config(settings: Settings) -> SloConfig | None:
    """A worker's SLOs for interactive requests."""
    slo = settings.lane.slo
    if not slo.throttle_batch:
        return None
    return SloConfig(
        ttft_seconds=slo.ttft_seconds, itl_seconds=slo.itl_seconds, quantile=slo.quantile, weight_ttft=slo.weight_ttft,
        weight_itl=slo.weight_itl, weight_utilisation=slo.weight_utilisation, weight_drops=slo.weight_drops,
        min_tokens=slo.min_batch_tokens,
    )  # fmt: skip


def engine_options(
    settings: Settings,
    *,
    dtype: DType = "auto",
    device: Device = "auto",
    threads: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    kv_cache_memory: int | None = None,
    kv_offloading_size: int | None = None,
    kv_cache_dir: Path | None = None,
    kv_cache_dir_size: int | None = None,
    quantize: Quantize = "none",
    kv_dtype: KVDType = "auto",
    speculate: str | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    micro_batches: int | None = None,
    expert_parallel: bool = False,
    replicas: int = 1,
    engine: Engine | None = None,
    engine_option: Sequence[str] | None = None,
    generation_config: GenerationConfig | None = None,
    role: Role = "both",
    adapter: Sequence[str] | Mapping[str, str] | None = None,
    max_loras: int = LoraConfig().max_loras,
    merge_adapter: bool = False,
) -> EngineOptions:
    """The engine's options, from a command's options and the settings. `kv_cache_memory`, `kv_offloading_size` and
    `kv_cache_dir_size` in bytes; `speculate`, `engine` and `generation_config`: None is the settings' one;
    `engine_option`: NAME=VALUE of vLLM, over the settings' ones; `adapter`: NAME=ADAPTER of each, or ADAPTER by name.

    Raises:
        ModelError: there is no such draft model or head.  InvalidOption: vLLM's options can't be set so.
        UserError: a size is given without its folder, or adapters can't be used so.
    """
    if kv_cache_dir is None and kv_cache_dir_size is not None:
        raise UserError("--kv-cache-dir-size is given without --kv-cache-dir; give both, or leave it out")
    if merge_adapter and len(adapter or ()) != 1:
        raise UserError(f"--merge-adapter merges one --adapter into the model, not {len(adapter or ())}; give one")
    if merge_adapter and max_loras != LoraConfig().max_loras:
        raise UserError("--max-loras is of adapters beside the model; leave it out with --merge-adapter")
    vllm = named_values(engine_option or (), "--engine-option", "tensor_parallel_size=2")
    speculate = speculate or settings.speculate
    method, _, model = speculate.partition(":")
    if model:
        speculate = f"{method}:{model_path(sources.pull(model, settings.model_cache, say).path)}"
    return EngineOptions(
        dtype=dtype,
        device=device,
        threads=threads,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_bytes=kv_cache_memory,
        kv_offloading_bytes=kv_offloading_size,
        kv_cache_dir=kv_cache_dir,
        kv_cache_dir_bytes=kv_cache_dir_size or CacheConfig().tier_bytes,
        kv_exchange_bytes=None if role == "both" else settings.kv_transfer.max_bytes,
        quantize=quantize,
        kv_dtype=kv_dtype,
        instruction_set=settings.instruction_set,
        attention=settings.attention,
        kv_block_size=settings.kv_block_size,
        max_model_len=settings.max_model_len,
        speculate=speculate,
        gpu=settings.gpu,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        micro_batches=micro_batches,
        expert_parallel=expert_parallel,
        replicas=replicas,
        rank_timeout_seconds=settings.rank_timeout_seconds,
        generation_config=generation_config or settings.generation_config,
        engine=engine or settings.engine,
        vllm=parse_options(settings.vllm.options | vllm),
        vllm_given=bool(engine_option),
        vllm_python=settings.vllm.python,
        adapters=_adapters(adapter or (), settings.model_cache),
        max_loras=max_loras,
        merge_adapter=merge_adapter,
    )


def _adapters(given: Sequence[str] | Mapping[str, str], cache: Path) -> tuple[tuple[str, str], ...]:
    """Names and folders of adapters, which are pulled if needed. Raises `UserError` where a name is given twice, or a
    folder is missing."""
    if isinstance(given, Mapping):
        part, named = "adapters", given
    else:
        part, named = "--adapter", named_values(given, "--adapter", "polite=adapters/polite")
    if len(named) < len(given):
        raise UserError("--adapter: two adapters have one name; give each a name of its own")
    found = []
    for name, source in named.items():
        try:
            found.append((name, str(sources.pull_adapter(source, cache, say))))
        except ModelError as error:
            raise UserError(f"{part} {name}={source}: {error}") from error
    return tuple(found)


def named_values(given: Sequence[str], option: str, example: str) -> dict[str, str]:
    """The values of an option that is given as NAME=VALUE, by name. Raises `UserError`."""
    named = {}
    for one in given:
        name, separator, value = one.partition("=")
        if not separator or not name:
            raise UserError(f"{option} {one}: give NAME=VALUE, such as {example}")
        named[name] = value
    return named
