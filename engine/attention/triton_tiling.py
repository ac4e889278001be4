"""How Triton's attention is cut into programs: queries, heads and keys of each, for a layout, a dtype and a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from engine.attention.base import KVLayout
from engine.errors import EngineError

MOST_COLUMNS, LEAST_COLUMNS = 64, 16
"""Keys that a program processes per iteration."""

FP8_DECODE = 32, 5, 1, 8
"""Keys of an iteration, stages, warps and programs (see `Tile`) of decoding with a float8 cache and heads of up to
`FP8_DECODE_DIMS`: such a program needs no barrier, and eight of them fit a multiprocessor of Hopper's. (256 rows of
1,500 tokens on an H200: 286 microseconds; 360 with 64 keys and two warps, 359 with 128 keys and four.)"""

FP8_DECODE_DIMS = 128

FP8_SHARED_COLUMNS, FLOAT32_SHARED_WARPS = 32, 8
"""Of a program over keys that sequences share, with a float8 cache and in float32: with more columns or fewer warps the
compiler spills registers."""

LEAST_SHARED = 64 << 10
"""Bytes of shared memory of a program on every device that Triton supports."""

CHUNK_ROWS = 64
"""Minimum of queries times heads of a chunk's tile."""

FLOAT32_CHUNK = 32
"""In float32: `CHUNK_ROWS`, and `MOST_COLUMNS` of a chunk. There are no matrix units for it, and registers hold whole
rows of both sides of a product."""

LONG, LONG_HEADS, LONG_CHUNK_ROWS, LONG_WARPS = 256, 16, 32, 8
"""With values longer than `LONG`, and with latent attention: query heads of a program, `CHUNK_ROWS`, and warps. Such
sums fill their registers: with more rows or fewer warps the compiler spills them."""

LATENT_BYTES = 136
"""Of shared memory of a program, for each element of a latent vector, that the smallest tile takes: what compilers use
for compute capability 7.5, and more than for others."""

LEAST_ROWS = 16
"""Minimum rows of a product on the matrix units."""

CHUNK_PROGRAMS = 2
"""`Tile.programs` of chunks."""

MOST_SPLITS = 64
SPLIT_KEYS = 256
"""Minimum keys of a split: fewer are not worth a second kernel."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel is compiled.

    Attributes:
        queries, columns: of a program; keys per iteration.
        stages: Triton's, of which iterations on their way are one less, and half of that where keys are found by way
            of a table.
        warps: of a program.
        programs: of a multiprocessor, that splitting aims at: as many fit Hopper's.
        halved: see `attend_tiles`.
    """

    queries: int
    columns: int
    stages: int = 3
    warps: int = 4
    programs: int = 4
    halved: bool = False


class Tiling:
    """The tiles of a backend.

    Args:
        dtype: of the cache.
        processors: of the device, which small batches are spread over.
        shared: bytes of shared memory of a program there.

    Attributes:
        sharing: query heads of a KV head.  parts: programs that take them.
        heads: of a program, up to a power of two.
        dims, rests: elements of a value, and of a key beyond them (latent attention), up to a power of two.
        decode, chunk, shared: tiles of decoding sequences, of chunks, and of keys that sequences share, with as many
            keys as fit the device's shared memory.

    Raises:
        EngineError: the device has too little shared memory for this layout.
    """

    def __init__(self, layout: KVLayout, dtype: torch.dtype, processors: int, shared: int) -> None:
        if (reason := refusal(layout, shared)) is not None:
            raise EngineError(f"attention 'triton' {reason}; choose 'paged-sdpa'")
        self._layout, self._processors, self._shared, self._item = layout, processors, shared, dtype.itemsize
        self.sharing = max(1, (layout.num_heads or layout.num_kv_heads) // layout.num_kv_heads)
        self.heads = triton.next_power_of_2(self.sharing)
        self.dims = max(16, triton.next_power_of_2(layout.value_dim))
        self.rests = 0
        if layout.latent_dim:
            self.rests = max(16, triton.next_power_of_2(layout.head_dim - layout.latent_dim))
        chunk_rows, most_columns, warps = CHUNK_ROWS, MOST_COLUMNS, 4
        if dtype == torch.float32:
            chunk_rows = most_columns = FLOAT32_CHUNK
        if layout.latent_dim or layout.head_dim > LONG:
            self.heads = min(self.heads, LONG_HEADS)
            chunk_rows, warps = LONG_CHUNK_ROWS, LONG_WARPS
        self.parts = -(-self.sharing // self.heads)
        least = max(1, LEAST_ROWS // self.heads)
        queries = max(least, chunk_rows // self.heads)
        while queries > least and not self._fits(queries, LEAST_COLUMNS):
            queries //= 2
        self.decode = Tile(least, self._columns(least, MOST_COLUMNS), warps=warps)
        self.chunk = Tile(queries, self._columns(queries, most_columns), warps=warps, programs=CHUNK_PROGRAMS)
        self.shared = self.chunk
        if self._item == 1:
            self.shared = replace(self.chunk, columns=min(self.chunk.columns, FP8_SHARED_COLUMNS))
            if not self.rests and self.dims <= FP8_DECODE_DIMS:
                checked = self.dims == FP8_DECODE_DIMS and least * self.heads == LEAST_ROWS
                self.decode = Tile(least, *FP8_DECODE, halved=checked)
        if self._item == 4:
            self.shared = replace(self.chunk, warps=FLOAT32_SHARED_WARPS)

    def splits(self, tiles: int, longest: int, tile: Tile) -> int:
        """Return the number of programs that share the keys of each of so many tiles, with `longest` keys to read."""
        whole = tiles * self._layout.num_kv_heads * self.parts
        wanted: int = min(tile.programs * self._processors // max(1, whole), longest // SPLIT_KEYS, MOST_SPLITS)
        return max(1, wanted)

    def _columns(self, queries: int, most: int) -> int:
        """Return the keys of a program per iteration, at most so many."""
        while most > LEAST_COLUMNS and not self._fits(queries, most):
            most //= 2
        return most

    def _fits(self, queries: int, columns: int) -> bool:
        """Whether so many queries and keys fit the device's shared memory."""
        # While one iteration's keys and values are multiplied, the next ones are loaded; queries stay. (Measured on
        # Hopper; compilers use less on other devices.)
        held = 2 if self._layout.latent_dim else 4  # keys alone, or values too, of two iterations
        row = (self.dims + self.rests) * max(self._item, 2)
        return bool((queries * self.heads + held * columns) * row <= self._shared)


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory of a program on a device."""
    if device.type != "cuda":
        return LEAST_SHARED
    size: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LEAST_SHARED)
    return size


def refusal(layout: KVLayout, shared: int) -> str | None:
    """Return why no tile of this layout fits a device whose programs have so many bytes of shared memory; None: one
    does."""
    needed = LATENT_BYTES * triton.next_power_of_2(layout.latent_dim) if layout.latent_dim else 0
    if needed <= shared:
        return None
    kib = needed >> 10, shared >> 10
    return "needs {} KiB of shared memory for this model's latent attention, and the device has {}".format(*kib)
