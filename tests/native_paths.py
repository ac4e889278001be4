"""The native kernels' paths, for tests that run on each: every instruction set.

A path that this processor lacks is skipped, and the test says so.
"""

from __future__ import annotations

from functools import cache

import pytest

from engine.native.build import INSTRUCTION_SETS, NativeUnavailable, build
from engine.native.library import NativeLibrary

PATHS = tuple(INSTRUCTION_SETS)


@cache
def native_path(name: str, threads: int = 2) -> NativeLibrary:
    """The kernels of one path; skips the test where the processor lacks it."""
    try:
        return NativeLibrary(build(name), name, threads)
    except NativeUnavailable as error:
        pytest.skip(str(error))
