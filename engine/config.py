"""Frozen settings of the engine. What is derived from the model or the machine is resolved once, in `Engine.load`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantize = Literal["none", "dense", "int8", "int8-weight-only", "int4", "fp8"]
KVDType = Literal["auto", "int8", "fp8"]
Speculate = Literal["off", "ngram", "draft", "eagle3", "auto"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: tokens a block holds.
        memory_bytes: most bytes for all pools; None: `memory_fraction` of what the machine has free after loading, and
            on CUDA what weights and the largest step leave of `gpu_memory_utilization`.
        gpu_memory_utilization: share of a CUDA device's memory that we may take with all others on it; the rest is for
            graphs, and for what libraries allocate.
        num_blocks: blocks of the full-attention pool; overrides both (tests, and who knows better).
        prefix_caching: reuse blocks between requests with the same leading tokens and salt.
        sequences, tokens_per_sequence: the work at hand, when known; the pool is no larger than it can use.
    """

    block_size: int = 32
    memory_bytes: int | None = None
    memory_fraction: float = 0.5
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    prefix_caching: bool = True
    sequences: int | None = None
    tokens_per_sequence: int | None = None


@dataclass(frozen=True, slots=True)
class SloConfig:
    """What requests of class 0 are promised, and what it weighs against the other classes' work
    (`engine.scheduler.slo_control`).

    Attributes:
        ttft: seconds from a request's arrival in the engine until its first token.
        itl: seconds between two tokens of an answer.
        quantile: share of the first tokens, and of the later ones, that should be in time.
        weight_ttft, weight_itl: of samples that are late.
        weight_utilisation: of work that is held back; at 0 the shares above are met exactly, beyond that fewer are.
        weight_drops: of requests of class 0 that run into their deadline.
        least_tokens: of a step, that other classes always keep.
        fixed_tokens: of a step, that other classes may have beside class 0, whatever is measured; None: as many as the
            promises leave.
    """

    ttft: float = 1.0
    itl: float = 0.1
    quantile: float = 0.97
    weight_ttft: float = 1.0
    weight_itl: float = 1.0
    weight_utilisation: float = 0.3
    weight_drops: float = 1.0
    least_tokens: int = 1
    fixed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """One step's limits.

    Attributes:
        max_num_seqs: rows of the running batch.
        max_num_batched_tokens: token budget of a step.
        max_chunk_tokens: most prompt tokens of one row in a step; None: the budget.
        pace: what class 0 is promised; None: it goes first, and nothing is held back for it.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int | None = None
    pace: SloConfig | None = None


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Guesses at the next tokens, checked by the model; no answer depends on them.

    Attributes:
        method: "ngram": what followed the same tokens before, in the row's own text or in answers that have ended;
            "draft": by a smaller model; "eagle3": by an EAGLE-3 head, which reads the model's own states;
            "auto": n-grams where they pay, by measured times.
        draft_model: for "draft" the smaller model's folder or GGUF file, for "eagle3" the head's folder.
        longest: most guesses for a row in a step; None: 16 that are copied, 8 of a model, 4 of a head.
    """

    method: Speculate = "off"
    draft_model: str | None = None
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything `Engine.load` may be told beside the model's place.

    Attributes:
        dtype: of weights, activations and KV; "auto": bfloat16 where the CPU multiplies it natively, else float32.
        max_model_len: most tokens of one sequence; None: the model's own limit.
        threads: for compute; None: torch's choice.
        attention: name of the backend (`engine.attention.backend_names`); "auto" picks the best one for the device.
        instruction_set: of the native CPU kernels ("avx2", "avx512", "avx512_bf16", "amx"); "auto": the most there is.
        quantize: weights at load. "none": as the checkpoint has them; quantized ones stay so where the device has a
            kernel for their form. "dense": dequantized to `dtype`. "int8": with activations quantized row by row
            (W8A8), where that is faster; "int8-weight-only": activations stay as they are (W8A16). "int4" and "fp8":
            weights only, rounded to nearest in groups of 32 and by rows.
        kv_dtype: of the cache; "int8" (on a CPU) and "fp8" (on a GPU) halve it, with one scale per token and head.
        tensor_parallel: devices of this machine that share the model, each computed on by a process of its own. On a
            CPU they are processes that share `threads`; what is said of memory is for all of them together.
        rank_seconds: seconds that one of them waits for the others in a step; then the engine is lost.
        plan_ahead: plan and submit a step while the device computes the one before; None: on CUDA. Rows with masks,
            penalties or log-probabilities, rows whose prompt is scored or pooled, and steps with drafts make the next
            step wait for the results.
        cuda_graphs: record the forward passes of steps of some shapes when the engine starts; None: on CUDA, where
            model, attention and memory allow it. True: refuse to start where that can't be.
        graph_tokens: most tokens of a step that takes a graph; larger ones take longer to compute than to launch.
    """

    dtype: DType = "auto"
    device: Device = "auto"
    max_model_len: int | None = None
    threads: int | None = None
    attention: str = "auto"
    instruction_set: str = "auto"
    quantize: Quantize = "none"
    kv_dtype: KVDType = "auto"
    tensor_parallel: int = 1
    rank_seconds: float = 120.0
    plan_ahead: bool | None = None
    cuda_graphs: bool | None = None
    graph_tokens: int = 512
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
