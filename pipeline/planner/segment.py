"""Planning of one segment: numbers in memory, texts in a scratch file.

Some 100 bytes of each request stay in memory (numpy columns); ids, bodies and carried columns go to an Arrow file that
is memory-mapped when shards are built. The texts are spilled, not read again, because the input may be compressed
columns or a remote object, and because the shard needs the checked body, not the line.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.planner.row_order import NO_GROUP, PrefixChains, RunningOrder, arrange, find_leaders
from pipeline.planner.shard_cut import ShardLimits, cut
from pipeline.planner.spill import SpilledRowReader, SpilledRows
from pipeline.planner.validate import CheckedBatch, ValidRow
from schemas.jobs.arrow_schemas import SHARD_FIELDS, shard_schema
from schemas.requests.limits import PlanSettings

SPILLED = pa.schema([("custom_id", pa.string()), ("url", pa.string()), ("body", pa.string())])


class SegmentTexts:
    """The texts of a segment's valid requests, in input order. Raises as `SpilledRows`."""

    def __init__(self, path: Path, carried: pa.Schema | None) -> None:
        names = shard_schema(carried).names[len(SHARD_FIELDS) :]
        types = [field.type for field in carried or ()]
        schema = pa.schema([*SPILLED, *(pa.field(name, kind) for name, kind in zip(names, types, strict=True))])
        self._rows = SpilledRows(path, schema)

    def add(self, rows: list[ValidRow], carried: pa.Table | None) -> None:
        columns: list[pa.Array] = [
            pa.array([row.custom_id for row in rows], pa.string()),
            pa.array([row.url for row in rows], pa.string()),
            pa.array([row.body for row in rows], pa.string()),
        ]
        if carried is not None:
            taken = carried.take(pa.array([row.position for row in rows], pa.int64()))
            columns += [pa.concat_arrays(column.chunks) for column in taken.columns]
        self._rows.add(pa.record_batch(columns, schema=self._rows.schema))

    def open(self) -> SpilledRowReader:
        return self._rows.open()


@dataclass(frozen=True, slots=True)
class ShardDraft:
    """A shard before it is stored; numbers for its computed rows."""

    table: pa.Table
    model: str
    computed_rows: int
    prompt_tokens: int
    expected_tokens: int


class SegmentBuilder:
    """Collects a segment's valid requests."""

    def __init__(self, spill: SegmentTexts | None, models: list[str]) -> None:
        self._spill = spill
        self._model_names = models
        self._codes = {name: code for code, name in enumerate(models)}
        self._hashes = bytearray()
        self._rows, self._max_tokens = array("q"), array("q")
        self._models, self._choices = array("i"), array("i")
        self._requested, self._requested_codes = array("Q"), dict[str, int]()  # names of models, as requested
        self._prompt_tokens, self._expected = array("i"), array("i")
        self._shareable, self._depths = array("b"), array("b")
        self.certain_tokens = 0  # of the longest answer
        self._chain_hashes, self._chain_sizes = array("q"), array("i")

    def add(self, checked: CheckedBatch) -> None:
        rows = checked.valid
        if not rows:
            return
        if self._spill is not None:
            self._spill.add(rows, checked.batch.carried)
        self._hashes += b"".join(row.request_key for row in rows)
        codes = self._requested_codes
        self._requested.extend([codes.setdefault(row.requested_model, len(codes)) for row in rows])
        self._rows.extend([row.row for row in rows])
        self._max_tokens.extend([row.max_tokens for row in rows])
        self._models.extend([self._codes[row.model] for row in rows])
        self._choices.extend([row.choices for row in rows])
        self.certain_tokens = max(self.certain_tokens, *(row.certain_tokens for row in rows))
        self._prompt_tokens.extend([row.prompt_tokens for row in rows])
        self._expected.extend([row.expected_tokens for row in rows])
        self._shareable.extend([row.shareable for row in rows])
        self._depths.extend([len(row.chain.hashes) for row in rows])
        for row in rows:
            self._chain_hashes.extend(row.chain.hashes)
            self._chain_sizes.extend(row.chain.sizes)

    def finish(self, settings: PlanSettings, carried: pa.Schema | None, *, small_first: bool = False) -> SegmentPlan:
        """Find copies, order, cut. The builder must not be used afterwards: its numbers are shared, not copied.

        Args:
            small_first: see `ShardLimits`.
        """
        hashes = np.frombuffer(self._hashes, dtype=np.uint64).reshape(-1, 2)
        chains = PrefixChains(
            np.asarray(self._chain_hashes, dtype=np.int64),
            np.asarray(self._chain_sizes, dtype=np.int32),
            np.asarray(self._depths, dtype=np.int64),
        )
        columns = SegmentColumns(
            rows=np.asarray(self._rows, dtype=np.int64),
            hashes=hashes,
            models=np.asarray(self._models, dtype=np.int32),
            choices=np.asarray(self._choices, dtype=np.int64),
            prompt_tokens=np.asarray(self._prompt_tokens, dtype=np.int32),
            expected=np.asarray(self._expected, dtype=np.int32),
            max_tokens=np.asarray(self._max_tokens, dtype=np.int64),
        )
        # A response has the requested model's name, which the key hasn't: two names may stand for the same weights.
        named = hashes.copy()
        named[:, 0] ^= np.asarray(self._requested, dtype=np.uint64)
        leaders = find_leaders(named, np.asarray(self._shareable, dtype=bool), settings.max_copies)
        computed = np.flatnonzero(leaders == np.arange(len(leaders)))
        arrangement = arrange(
            columns.models[computed],
            columns.expected[computed],
            chains.take(computed),
            min_group_rows=settings.min_group_rows,
            min_prefix_bytes=settings.min_prefix_bytes,
        )
        reader = self._spill.open() if self._spill is not None else None
        return SegmentPlan(
            columns, leaders, computed, arrangement, settings, self._model_names, reader, carried, small_first
        )


