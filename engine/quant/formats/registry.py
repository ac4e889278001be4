"""Selects the reader of a checkpoint's format by its `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from engine.errors import UnsupportedModel
from engine.quant.formats.awq import AWQ
from engine.quant.formats.base import Format, QuantizedCheckpoint, StoredTensors
from engine.quant.formats.compressed_tensors import Arguments, CompressedTensors
from engine.quant.formats.fp8 import BlockFP8
from engine.quant.formats.gptq import GPTQ
from engine.quant.formats.settings import read_settings

_METHODS: dict[str, Callable[[StoredTensors, Mapping[str, Any]], Format]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": GPTQ,
    "awq": AWQ,
    "fp8": BlockFP8,
}


def quantized_checkpoint(stored: StoredTensors, settings: Mapping[str, Any]) -> QuantizedCheckpoint:
    """The weights of a checkpoint whose config has these settings under `quantization_config`.

    Raises:
        UnsupportedModel: a method or a layout that can't be read, or a value that makes no sense; names the key.
        CorruptWeights: tensors contradict the settings; names the tensor.
    """
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        known = ", ".join(_METHODS)
        raise UnsupportedModel(f"quantization_config.quant_method is {str(method)[:40]!r}; what can be read is {known}")
    return QuantizedCheckpoint(stored, _METHODS[method](stored, settings))


def cache_form(settings: Mapping[str, Any] | None) -> Literal["int8", "fp8"] | None:
    """Return the KV cache dtype of a checkpoint, if specified.

    Raises:
        UnsupportedModel: the value is invalid; names the key.
    """
    if settings is None or settings.get("kv_cache_scheme") is None:
        return None
    given = settings["kv_cache_scheme"]
    if not isinstance(given, dict):
        raise UnsupportedModel("quantization_config.kv_cache_scheme must be an object")
    scheme = read_settings(Arguments, given)
    if scheme.num_bits != 8:
        raise UnsupportedModel(f"quantization_config.kv_cache_scheme.num_bits is {scheme.num_bits}; 8 can be had")
    return "int8" if scheme.type == "int" else "fp8"
