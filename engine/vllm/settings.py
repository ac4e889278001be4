"""vLLM's settings: from the engine's own, and from options that are passed on by their names in `EngineArgs`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from engine.config import EngineConfig
from engine.errors import ModelNotFound, UnsupportedModel
from engine.vllm.process import prepare_process

OURS: Final[Mapping[str, str]] = {
    "model": "give --model",
    "tokenizer": "the model's own is used",
    "served_model_name": "give --model NAME=MODEL",
    "dtype": "give --dtype",
    "quantize": "give the checkpoint's own form, or quantization=…",
    "trust_remote_code": "a model's code is never executed",
    "load_format": "weights are read from safetensors only",
    "skip_tokenizer_init": "grammars need the tokenizer",
    "scheduling_policy": "tiers need priorities",
    "disable_log_stats": "metrics need them",
    "generation_config": "a request's own settings count",
    "runner": "the model decides",
    "convert": "the model decides",
    "max_num_seqs": "give --max-num-seqs",
    "max_num_batched_tokens": "give --max-num-batched-tokens",
    "stream_interval": "streams and checkpoints need each token",
    "hf_token": "weights are on this machine",
    "draft_load_config": "weights are read from safetensors only",
    "model_class_overrides": "they are code",
    "reasoning_parser_plugin": "it is code",
    "tool_parser_plugin": "it is code",
    "io_processor_plugin": "it is code",
    "logits_processors": "they are code",
    "worker_cls": "it is code",
    "worker_extension_cls": "it is code",
    "scheduler_cls": "it is code",
    "data_parallel_size": "give --replicas",
    "enable_lora": "give --adapter NAME=FOLDER",
    "max_loras": "give --max-loras",
    "max_lora_rank": "the adapters decide",
}  # fmt: skip
"""Arguments that tokenmill sets or refuses, with what to do instead."""

RESOURCES: Final = frozenset(
    {
        "tensor_parallel_size", "enable_expert_parallel", "pipeline_parallel_size", "gpu_memory_utilization",
        "kv_cache_memory_bytes", "enforce_eager", "swap_space", "cpu_offload_gb", "block_size",
        "max_parallel_loading_workers", "distributed_executor_backend", "async_scheduling", "speculative_config",
    }
)  # fmt: skip
"""Arguments that change where and how fast answers are computed, so that they aren't part of a model's pin. Drafts are
checked by the model, here as in the engine of this project."""

LANE_ROWS: Final = 64
"""Rows beyond `max_num_seqs` for requests of class 0: vLLM preempts for memory, but not for a row."""


class InvalidOption(UnsupportedModel):
    """Raised for an option that vLLM does not have, or that tokenmill sets itself."""


def parse_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options: JSON where they are JSON, else strings; names as in `EngineArgs`, in lower case, also with
    dashes. Raises `InvalidOption` for one that tokenmill sets itself."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        name = name.strip().lower().replace("-", "_")
        if name in OURS:
            raise InvalidOption(f"vLLM's option {name} can't be set: {OURS[name]}")
        options[name] = _parsed(value) if isinstance(value, str) else value
    speculative = options.get("speculative_config")
    if isinstance(speculative, dict) and speculative.get("method") == "custom_class":
        raise InvalidOption("vLLM's option speculative_config can't be of the method custom_class: it is code")
    return options


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def pinned_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The options that may change answers, as NAME=JSON, sorted: they are part of a model's pin."""
    return tuple(
        f"{name}={json.dumps(value, sort_keys=True)}"
        for name, value in sorted(options.items())
        if name not in RESOURCES
    )


def check_model(path: Path, config: EngineConfig, options: Mapping[str, Any]) -> None:
    """Check all that can be checked before a model is loaded: its files, and the settings.

    Raises:
        ModelNotFound: there is no model.  UnsupportedModel: vLLM can't load it here, or lacks a setting of the engine.
        InvalidOption: the installed vLLM has no such option.
    """
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"no model for vLLM at {path}: give a Hugging Face folder with config.json")
    if not any(path.glob("*.safetensors")):
        raise UnsupportedModel(f"{path} has no safetensors; vLLM loads nothing else here")
    for is_set, name, instead in _refused(config):
        if is_set:
            raise UnsupportedModel(f"{name} is not available with vLLM: {instead}")
    prepare_process()
    try:
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - the package is optional
    except ImportError as error:
        raise UnsupportedModel(f"vLLM can't be imported: {error}; see docs/vllm.md") from error
    known = {one.name for one in dataclasses.fields(EngineArgs)} - OURS.keys()
    for name in options:
        if name not in known:
            raise InvalidOption(f"vLLM has no option {name}; its options are those of 'vllm serve --help'")


