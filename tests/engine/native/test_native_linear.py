"""The kernels' products with weights, on every path: what they are, whatever the shape, and for each row by itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.native.library import NativeLibrary
from engine.native.linear import NativeLinear
from engine.native.structs import ElementKind
from engine.native.workspace import KernelWorkspace
from tests.native_paths import PATHS, native_path

KINDS = {
    "f32": (ElementKind.F32, torch.float32, 1e-5),
    "bf16": (ElementKind.BF16, torch.bfloat16, 1e-5),
    "w8-f32": (ElementKind.W8, torch.float32, 0.009),
    "w8-bf16": (ElementKind.W8, torch.bfloat16, 0.009),
    "i8-f32": (ElementKind.I8, torch.float32, 0.013),
    "i8-bf16": (ElementKind.I8, torch.bfloat16, 0.013),
}
"""Name -> kind of the weights, dtype of the rows, and how far the products may be off from those of float32 weights
(in bfloat16: of the rounded weights)."""

SHAPES = ((1, 2), (16, 16), (17, 48), (33, 49), (33, 50), (70, 194), (100, 577), (257, 384))
"""Columns and depth: less than a panel, one, a few and a piece; depths that fill no word, no group of scales."""

ROWS = (1, 3, 16, 33, 121, 250)


def random_inputs(n: int, k: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weight [n, k], bias [n] and rows [rows, k]."""
    random = torch.Generator().manual_seed(1000 * n + k + rows)
    x = torch.randn(rows, k, generator=random).to(dtype)
    return torch.randn(n, k, generator=random), torch.randn(n, generator=random), x


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, kind: ElementKind) -> Tensor:
    stored = weight.bfloat16() if kind == ElementKind.BF16 else weight
    y = x.double() @ stored.double().t()
    return y if bias is None else y + bias.double()


def product(linear: NativeLinear, x: Tensor) -> Tensor:
    return linear.product(x, KernelWorkspace.for_linear(linear.library, linear.in_features, len(x)))


