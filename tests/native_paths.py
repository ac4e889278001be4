"""The native kernels' paths, for tests that run on each: every instruction set.

A path that this processor lacks is skipped, and the test says so; `make test-emulated` emulates it instead.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from engine.native import build as building
from engine.native import library
from engine.native.build import INSTRUCTION_SETS, NativeUnavailable, build
from engine.native.library import NativeLibrary

PATHS = tuple(INSTRUCTION_SETS)

EMULATION = Path(__file__).parent / "engine/native/emulation"
"""Folder of an immintrin.h that emulates the larger instruction sets on AVX2."""

_QUICKLY = ("-Og", "-ffp-contract=off", "-Wno-psabi")
"""Compiler options for emulated kernels: full optimization would take minutes."""


@cache
def native_path(name: str, threads: int = 2) -> NativeLibrary:
    """The kernels of one path; skips the test where the processor lacks it."""
    try:
        return NativeLibrary(build(name), name, threads)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def emulate(patch: pytest.MonkeyPatch, name: str) -> None:
    """Make this a processor of AVX2 and one larger instruction set, whose kernels are built with their instructions
    emulated."""
    sources, compile_kernels = building._sources, building._compile

    def compile_emulated(compiler: list[str], instruction_set: str, folder: Path) -> Path:
        if instruction_set != name:
            return compile_kernels(compiler, instruction_set, folder)
        with pytest.MonkeyPatch.context() as options:
            options.setattr(building, "_COMMON", (*building._COMMON, *_QUICKLY))
            emulation = (f"-I{EMULATION}", f"-DEMULATED_SET={PATHS.index(name)}")
            return compile_kernels([*compiler, *emulation], "avx2", folder)

    patch.setattr(building, "_compile", compile_emulated)
    patch.setattr(building, "_sources", lambda: [*sources(), *EMULATION.iterdir(), Path(__file__)])
    for module in (building, library):
        patch.setattr(module, "processor_sets", lambda: ["avx2", name])


def emulate_as_asked() -> None:
    """Emulate, for this process, the instruction set that EMULATE_KERNELS names, if it names one."""
    if name := os.environ.get("EMULATE_KERNELS"):
        emulate(pytest.MonkeyPatch(), name)
