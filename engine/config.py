"""Frozen settings of the engine. `Engine.load` resolves the values that depend on the model or the machine once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantize = Literal["none", "dense", "int8", "int8-weight-only", "int4", "fp8"]
KVDType = Literal["auto", "int8", "fp8"]
Speculate = Literal["off", "ngram", "draft", "eagle3", "auto"]

BLOCK_TOKENS = 32
"""Of a block of the KV cache, where neither the settings nor the attention backend say otherwise."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: tokens a block holds; None: those that the attention backend takes by default
            (`engine.attention.choice.default_block_size`), set when an engine is loaded.
        memory_bytes: maximum bytes of all pools; None: `memory_fraction` of the machine's free memory after loading,
            and on CUDA the part of `gpu_memory_utilization` that weights and the largest step leave.
        gpu_memory_utilization: share of a CUDA device's memory that this process and all others on it may use; the
            rest is for graphs, and for allocations of libraries.
        num_blocks: blocks of the full-attention pool; overrides both.
        prefix_caching: reuse blocks between requests with the same leading tokens and salt.
        sequences, tokens_per_sequence: the planned work, when known; the pool is no larger than it can use.
        host_bytes: maximum bytes of host memory that hold a second tier of the prefix cache, which evicted blocks go to
            (`engine.cache.host_tier`); page-locked for a CUDA device. None: there is none.
        tier_folder: a folder that holds a second tier of the prefix cache, which processes may share and later ones
            find (`engine.cache.folder_tier`); None: there is none.
        tier_bytes: maximum bytes of the blocks in it.
        exchange_bytes: maximum bytes of host memory that hold blocks imported from other engines
            (`engine.block_exchange`); None: blocks are neither imported nor exported.
    """

    block_size: int | None = None
    memory_bytes: int | None = None
    memory_fraction: float = 0.5
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    prefix_caching: bool = True
    sequences: int | None = None
    tokens_per_sequence: int | None = None
    host_bytes: int | None = None
    tier_folder: str | None = None
    tier_bytes: int = 10_000_000_000
    exchange_bytes: int | None = None

    @property
    def block_tokens(self) -> int:
        """Tokens a block holds."""
        return BLOCK_TOKENS if self.block_size is None else self.block_size

    @property
    def second_tiers(self) -> str:
        """The command's options that enable the second tiers that are set, joined by "and"; empty: none is set."""
        options = {
            "--kv-offloading-size": self.host_bytes,
            "--kv-cache-dir": self.tier_folder,
            "--role": self.exchange_bytes,
        }
        return " and ".join(option for option, value in options.items() if value is not None)


