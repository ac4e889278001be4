"""The native kernels' paths, for tests that run on each: every instruction set, and the matrix primitives.

A path that this processor lacks is skipped, and the test says so. "brgemm" is what "amx" computes with, on whatever
instructions torch's primitives find here: the code around them is the same.
"""

from __future__ import annotations

from functools import cache

import pytest

from engine.native.build import INSTRUCTION_SETS, NativeUnavailable, build
from engine.native.library import NativeLibrary

PATHS = (*INSTRUCTION_SETS, "brgemm")


@cache
def native_path(name: str, threads: int = 2) -> NativeLibrary:
    """The kernels of one path; skips the test where the processor lacks it."""
    try:
        path = build()
        if name == "brgemm":
            return NativeLibrary(path, "avx512_bf16", threads, brgemm=True)
        return NativeLibrary(path, name, threads)
    except NativeUnavailable as error:
        pytest.skip(str(error))
