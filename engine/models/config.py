"""Reads what a checkpoint says of itself, by transformers' config classes; code that comes with one is never run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from engine.errors import UnsupportedModel

_HEADS = ("CausalLM", "LMHeadModel", "ConditionalGeneration")


def folder_config(folder: Path) -> Any:
    """The transformers config of a Hugging Face folder.

    Raises:
        UnsupportedModel: no config that transformers knows, quantized weights, or no language-model head.
    """
    file = folder / "config.json"
    with _usable(file):
        raw = json.loads(file.read_bytes())
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if quantization := raw.get("quantization_config") or raw.get("compression_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(f"{folder} is quantized ({method}); give the unquantized weights or a GGUF file")
    architectures = config.architectures or []
    if architectures and not any(name.endswith(_HEADS) for name in architectures):
        raise UnsupportedModel(f"{architectures[0]} is not a causal language model")
    return config


def built_config(file: Path, model_type: str, **values: Any) -> Any:
    """A config of `model_type` from values that `file` gave.

    Raises:
        UnsupportedModel: the values contradict each other or lack something.
    """
    with _usable(file):
        return AutoConfig.for_model(model_type, **values)


def folder_end_tokens(folder: Path, config: Any) -> tuple[int, ...]:
    """End tokens of config.json and generation_config.json together, sorted."""
    ids = set(end_tokens(getattr(config.get_text_config(), "eos_token_id", None)))
    generation = folder / "generation_config.json"
    if generation.is_file():
        with _usable(generation):
            ids |= set(end_tokens(json.loads(generation.read_bytes()).get("eos_token_id")))
    return tuple(sorted(ids))


def end_tokens(value: Any) -> tuple[int, ...]:
    """A config's `eos_token_id` (a number, several, or none) as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


@contextmanager
def _usable(file: Path) -> Iterator[None]:
    try:
        yield
    except (StrictDataclassError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModel(f"{file} can't be used: {reason}") from error