@dataclass(frozen=True, slots=True)
class SloConfig:
    """Latency objectives of requests of class 0, and their weights against the other classes' work
    (`engine.scheduler.slo_control`).

    Attributes:
        ttft_seconds: seconds from a request's arrival in the engine until its first token.
        itl_seconds: seconds between two tokens of an answer.
        quantile: share of the first tokens, and of the later ones, that should be in time.
        weight_ttft, weight_itl: of late samples.
        weight_utilisation: of work that is held back; at 0 the shares above are met exactly, beyond that fewer are.
        weight_drops: of requests of class 0 that miss their deadline.
        min_tokens: minimum tokens of a step for other classes.
        fixed_tokens: fixed number of tokens of a step for other classes while class 0 has rows; None: the controller
            sets it by measured latencies.
    """

    ttft_seconds: float = 1.0
    itl_seconds: float = 0.1
    quantile: float = 0.97
    weight_ttft: float = 1.0
    weight_itl: float = 1.0
    weight_utilisation: float = 0.3
    weight_drops: float = 1.0
    min_tokens: int = 1
    fixed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """One step's limits. Its parts read `rows` and `tokens`.

    Attributes:
        max_num_seqs: rows of the running batch; None: 128, and on CUDA chosen by the device and the model when an
            engine is loaded (`engine.runner.step_size`).
        max_num_batched_tokens: token budget of a step; None: 2,048, and on CUDA chosen likewise.
        max_chunk_tokens: maximum prompt tokens of one row in a step; None: the budget.
        slo: latency objectives of class 0; None: it goes first, and no work is held back for it.
        needed_seqs: rows that the planned work can use; there are no more. None: it is not known.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_chunk_tokens: int | None = None
    slo: SloConfig | None = None
    needed_seqs: int | None = None

    @property
    def rows(self) -> int:
        """Rows of the running batch."""
        rows = 128 if self.max_num_seqs is None else self.max_num_seqs
        return rows if self.needed_seqs is None else min(rows, self.needed_seqs)

    @property
    def tokens(self) -> int:
        """The token budget of a step."""
        return 2048 if self.max_num_batched_tokens is None else self.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding: drafts of the next tokens, verified by the model; no answer depends on them.

    Attributes:
        method: "ngram": copies the tokens that followed the same n-gram before, in the row's own text or in ended
            answers; "draft": a smaller model; "eagle3": an EAGLE-3 head, which reads the model's own states;
            "auto": n-grams where measured times show a gain.
        draft_model: for "draft" the smaller model's folder or GGUF file, for "eagle3" the head's folder.
        longest: maximum drafts for a row in a step; None: 16 that are copied, 8 of a model, 4 of a head.
    """

    method: Speculate = "off"
    draft_model: str | None = None
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters over the model.

    Attributes:
        adapters: (name, folder) of all that requests may name: adapter_config.json and adapter_model.safetensors.
        max_loras: maximum adapters that are loaded at a time, and rows of a step may have; others wait.
        cache_bytes: maximum bytes of host memory for adapters that were read and have no place now; they get their next
            one without being read again.
        merge: add the only adapter to the weights when they are loaded (`engine.adapters.merged`). They are then the
            model, and requests name no adapter.
    """

    adapters: tuple[tuple[str, str], ...] = ()
    max_loras: int = 8
    cache_bytes: int = 1 << 30
    merge: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of `Engine.load` other than the model's path.

    Attributes:
        own_models: compute the families that this engine has code for with that code; False: with transformers' code.
        dtype: of weights, activations and KV; "auto": bfloat16 where the CPU multiplies it natively, else float32.
        max_model_len: maximum tokens of one sequence; None: the model's own limit.
        threads: for compute; None: torch's default.
        attention: name of the backend (`engine.attention.backend_names`); "auto" picks the best one for the device, on
            CUDA by measuring (`engine.attention.measured`).
        instruction_set: of the native CPU kernels ("avx2", "avx512", "avx512_bf16", "amx"); "auto": the best available.
        quantize: weights at load. "none": as in the checkpoint; quantized ones stay quantized where the device has a
            kernel for their form. "dense": dequantized to `dtype`. "int8": with activations quantized row by row
            (W8A8), where that is faster; "int8-weight-only": activations stay as they are (W8A16). "int4" and "fp8":
            weights only, rounded to nearest in groups of 32 and by rows.
        kv_dtype: of the cache; "int8" (on a CPU) and "fp8" (on a GPU) halve it, with one scale per token and head.
        tensor_parallel: devices of this machine that share each layer, each with a process of its own. On a CPU they
            are processes that share `threads`; memory limits are for the sum of all of them.
        pipeline_parallel: stages of `tensor_parallel` devices each; a stage has some consecutive layers of the model.
        micro_batches: parts of a step, of whole rows, that stages compute at the same time; fewer where a step has
            fewer rows. None: as many as pay (`engine.parallel.pipeline`).
        expert_parallel: with tensor parallelism, each rank holds whole experts of a mixture, not a part of each.
        expert_counts: a file of `Engine.expert_load().rows`, by `numpy.save`: experts are placed on ranks so that the
            sums of these counts are balanced; None: neighbours are on one rank.
        rank_timeout_seconds: time-out of a rank that waits for the others in a step; then the engine is lost.
        async_scheduling: plan and submit a step while the device computes the one before; None: on CUDA. After rows
            with masks, penalties or log-probabilities, rows whose prompt is scored or pooled, and steps with drafts,
            the next step waits for the results.
        cuda_graphs: capture the forward passes of steps of some shapes when the engine starts; None: on CUDA, where
            model, attention and memory allow it. True: refuse to start where that is impossible.
        max_graph_tokens: maximum tokens of a step that uses a graph and doesn't only decode; larger ones take longer to
            compute than to launch. None: 512, and on CUDA chosen with the size of a step.
    """

    own_models: bool = True
    dtype: DType = "auto"
    device: Device = "auto"
    max_model_len: int | None = None
    threads: int | None = None
    attention: str = "auto"
    instruction_set: str = "auto"
    quantize: Quantize = "none"
    kv_dtype: KVDType = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    micro_batches: int | None = None
    expert_parallel: bool = False
    expert_counts: str | None = None
    rank_timeout_seconds: float = 120.0
    async_scheduling: bool | None = None
    cuda_graphs: bool | None = None
    max_graph_tokens: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def num_ranks(self) -> int:
        """Devices that share the model."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def graph_tokens(self) -> int:
        """Maximum tokens of a step that uses a graph and doesn't only decode."""
        return 512 if self.max_graph_tokens is None else self.max_graph_tokens
