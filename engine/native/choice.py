"""Decides whether an engine uses the native kernels, and with which instruction set."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.logs import get_logger
from engine.native.build import NativeUnavailable
from engine.native.library import NativeLibrary, load_library
from engine.native.structs import KIND_OF

logger = get_logger(__name__)

NATIVE = "native"

NO_FP8_HERE = "kv_dtype 'fp8' needs a GPU of compute capability 8.9 or later; a CPU has int8"


def native_library(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> NativeLibrary | None:
    """Return the kernels, or None where torch's operators are used.

    With attention "auto" they are used wherever possible; otherwise a warning is logged once.

    Raises:
        EngineError: they were selected by name, or an option needs them, and they can't be used.
    """
    if config.kv_dtype == "fp8" and device.type == "cpu" and config.attention in ("auto", NATIVE):
        raise EngineError(NO_FP8_HERE)
    requested = [
        f"{name} {value!r}"
        for name, value in (("instruction_set", config.instruction_set), ("kv_dtype", config.kv_dtype))
        if value not in ("auto", "fp8")  # which is Triton's
    ]
    if config.attention not in ("auto", NATIVE):
        if requested:
            raise EngineError(f"{requested[0]} is of the native kernels, but attention is {config.attention!r}")
        return None
    if config.attention == NATIVE:
        requested.append(f"attention {NATIVE!r}")
    try:
        if device.type != "cpu":
            raise NativeUnavailable(f"the native kernels are for the CPU, not {device.type}")
        if dtype not in KIND_OF:
            raise NativeUnavailable(f"the native kernels compute in bfloat16 and float32, not {dtype}")
        return load_library(config.instruction_set, config.threads)
    except NativeUnavailable as error:
        if requested:
            raise EngineError(f"{requested[0]} is not available here: {error}") from error
        if device.type == "cpu":
            logger.warning("torch's operators serve, slower than the native kernels would", reason=str(error))
        return None