def argmax(linear: NativeLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    return linear.argmax(x, KernelWorkspace.for_linear(linear.library, linear.in_features, len(x)))


def relative_error(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


@pytest.fixture(params=PATHS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return native_path(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_their_argmax_are_those_of_the_weights(
    name: str, shape: tuple[int, int], library: NativeLibrary
) -> None:
    kind, dtype, most = KINDS[name]
    for rows in ROWS:
        weight, bias, x = random_inputs(*shape, rows, dtype)
        # Below zero the padding's zeros would be the largest.
        for number, added in enumerate((bias, None, bias - 50.0)):
            linear = NativeLinear.dense(library, kind, weight, added)
            y = product(linear, x)
            assert (y.shape, y.dtype) == ((rows, shape[0]), torch.float32)
            # Few quantized elements can be further off than many.
            allowed = most if most < 1e-4 else most * (1 + 40 / math.prod((*shape, rows)))
            assert relative_error(y, exact(x, weight, added, kind)) < allowed, (rows, number)
            assert torch.equal(linear(x), y.to(dtype))
            best, finite = argmax(linear, x)
            assert torch.equal(best, y.argmax(dim=1)), (rows, number)
            assert finite.all()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow
def test_a_weight_that_is_packed_in_several_pieces_is_whole(name: str, library: NativeLibrary) -> None:
    kind, dtype, most = KINDS[name]
    weight, bias, x = random_inputs(9001, 20, 2, dtype)
    assert (
        relative_error(product(NativeLinear.dense(library, kind, weight, bias), x), exact(x, weight, bias, kind)) < most
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    name: str, shape: tuple[int, int], library: NativeLibrary
) -> None:
    kind, dtype, _ = KINDS[name]
    weight, bias, x = random_inputs(*shape, 250, dtype)
    linear = NativeLinear.dense(library, kind, weight, bias)
    together = product(linear, x)
    for first, last in ((0, 1), (7, 8), (119, 121), (100, 230), (249, 250)):
        assert torch.equal(product(linear, x[first:last]), together[first:last]), (first, last)
    best, _ = argmax(linear, x)
    assert argmax(linear, x[130:131])[0][0] == best[130]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow
def test_rows_that_fill_tiles_or_part_of_one_are_the_same(name: str, library: NativeLibrary) -> None:
    """Given a depth of whole tiles of AMX, in several parts of them and of a group's scales."""
    kind, dtype, most = KINDS[name]
    weight, bias, x = random_inputs(70, 576, 130, dtype)
    linear = NativeLinear.dense(library, kind, weight, bias)
    together = product(linear, x)
    assert relative_error(together, exact(x, weight, bias, kind)) < most
    for rows in (1, 15, 16, 17, 33, 49):
        assert torch.equal(product(linear, x[:rows]), together[:rows]), rows


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(name: str, threads: int, library: NativeLibrary) -> None:
    kind, dtype, _ = KINDS[name]
    other = NativeLibrary(library.path, library.name, threads)
    weight, bias, x = random_inputs(257, 194, 130, dtype)
    ours, theirs = (NativeLinear.dense(each, kind, weight, bias) for each in (library, other))
    assert torch.equal(product(ours, x), product(theirs, x))
    assert torch.equal(argmax(ours, x)[0], argmax(theirs, x)[0])


@pytest.mark.parametrize("name", KINDS)
def test_of_equal_products_the_lowest_column_wins(name: str, library: NativeLibrary) -> None:
    kind, dtype, _ = KINDS[name]
    weight, _, x = random_inputs(200, 48, 125, dtype)
    for same in ((3, 4), (15, 16), (31, 170), (40, 99, 199)):
        largest = weight.clone()
        largest[list(same)] = 30 * x[0].float()  # the first row's product is by far the largest here, several times
        best, _ = argmax(NativeLinear.dense(library, kind, largest), x)
        assert best[0] == same[0]
    best, finite = argmax(NativeLinear.dense(library, kind, torch.zeros(200, 48)), x)
    assert not best.any()
    assert finite.all()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_non_finite_rows_are_reported_and_change_no_other(name: str, broken: float, library: NativeLibrary) -> None:
    kind, dtype, _ = KINDS[name]
    weight, bias, x = random_inputs(70, 50, 124, dtype)
    linear = NativeLinear.dense(library, kind, weight, bias)
    sound, before = product(linear, x), argmax(linear, x)[0]
    for row, column in ((1, 0), (60, 49), (121, 17)):
        x[row, column] = broken
    spoilt = torch.tensor([1, 60, 121])
    rest = torch.tensor([row for row in range(124) if row not in (1, 60, 121)])
    y, (best, finite) = product(linear, x), argmax(linear, x)
    assert not y[spoilt].isfinite().any()
    assert torch.equal(y[rest], sound[rest])
    assert not finite[spoilt].any()
    assert finite[rest].all()
    assert torch.equal(best[rest], before[rest])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("column", [0, 15, 16, 69])
def test_a_column_of_minus_infinity_is_allowed_and_other_infinities_are_not(path: str, column: int) -> None:
    library = native_path(path)
    weight, bias, x = random_inputs(70, 48, 5, torch.float32)
    for value, allowed in ((-math.inf, True), (math.inf, False), (math.nan, False)):
        bias[column] = value
        linear = NativeLinear.dense(library, ElementKind.F32, weight, bias)
        best, finite = argmax(linear, x)
        assert finite.tolist() == [allowed] * 5
        if allowed:
            assert torch.equal(best, product(linear, x).argmax(dim=1))
    nothing = NativeLinear.dense(library, ElementKind.F32, weight, torch.full((70,), -math.inf))
    assert not argmax(nothing, x)[1].any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", KINDS)
def test_no_rows_are_no_work(path: str, name: str) -> None:
    kind, dtype, _ = KINDS[name]
    linear = NativeLinear.dense(native_path(path), kind, torch.ones(20, 8))
    assert linear(torch.ones(0, 8, dtype=dtype)).shape == (0, 20)
    assert argmax(linear, torch.ones(0, 8, dtype=dtype))[0].shape == (0,)


@pytest.mark.parametrize("path", PATHS)
def test_quantized_weights_take_the_expected_memory(path: str) -> None:
    library = native_path(path)
    weight, _, _ = random_inputs(640, 576, 1, torch.float32)
    sizes = {kind: NativeLinear.dense(library, kind, weight).num_bytes for kind, _, _ in KINDS.values()}
    assert sizes[ElementKind.BF16] == pytest.approx(weight.nbytes / 2, rel=0.01)
    for kind in (ElementKind.I8, ElementKind.W8):
        assert sizes[kind] == pytest.approx(weight.nbytes / 4, rel=0.05)


@pytest.mark.parametrize("path", PATHS)
def test_rows_that_do_not_lie_side_by_side_are_read_as_they_are(path: str) -> None:
    weight, _, x = random_inputs(33, 48, 12, torch.float32)
    linear = NativeLinear.dense(native_path(path), ElementKind.F32, weight)
    assert torch.equal(linear(x[::3]), linear(x)[::3])
    assert torch.equal(linear(x.t().contiguous().t()), linear(x))


@pytest.mark.parametrize(("kind", "dtype"), [(ElementKind.F32, torch.bfloat16), (ElementKind.BF16, torch.float32)])
def test_rows_of_another_dtype_than_the_weights_are_refused(kind: ElementKind, dtype: torch.dtype) -> None:
    linear = NativeLinear.dense(native_path("avx2"), kind, torch.ones(20, 8))
    for dtype_of_rows in (dtype, torch.float16):
        x = torch.ones(2, 8, dtype=dtype_of_rows)
        for call in (product, argmax):
            with pytest.raises(EngineError, match=f"packed as {kind.name} can't be multiplied with {dtype_of_rows}"):
                call(linear, x)
