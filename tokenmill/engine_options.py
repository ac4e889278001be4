"""How the engine is to run, by a command's options and the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from engine.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    KVDType,
    PaceConfig,
    Quantize,
    ScheduleConfig,
    Speculate,
    SpeculationConfig,
)
from schemas.settings import Settings
from tokenmill import models
from tokenmill.output import say
from workers.model_host import model_path


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine is to run, as the command line has it; `kv_cache_bytes` None: from the machine and the work."""

    dtype: DType = "auto"
    device: Device = "auto"
    threads: int | None = None
    max_num_seqs: int = ScheduleConfig().max_num_seqs
    max_num_batched_tokens: int = ScheduleConfig().max_num_batched_tokens
    kv_cache_bytes: int | None = None
    quantize: Quantize = "none"
    kv_dtype: KVDType = "auto"
    instruction_set: str = "auto"
    speculate: str = "off"  # or ngram, auto, draft:PATH, eagle3:PATH
    pace: PaceConfig | None = None

    def config(
        self, tokens_per_sequence: int | None = None, sequences: int | None = None, rows: int | None = None
    ) -> EngineConfig:
        """The engine's settings, for so many sequences of about this length (tokens), at most `rows` at once."""
        return EngineConfig(
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            instruction_set=self.instruction_set,
            quantize=self.quantize,
            kv_dtype=self.kv_dtype,
            cache=CacheConfig(
                memory_bytes=self.kv_cache_bytes, sequences=sequences, tokens_per_sequence=tokens_per_sequence
            ),
            schedule=ScheduleConfig(
                min(self.max_num_seqs, rows or self.max_num_seqs), self.max_num_batched_tokens, pace=self.pace
            ),
            speculation=self._speculation(),
        )

    def _speculation(self) -> SpeculationConfig:
        method, _, model = self.speculate.partition(":")
        return SpeculationConfig(cast(Speculate, method), model or None)


def pace_config(settings: Settings) -> PaceConfig | None:
    """What a worker promises to requests whose callers wait."""
    pace = settings.lane.pace
    if not pace.hold_back:
        return None
    return PaceConfig(
        ttft=pace.ttft_seconds, itl=pace.itl_seconds, quantile=pace.quantile, weight_ttft=pace.weight_ttft,
        weight_itl=pace.weight_itl, weight_utilisation=pace.weight_utilisation, weight_drops=pace.weight_drops,
        least_tokens=pace.least_tokens,
    )  # fmt: skip


def engine_options(
    settings: Settings,
    dtype: DType,
    device: Device,
    threads: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_cache_memory: int | None,
    quantize: Quantize,
    kv_dtype: KVDType,
    speculate: str | None,
) -> EngineOptions:
    """How the engine is to run, by a command's options and the settings. `kv_cache_memory` in bytes; `speculate`: None
    is what the settings say.

    Raises:
        ModelError: there is no such draft model or head.
    """
    speculate = speculate or settings.speculate
    method, _, model = speculate.partition(":")
    if model:
        speculate = f"{method}:{model_path(models.pull(model, settings.model_cache, say).path)}"
    return EngineOptions(
        dtype, device, threads, max_num_seqs, max_num_batched_tokens, kv_cache_memory, quantize, kv_dtype,
        settings.instruction_set, speculate,
    )  # fmt: skip
