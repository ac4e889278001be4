"""Whether the native kernels serve an engine, and with which instruction set."""

from __future__ import annotations

import structlog
import torch

from engine.errors import EngineError
from engine.native.build import NativeUnavailable
from engine.native.library import NativeLibrary, load_library
from engine.native.structs import KIND_OF

logger = structlog.get_logger(__name__)

NATIVE = "native"


def native_library(
    attention: str, instruction_set: str, dtype: torch.dtype, device: torch.device, threads: int | None
) -> NativeLibrary | None:
    """The kernels that serve, or None where torch's operators do.

    Args:
        attention: as in `EngineConfig`; with "auto" the kernels serve wherever they can, and it is said once if not.

    Raises:
        EngineError: they were asked for by name (or by instruction set), and can't serve.
    """
    asked = attention == NATIVE or instruction_set != "auto"
    if attention not in ("auto", NATIVE):
        if instruction_set != "auto":
            raise EngineError(
                f"instruction_set {instruction_set!r} is of the native kernels, but attention is {attention!r}"
            )
        return None
    try:
        if device.type != "cpu":
            raise NativeUnavailable(f"the native kernels are for the CPU, not {device.type}")
        if dtype not in KIND_OF:
            raise NativeUnavailable(f"the native kernels compute in bfloat16 and float32, not {dtype}")
        return load_library(instruction_set, threads)
    except NativeUnavailable as error:
        if asked:
            raise EngineError(str(error)) from error
        if device.type == "cpu":
            logger.warning("torch's operators serve, slower than the native kernels would", reason=str(error))
        return None