@dataclass(frozen=True, slots=True)
class SegmentColumns:
    """The numbers of a segment's valid requests, by index; `hashes` is uint64 [requests, 2]."""

    rows: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    models: NDArray[np.int32]
    choices: NDArray[np.int64]
    prompt_tokens: NDArray[np.int32]
    expected: NDArray[np.int32]
    max_tokens: NDArray[np.int64]


class SegmentPlan:
    """A segment, ordered and cut; `shards` builds the tables one by one."""

    def __init__(
        self,
        columns: SegmentColumns,
        leaders: NDArray[np.int64],
        computed: NDArray[np.int64],
        arrangement: RunningOrder,
        settings: PlanSettings,
        models: list[str],
        spill: SpilledRowReader | None,
        carried: pa.Schema | None,
        small_first: bool,
    ) -> None:
        self._columns = columns
        self._leaders = leaders
        self._computed = computed
        self._spill = spill
        self._models = models
        self._schema = shard_schema(carried)
        self._running = computed[arrangement.order]
        self._arrangement = arrangement
        copies = np.bincount(leaders, minlength=len(leaders))[self._running] - 1 if len(leaders) else leaders
        tokens = columns.prompt_tokens.astype(np.int64) + columns.expected * columns.choices
        self._limits = ShardLimits(settings.shard_tokens, settings.max_shard_rows, settings.max_copies, small_first)
        self._tokens, self._copies = tokens[self._running], copies
        self.ranges = self._cut(0, len(self._running), self._limits)
        self.shared_bytes = arrangement.shared_bytes
        self.prefix_groups = len(np.unique(arrangement.groups[arrangement.groups != NO_GROUP]))

    @property
    def unique(self) -> int:
        """Number of computed requests."""
        return len(self._computed)

    @property
    def sequences(self) -> int:
        """Number of computed sequences: one for each choice."""
        return int(self._columns.choices[self._computed].sum())

    @property
    def max_tokens(self) -> int:
        """Maximum tokens that the computed requests may generate."""
        return int(self._columns.max_tokens[self._computed].sum())

    @property
    def prompt_tokens(self) -> int:
        """Estimated prompt tokens of the computed requests."""
        return int(self._columns.prompt_tokens[self._computed].sum())

    @property
    def expected_tokens(self) -> int:
        """Expected answer tokens of the computed requests, all choices."""
        return int((self._columns.expected * self._columns.choices)[self._computed].sum())

    def tokens_of_models(self) -> dict[str, int]:
        """Prompt and expected answer tokens of the computed requests, by model name."""
        columns, computed = self._columns, self._computed
        tokens = columns.prompt_tokens.astype(np.int64) + columns.expected * columns.choices
        sums = np.bincount(columns.models[computed], weights=tokens[computed], minlength=len(self._models))
        return {name: int(total) for name, total in zip(self._models, sums, strict=True) if total}

    def pieces(self, tokens: int) -> list[tuple[int, int, int]]:
        """The shards, each cut again for so many tokens: (index in `ranges`, start, end)."""
        limits = replace(self._limits, tokens=min(tokens, self._limits.tokens), small_first=False)
        return [(at, *piece) for at, shard in enumerate(self.ranges) for piece in self._cut(*shard, limits)]

    def shards(self) -> Iterator[ShardDraft]:
        """The shards in running order."""
        return (draft for _, draft in self.drafts(self.ranges))

    def drafts(
        self, ranges: Sequence[tuple[int, int]], wants: Callable[[int], bool] = lambda _: True
    ) -> Iterator[tuple[int, ShardDraft]]:
        """The drafts of shards of these ranges of the running order, with their indices in `ranges`. Only those for
        which `wants(index)` is true; it is called in order. The ranges ascend and are disjoint."""
        position = np.empty(len(self._leaders), dtype=np.int64)
        position[self._running] = np.arange(len(self._running))
        positions = position[self._leaders]
        all_requests = np.lexsort((self._columns.rows, positions))  # a leader is the first of its copies
        begins = np.searchsorted(positions[all_requests], [start for start, _ in ranges])
        stops = np.searchsorted(positions[all_requests], [end for _, end in ranges])
        for at, ((start, end), begin, stop) in enumerate(zip(ranges, begins, stops, strict=True)):
            if not wants(at):
                continue
            groups = self._arrangement.groups[start:end]
            readers = self._arrangement.group_ends[start:end] - np.arange(start, end) - 1
            yield at, self._draft(self._running[start:end], all_requests[begin:stop], groups, readers)

    def _cut(self, start: int, end: int, limits: ShardLimits) -> list[tuple[int, int]]:
        """Cut a range of the running order."""
        running = slice(start, end)
        joined = self._arrangement.joined[running].copy()
        joined[:1] = False
        models = self._columns.models[self._running[running]]
        found = cut(self._tokens[running], self._copies[running], models, joined, limits)
        return [(start + one, start + another) for one, another in found]

    def _draft(
        self,
        computed: NDArray[np.int64],
        members: NDArray[np.int64],
        groups: NDArray[np.int64],
        readers: NDArray[np.int64],
    ) -> ShardDraft:
        """The shard of requests `computed` (with their groups and remaining readers) and `members` (with copies)."""
        assert self._spill is not None, "this segment was only measured"
        columns = self._columns
        texts = self._spill.take(members)
        own = self._leaders[members] == members
        group = np.full(len(members), NO_GROUP, dtype=np.int64)
        left = np.zeros(len(members), dtype=np.int32)
        group[own], left[own] = groups, readers
        ungrouped = group == NO_GROUP
        model = self._models[int(columns.models[computed[0]])]
        values = {
            "row": columns.rows[members],
            "compute_row": columns.rows[self._leaders[members]],
            "custom_id": texts.column("custom_id"),
            "url": texts.column("url"),
            "body": pc.if_else(pa.array(own), texts.column("body"), ""),
            "model": pa.repeat(pa.scalar(model, pa.string()), len(members)),
            "request_hash": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), len(members), [None, pa.py_buffer(np.ascontiguousarray(columns.hashes[members]))]
            ),
            "prefix_group": pa.array(group, mask=ungrouped),
            "prefix_readers": pa.array(left, mask=ungrouped),
            "estimated_prompt_tokens": columns.prompt_tokens[members],
            "expected_tokens": columns.expected[members],
        }
        arrays = [values[field.name] for field in SHARD_FIELDS]
        arrays += [texts.column(name) for name in self._schema.names[len(SHARD_FIELDS) :]]
        return ShardDraft(
            table=pa.table(arrays, schema=self._schema),
            model=model,
            computed_rows=len(computed),
            prompt_tokens=int(columns.prompt_tokens[computed].sum()),
            expected_tokens=int((columns.expected[computed] * columns.choices[computed]).sum()),
        )
