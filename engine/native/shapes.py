"""The table of products that are faster in int8, by shape: measured once on this machine, stored with the kernels.

Whether W8A8 beats the model's own dtype depends on the processor (without VNNI it may lose) and on the shape, so a
table from another machine does not apply.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.native.library import NativeLibrary
from engine.native.linear import NativeLinear
from engine.native.structs import KIND_OF, ElementKind
from engine.native.workspace import KernelWorkspace

ROWS = (1, 16, 128)
"""Rows of a step at which products are timed: a single stream, a small batch, a full one, with equal weights."""

_MOST_COLUMNS = 2048
"""Larger products are measured on so many of their columns; all of them cost the same."""

_REPEATS = 9

Times = dict[str, list[float]]
"""Kind -> seconds at each of ROWS."""


class ShapeTable:
    """Times of products by shape, read from a file and extended when a new shape is requested."""

    def __init__(self, library: NativeLibrary, dtype: torch.dtype, folder: Path | None = None) -> None:
        """`folder`: of the table; None: the library's."""
        self._library = library
        self._dtype = dtype
        name = f"{library.path.stem}-{KIND_OF[dtype].name.lower()}-{_processor()}.json"
        self._file = (folder or library.path.parent) / name
        self._times: dict[str, Times] = self._read()

    def int8_is_faster(self, n: int, k: int) -> bool:
        """Whether [rows, k] x [k, n] takes less time in int8, quantizing the rows included, over all of ROWS."""
        key = f"{n}x{k}"
        if key not in self._times:
            self._times[key] = self._measure(min(n, _MOST_COLUMNS), k)
            self._write()
        times = self._times[key]
        pairs = zip(times[ElementKind.I8.name], times[KIND_OF[self._dtype].name], strict=True)
        return sum(math.log(small / plain) for small, plain in pairs) < 0

    @property
    def times(self) -> dict[str, Times]:
        """All measurements: "NxK" -> kind -> seconds at each of ROWS."""
        return self._times

    def _measure(self, n: int, k: int) -> Times:
        # One thread: a core that is preempted for a moment must not distort the table.
        library = NativeLibrary(self._library.path, self._library.name, 1)
        weight = torch.randn(n, k)
        space = KernelWorkspace.for_linear(library, k, max(ROWS))
        inputs = [torch.randn(rows, k).to(self._dtype) for rows in ROWS]
        linears = {kind: NativeLinear.dense(library, kind, weight) for kind in (KIND_OF[self._dtype], ElementKind.I8)}
        return {
            kind.name: [_seconds(partial(linear.product, x, space)) for x in inputs] for kind, linear in linears.items()
        }

    def _read(self) -> dict[str, Times]:
        try:
            table = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        kinds = {ElementKind.I8.name, KIND_OF[self._dtype].name}
        sound = isinstance(table, dict) and all(
            isinstance(times, dict) and all(_sound(times.get(kind)) for kind in kinds) for times in table.values()
        )
        return table if sound else {}

    def _write(self) -> None:
        """Store the table; if the folder is not writable, the next process measures again."""
        try:
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, suffix=".json", delete=False) as file:
                json.dump(self._times, file)
            os.replace(file.name, self._file)
        except OSError:
            return


def _sound(seconds: object) -> bool:
    """Whether these are times at each of ROWS."""
    return (
        isinstance(seconds, list)
        and len(seconds) == len(ROWS)
        and all(isinstance(time, float | int) and time > 0 for time in seconds)
    )


def _seconds(call: Callable[[], Tensor]) -> float:
    """Return the shortest time of some calls: other processes only ever add to it."""
    times = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


def _processor() -> str:
    """The processor's name, as far as a file name can hold it."""
    name = str(torch.cpu.get_capabilities().get("cpu_name", "cpu"))
    return "".join(c if c.isalnum() else "_" for c in name)
