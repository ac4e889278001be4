"""Reads a checkpoint's config with transformers' config classes; a checkpoint's own code is never run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from engine.errors import EngineError, UnsupportedModel

_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4096),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 1 << 16),
    **dict.fromkeys(("hidden_size", "n_embd"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner", "vocab_size"), 1 << 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1 << 31) - 1),
}
"""Config key -> maximum accepted value; far beyond any model, far below a size that would fill the memory."""

_HEADS = ("CausalLM", "LMHeadModel", "ConditionalGeneration")


def folder_config(folder: Path) -> Any:
    """The transformers config of a Hugging Face folder.

    Raises:
        UnsupportedModel: no config that transformers knows.
    """
    file = folder / "config.json"
    quantization_settings(folder)
    with usable(file):
        raw = json.loads(file.read_bytes())
        for part in (raw, raw.get("text_config") or {}):
            check_sizes(file, part)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    architectures = config.architectures or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UnsupportedModel(f"{file} can't be used: architectures is {architectures!r}, but must be a list of names")
    return config


def has_head(config: Any) -> bool:
    """Whether the checkpoint's config declares a language-model head; without a declaration it is assumed."""
    architectures = config.architectures or []
    return not architectures or any(name.endswith(_HEADS) for name in architectures)


def quantization_settings(folder: Path) -> dict[str, Any] | None:
    """Return `quantization_config` of a folder's config.json, unchecked; None: its weights are not quantized.

    Raises:
        UnsupportedModel: the file can't be read, or contains no object.
    """
    with usable(folder / "config.json"):
        raw = json.loads((folder / "config.json").read_bytes())
        settings = raw.get("quantization_config") or raw.get("compression_config") or None
    if settings is not None and not isinstance(settings, dict):
        kind = type(settings).__name__
        raise UnsupportedModel(f"{folder / 'config.json'}: quantization_config is a {kind}, but must be an object")
    return settings


def built_config(file: Path, model_type: str, **values: Any) -> Any:
    """A config of `model_type` from values that `file` gave.

    Raises:
        UnsupportedModel: the values contradict each other or lack something.
    """
    with usable(file):
        check_sizes(file, values)
        return AutoConfig.for_model(model_type, **values)


def folder_end_tokens(folder: Path, config: Any) -> tuple[int, ...]:
    """End tokens of config.json and generation_config.json together, sorted.

    Raises:
        UnsupportedModel: one of the two can't be read.
    """
    with usable(folder / "config.json"):
        text = config.get_text_config()
        ids = set(end_tokens(getattr(text, "eos_token_id", None)))
        vocab_size = int(text.vocab_size)
    generation = folder / "generation_config.json"
    if generation.is_file():
        with usable(generation):
            ids |= set(end_tokens(json.loads(generation.read_bytes()).get("eos_token_id")))
    return tuple(sorted(token_id for token_id in ids if 0 <= token_id < vocab_size))


def end_tokens(value: Any) -> tuple[int, ...]:
    """A config's `eos_token_id` (a number, several, or none) as a tuple; raises TypeError for anything else."""
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    if not all(isinstance(token_id, int) for token_id in ids):
        raise TypeError(f"eos_token_id is {value!r}, but must be a number or several")
    return ids


def check_sizes(file: Path, values: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, before any list or tensor is made so long.

    Raises:
        UnsupportedModel: naming the size.
    """
    for name, most in _SIZES.items():
        value = values.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise UnsupportedModel(f"{file} can't be used: {name} is {value!r}, but must be from 1 to {most}")


@contextmanager
def usable(file: Path) -> Iterator[None]:
    """Every exception that reading `file` raises becomes `UnsupportedModel`, in one line. The engine's own errors and
    failed allocations stay what they are.

    The set of exceptions is open: config classes check their values with whatever they like, and those of models whose
    layers differ raise a RuntimeError for each value that has no single answer.
    """
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModel(f"{file} can't be used: {reason}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
