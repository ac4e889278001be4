"""The kernels of the larger instruction sets, emulated on AVX2: right for every number of rows, and in a whole engine.

`make test-emulated` runs all tests of the kernels on them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.native.library import NativeLibrary, load_library
from engine.native.linear import NativeLinear
from tests.engine.adapters.test_adapters import Work
from tests.engine.native import test_native_experts as mixtures
from tests.engine.native.quantized_weights import WEIGHT_KINDS, random_weight
from tests.engine.native.test_native_linear import KINDS, exact, product, random_inputs, relative_error
from tests.engine.native.test_small_weights import dense, rows_of, small
from tests.native_paths import PATHS, emulate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="emulated kernels are compiled with g++, which is missing"),
]

MOST_ROWS = 70


@pytest.fixture(params=PATHS[1:])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NativeLibrary:
    monkeypatch.setenv("CXX", "g++")
    emulate(monkeypatch, request.param)
    return load_library(request.param, 2)


@pytest.mark.parametrize("k", [90, 320])  # 320: whole tiles of AMX
def test_every_number_of_rows_gives_the_products(k: int, library: NativeLibrary) -> None:
    for name, (kind, dtype, most) in KINDS.items():
        weight, bias, x = random_inputs(150, k, MOST_ROWS, dtype)
        linear = NativeLinear.dense(library, kind, weight, bias)
        together = product(linear, x)
        assert relative_error(together, exact(x, weight, bias, kind)) < most, name
        for rows in range(1, MOST_ROWS):
            assert torch.equal(product(linear, x[:rows]), together[:rows]), (name, rows)
    for name in ("int4, two levels (Q4_K)", "int8, two levels and low (Q5_K)", "fp8"):
        quantized = random_weight(WEIGHT_KINDS[name], 150, k, 16)
        x = rows_of(MOST_ROWS, k, torch.bfloat16)
        together = product(dense(library, quantized, torch.bfloat16), x)
        for rows in range(1, MOST_ROWS):
            assert torch.equal(product(small(library, quantized), x[:rows]), together[:rows]), (name, rows)


def test_experts_give_the_weighted_sum(library: NativeLibrary) -> None:
    for name, (_, _, most) in mixtures.KINDS.items():
        mixed = mixtures.mixture(library, mixtures.ROUTINGS["shared, gated"], name)
        for rows in (1, 5, 40):
            x = mixtures.inputs(rows, name)
            assert mixtures.relative_error(mixed.native.product(x), mixed.reference(x)) < most, (name, rows)


def test_an_engine_with_adapters_gives_transformers_tokens(
    library: NativeLibrary, tiny_model: Callable[[str], Path], adapters: ModuleType, tmp_path: Path
) -> None:
    work = Work(tiny_model("llama"), adapters, tmp_path)
    engine = work.engine(4, instruction_set=library.name)
    assert engine.attention_name == f"native ({library.name})"
    work.check(engine)
