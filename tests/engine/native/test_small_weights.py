"""Small weights give the bits that their dequantized model gives: in every form, shape, batch and instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.errors import CorruptWeights
from engine.models.native import NativeBuilder
from engine.native.library import NativeLibrary
from engine.native.linear import NativeLinear
from engine.native.packing import pack_quantized, runs_small
from engine.native.structs import KIND_OF, ElementKind
from engine.native.workspace import KernelWorkspace
from engine.quant.weight import Activations, QWeight
from tests.engine.native.quantized_weights import WEIGHT_KINDS, int8_rows, random_weight
from tests.native_paths import PATHS, native_path

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
SHAPES = ((1, 2, 2), (17, 48, 16), (33, 49, 49), (33, 50, 32), (70, 194, 24), (100, 577, 32), (257, 384, 384))
"""Columns, depth and group: less than a panel, some and a piece; the last group whole and broken; words half filled;
groups that end inside a word of eight nibbles."""


@pytest.fixture(params=PATHS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return native_path(request.param)


def small(library: NativeLibrary, weight: QWeight, bias: Tensor | None = None) -> NativeLinear:
    return NativeLinear(library, pack_quantized(library, weight, bias))


def dense(library: NativeLibrary, weight: QWeight, dtype: torch.dtype, bias: Tensor | None = None) -> NativeLinear:
    """The linear of the weight dequantized to `dtype`."""
    return NativeLinear.dense(library, KIND_OF[dtype], weight.dequantize(dtype), bias)


def rows_of(count: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(k)).to(dtype)


def product(linear: NativeLinear, x: Tensor) -> Tensor:
    return linear.product(
        x, KernelWorkspace.for_linear(linear.library, linear.in_features, len(x), reorders=linear.reorders)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WEIGHT_KINDS)
def test_products_are_those_of_the_dequantized_weight(name: str, dtype: str, library: NativeLibrary) -> None:
    for n, k, group in SHAPES:
        weight, bias = random_weight(WEIGHT_KINDS[name], n, k, group), torch.randn(n)
        x = rows_of(250, k, DTYPES[dtype])
        want = product(dense(library, weight, DTYPES[dtype], bias), x)
        assert want.isfinite().all()
        linear = small(library, weight, bias)
        for rows in (1, 2, 3, 6, 7, 33, 121, 250):
            assert torch.equal(product(linear, x[:rows]), want[:rows]), (n, k, group, rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [90, 320])  # 320: whole tiles of AMX
@pytest.mark.parametrize("name", ["int4, two levels (Q4_K)", "int8, float32", "fp8"])
def test_every_number_of_rows_gives_the_same_bits(name: str, k: int, dtype: str, library: NativeLibrary) -> None:
    weight = random_weight(WEIGHT_KINDS[name], 70, k, 16)
    x = rows_of(130, k, DTYPES[dtype])
    want, linear = product(dense(library, weight, DTYPES[dtype]), x), small(library, weight)
    space = KernelWorkspace.for_linear(library, k, 130)
    for rows in range(1, 131):
        assert torch.equal(linear.product(x[:rows], space), want[:rows]), rows


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHT_KINDS)
def test_threads_change_no_bit(name: str, library: NativeLibrary) -> None:
    weight = random_weight(WEIGHT_KINDS[name], 257, 194, 16)
    for threads in (1, 3):
        other = NativeLibrary(library.path, library.name, threads)
        for rows in (1, 5, 130):
            x = rows_of(rows, 194, torch.bfloat16)
            assert torch.equal(product(small(library, weight), x), product(small(other, weight), x)), (threads, rows)


@pytest.mark.parametrize("name", WEIGHT_KINDS)
@pytest.mark.slow
def test_the_argmax_is_that_of_the_dequantized_weight(name: str, library: NativeLibrary) -> None:
    weight = random_weight(WEIGHT_KINDS[name], 263, 90, 32)
    for rows in (1, 4, 40):
        x = rows_of(rows, 90, torch.bfloat16)
        space = KernelWorkspace.for_linear(library, 90, rows)
        best, finite = small(library, weight).argmax(x, space)
        assert finite.all()
        assert torch.equal(best, dense(library, weight, torch.bfloat16).argmax(x, space)[0])


@pytest.mark.slow
@pytest.mark.parametrize("inner", [32, 45, 100])
@pytest.mark.parametrize("name", WEIGHT_KINDS)
def test_gate_and_up_are_interleaved_as_dense_ones_are(name: str, inner: int, library: NativeLibrary) -> None:
    builder, weight = NativeBuilder(library), random_weight(WEIGHT_KINDS[name], 2 * inner, 50, 16)
    bias = torch.randn(2 * inner)
    x = rows_of(9, 50, torch.bfloat16)
    got, want = builder.gated(weight, bias), builder.gated(weight.dequantize(torch.bfloat16), bias)
    assert got.out_features == want.out_features
    assert torch.equal(got(x), want(x))


@pytest.mark.parametrize("name", ["int4, scale and low (Q4_1)", "int8, float32", "fp8"])
@pytest.mark.slow
def test_inputs_are_gathered_for_columns_in_an_order_of_their_own(name: str, library: NativeLibrary) -> None:
    weight = random_weight(WEIGHT_KINDS[name], 70, 90, 16, ordered=True)
    assert weight.order is not None
    natural = weight.dequantize()
    stored = natural[:, weight.order]
    for dtype in DTYPES.values():
        for rows in (1, 4, 121):
            x = rows_of(rows, 90, dtype)
            got = product(small(library, weight), x)
            gathered = NativeLinear.dense(library, KIND_OF[dtype], stored.to(dtype))
            assert torch.equal(got, product(gathered, x[:, weight.order]))
            wanted = x.double() @ natural.to(dtype).double().t()
            assert (got - wanted).norm() < 1e-5 * wanted.norm()  # the sums run in the columns' order


def test_int8_rows_for_int8_inputs_keep_their_codes(library: NativeLibrary) -> None:
    weight = int8_rows(70, 577, activations=Activations("int8"))
    linear = small(library, weight, bias := torch.randn(70))
    assert linear.kind == ElementKind.I8
    for rows in (1, 3, 40, 121):
        # Whole numbers up to 127, one of which is that in each group: quantizing them changes nothing.
        x = torch.randint(-127, 128, (rows, 577)).float()
        x[:, ::64] = 127
        wanted = x.double() @ weight.dequantize().double().t() + bias
        for dtype in DTYPES.values():
            assert (product(linear, x.to(dtype)) - wanted).norm() < 1e-6 * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rows_for_other_inputs_are_dequantized_bit_for_bit(dtype: str, library: NativeLibrary) -> None:
    weight = int8_rows(70, 577)
    linear = small(library, weight)
    assert linear.kind == ElementKind.Q8
    for rows in (1, 40):
        x = rows_of(rows, 577, DTYPES[dtype])
        assert torch.equal(product(linear, x), product(dense(library, weight, DTYPES[dtype]), x))


@pytest.mark.parametrize("name", WEIGHT_KINDS)
def test_they_take_the_memory_of_their_stored_form(name: str, library: NativeLibrary) -> None:
    weight = random_weight(WEIGHT_KINDS[name], 640, 576, 32)
    assert weight.nbytes <= small(library, weight).num_bytes <= weight.nbytes + 64


def test_what_the_kernels_cannot_follow_is_not_taken() -> None:
    kind = WEIGHT_KINDS["int4, scale"]
    builder = NativeBuilder(native_path("avx2"))
    assert runs_small(random_weight(kind, 8, 45, 45))
    assert builder.runs(random_weight(kind, 8, 45, 16), "linear")
    assert not builder.runs(random_weight(kind, 8, 45, 15), "linear")  # a word's two columns in two groups


def test_a_code_that_is_no_number_is_refused() -> None:
    weight = random_weight(WEIGHT_KINDS["fp8"], 8, 16, 16)
    weight.codes.view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(CorruptWeights, match="fp8 weight holds NaN"):
        pack_quantized(native_path("avx2"), weight)