def engine_arguments(
    path: str, config: EngineConfig, options: Mapping[str, Any], *, pools: bool, on_cpu: bool
) -> dict[str, Any]:
    """The arguments of `EngineArgs` for the model at `path`. On a GPU vLLM chooses the size of a step where the
    settings don't give it."""
    cache, schedule = config.cache, config.schedule
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": config.dtype,
        "seed": 0,
        # -1: the model's, or what the cache holds
        "max_model_len": config.max_model_len or (None if pools else -1),
        "load_format": "safetensors",
        "use_tqdm_on_load": False,
        "trust_remote_code": False,
        "generation_config": "vllm",
        "scheduling_policy": "priority",
        "enable_prefix_caching": cache.prefix_caching and not pools,
        "max_num_seqs": schedule.rows + min(schedule.rows, LANE_ROWS),
        "max_num_batched_tokens": None if pools else schedule.tokens,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache.memory_bytes,
        "enforce_eager": config.cuda_graphs is False,
        "disable_log_stats": False,
        "runner": "pooling" if pools else "generate",
    }
    given = {
        "kv_cache_dtype": config.kv_dtype if config.kv_dtype != "auto" else None,
        "block_size": cache.block_size,
        "async_scheduling": config.async_scheduling,
        "enable_expert_parallel": config.expert_parallel or None,
    }
    arguments |= {name: value for name, value in given.items() if value is not None}
    if not on_cpu:
        chosen = {name: None for name in ("max_num_seqs", "max_num_batched_tokens") if getattr(schedule, name) is None}
        arguments |= chosen
    if not pools:
        arguments |= {"max_logprobs": -1, "structured_outputs_config": {"backend": "guidance"}}
    return arguments | dict(options)


def rows_without_lane(rows: int) -> int:
    """The rows of the classes behind the first, of all `rows` of vLLM."""
    return max(rows - LANE_ROWS, rows // 2)


def _refused(config: EngineConfig) -> tuple[tuple[bool, str, str], ...]:
    """Settings of the engine that vLLM does not have: whether each is set, its name, and what to do instead."""
    speculation = config.speculation.method
    return (
        (config.quantize != "none", "--quantize", "give a quantized checkpoint, or --engine-option quantization=…"),
        (config.kv_dtype == "int8", "--kv-dtype int8", "give fp8 on a GPU, or auto"),
        (
            speculation not in ("off", "auto"),
            f"--speculate {speculation}",
            "give --engine-option speculative_config={…}",
        ),
        (config.cache.host_bytes is not None, "--kv-offloading-size", "give --engine-option kv_offloading_size=…"),
        (config.cache.tier_folder is not None, "--kv-cache-dir", "give --engine-option kv_transfer_config={…}"),
        (config.cache.exchange_bytes is not None, "--role", "give --engine-option kv_transfer_config={…}"),
        (config.lora.merge, "--merge-adapter", "leave it out, and let the requests name the adapter"),
        (config.micro_batches is not None, "--micro-batches", "its stages compute different steps at the same time"),
        (config.expert_counts is not None, "expert_counts", "give --engine-option enable_eplb=…"),
        (
            config.expert_parallel and config.tensor_parallel == 1,
            "--expert-parallel with one device",
            "give --tensor-parallel, too",
        ),
        (config.instruction_set != "auto", "TOKENMILL_INSTRUCTION_SET", "vLLM chooses it"),
        (config.attention != "auto", "TOKENMILL_ATTENTION", "give --engine-option attention_backend=…"),
        (
            config.max_graph_tokens is not None,
            "TOKENMILL_GPU__MAX_GRAPH_TOKENS",
            "give --engine-option max_cudagraph_capture_size=…",
        ),
    )
