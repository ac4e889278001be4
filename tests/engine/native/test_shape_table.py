"""Which products are faster in int8 is measured once on a machine, and stored next to the kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.models.native import NativeBuilder
from engine.native.library import NativeLibrary, load_library
from engine.native.linear import NativeLinear
from engine.native.shapes import ROWS, ShapeTable
from engine.native.structs import ElementKind
from tests.native_paths import native_path

FAST, SLOW = [1e-6] * len(ROWS), [1e-3] * len(ROWS)


@pytest.fixture
def library() -> NativeLibrary:
    return native_path("avx2", 1)


def table_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_a_shape_is_measured_once_and_read_again(library: NativeLibrary, tmp_path: Path) -> None:
    # Given a shape that was not measured yet, when it is requested
    table = ShapeTable(library, torch.float32, tmp_path)
    assert table.times == {}
    answer = table.int8_is_faster(64, 48)
    # Then its times are stored, of each kind at each number of rows
    times = json.loads(table_file(tmp_path).read_text())["64x48"]
    assert set(times) == {"F32", "I8"}
    assert all(len(seconds) == len(ROWS) and min(seconds) > 0 for seconds in times.values())
    # and the next request is answered from them
    before = table_file(tmp_path).stat().st_mtime_ns
    again = ShapeTable(library, torch.float32, tmp_path)
    assert again.times == {"64x48": times}
    assert again.int8_is_faster(64, 48) == answer == table.int8_is_faster(64, 48)
    assert table_file(tmp_path).stat().st_mtime_ns == before
    # Another shape is added to the table
    again.int8_is_faster(32, 48)
    assert set(json.loads(table_file(tmp_path).read_text())) == {"64x48", "32x48"}


@pytest.mark.parametrize(("int8", "plain", "faster"), [(FAST, SLOW, True), (SLOW, FAST, False)])
def test_what_was_measured_decides(
    int8: list[float], plain: list[float], faster: bool, library: NativeLibrary, tmp_path: Path
) -> None:
    ShapeTable(library, torch.float32, tmp_path).int8_is_faster(64, 48)
    table_file(tmp_path).write_text(json.dumps({"64x48": {"I8": int8, "F32": plain}}))
    table = ShapeTable(library, torch.float32, tmp_path)
    assert table.int8_is_faster(64, 48) == faster
    # and with it, what a decoder's products are made of; the head keeps the model's dtype
    builder, weight = NativeBuilder(library, "int8", table), torch.ones(64, 48)
    for made in (builder.linear(weight, None), builder.gated(weight, None)):
        assert isinstance(made, NativeLinear)
        assert made.kind == (ElementKind.I8 if faster else ElementKind.F32)
    head = builder.head(weight)
    assert isinstance(head, NativeLinear)
    assert head.kind == ElementKind.F32


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{",
        "[]",
        '{"64x48": 1}',
        '{"64x48": {"I8": [1, 1, 1]}}',
        '{"64x48": {"I8": [1, 1], "F32": [1, 1, 1]}}',
        '{"64x48": {"I8": [0, 1, 1], "F32": [1, 1, 1]}}',
        '{"64x48": {"I8": ["1", 1, 1], "F32": [1, 1, 1]}}',
        '{"64x48": {"I8": 1, "F32": [1, 1, 1]}}',
    ],
)
def test_a_broken_table_is_measured_anew(broken: str, library: NativeLibrary, tmp_path: Path) -> None:
    ShapeTable(library, torch.float32, tmp_path).int8_is_faster(64, 48)
    table_file(tmp_path).write_text(broken)
    table = ShapeTable(library, torch.float32, tmp_path)
    assert table.times == {}
    table.int8_is_faster(64, 48)
    assert set(json.loads(table_file(tmp_path).read_text())["64x48"]) == {"F32", "I8"}


def test_each_dtype_and_instruction_set_has_a_table_of_its_own(library: NativeLibrary, tmp_path: Path) -> None:
    ShapeTable(library, torch.float32, tmp_path).int8_is_faster(32, 16)
    ShapeTable(library, torch.bfloat16, tmp_path).int8_is_faster(32, 16)
    assert len(list(tmp_path.iterdir())) == 2
    if (best := load_library("auto", 1)).name == library.name:
        pytest.skip(f"this processor has {best.name} only")
    ShapeTable(best, torch.float32, tmp_path).int8_is_faster(32, 16)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_can_not_be_written_only_means_measuring_again(library: NativeLibrary, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    table = ShapeTable(library, torch.float32, tmp_path / "file")
    assert table.int8_is_faster(32, 16) == table.int8_is_faster(32, 16)
    assert set(table.times) == {"32x16"}
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
