"""The step plan: the interface between scheduler and runner.

Everything is row-indexed. A row is a slot of the running batch; `RowState` holds, for each row, its tokens and block
tables, which both sides read, so a plan contains only the rows and ranges of this step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cache.block_tier import BlockKey
from engine.request import Request

NO_TOKEN = -1
STATE_WINDOW = 2  # a token of a layer with states needs the block of the token before it
NO_BLOCK = 0  # block 0 of every group is never allocated: a harmless target for padding


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table.

    Attributes:
        layers: the model's layer indices.
        window: tokens that a query of these layers sees (itself included), or None for all.
        num_blocks: blocks in this group's pool, block 0 (never allocated) included.
        snapshot_blocks: the layers have states instead of keys and values (`engine.states`), and of so many full blocks
            one at least has a slot in this group; None: they have keys and values. `window` is then `STATE_WINDOW`.
    """

    layers: tuple[int, ...]
    window: int | None
    num_blocks: int
    snapshot_blocks: int | None = None


class RowState:
    """Row-indexed state of the running batch; written by the scheduler, read by the runner.

    Attributes (R = max_num_seqs rows):
        token_ids: int32 [R, max_model_len], prompt and output so far (known tokens), then drafts.
        num_known, num_computed, prompt_len: int32 [R].
        num_drafts: int32 [R], drafts behind the known tokens that are being computed; 0 when no step is in flight.
        block_tables: per cache group int32 [R, ceil(max_model_len / block_size)]; entry b is the block that holds
            positions b * block_size ... and `NO_BLOCK` where none is held (not yet, behind the window, or a full block
            whose state is not kept).
    """

    __slots__ = ("block_size", "block_tables", "num_computed", "num_drafts", "num_known", "prompt_len", "token_ids")

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_known = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_drafts = np.zeros(max_num_seqs, dtype=np.int32)
        self.prompt_len = np.zeros(max_num_seqs, dtype=np.int32)
        width = -(-max_model_len // block_size)
        self.block_tables = [np.full((max_num_seqs, width), NO_BLOCK, dtype=np.int32) for _ in range(num_groups)]

    def with_tables(self, block_tables: list[NDArray[np.int32]]) -> RowState:
        """Return a view of the same rows with other block tables; all other arrays are shared."""
        twin = RowState.__new__(RowState)
        for name in RowState.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.block_tables = block_tables
        return twin


class NewRow(NamedTuple):
    """A sequence that takes a row with this step (first admission, or again after preemption)."""

    row: int
    request: Request
    choice: int


class BlockRef(NamedTuple):
    """A physical block of one cache group."""

    group: int
    block: int


class BlockCopy(NamedTuple):
    """A copy of the keys and values of a block's first `tokens` positions, within one cache group."""

    group: int
    source: int
    target: int
    tokens: int


class BlockStore(NamedTuple):
    """A block that a second tier of the prefix cache gets, and its name there. `is_suspect`: it may hold non-finite
    values."""

    block: int
    key: BlockKey
    is_suspect: bool = False


class BlockLoad(NamedTuple):
    """A block whose content comes from a second tier of the prefix cache: uint8 [bytes], as
    `engine.runner.block_transfer` reads them."""

    group: int
    block: int
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Rows that compute a single token come first (`num_decodes` of them), then the chunks.

    Attributes (B rows in the step):
        rows: int32 [B].  starts: int32 [B], first position computed.  counts: int32 [B], positions computed.
        num_logits: int32 [B], trailing positions of the row whose logits are needed (0 inside a prompt, 1 where the
            next token is sampled, one more for each draft, `counts` for prompt log-probabilities).
        samples: bool [B], whether they yield the row's next token.
        num_decodes: rows with count 1 at the front.
        num_tokens: sum of counts.
        new_rows: rows whose owner changed; the runner and sampler (re)load their parameters before computing.
        store_blocks: cached blocks that this step evicts, to be copied to host memory before anything is written to
            them; earlier steps have filled them.
        zero_blocks: blocks to zero before computing (their last owner met non-finite values, and 0 * NaN = NaN).
        load_blocks: blocks to fill before computing, after zeroing.
        copy_blocks: copies to make before computing, after zeroing; no target is the source of another one. Sources
            were computed in earlier steps.
        drafts: int32 [B], how many of the row's last positions hold drafts instead of known tokens; None: none do.
        ahead: bool [B], rows whose last position holds the token that the step before this one samples: the host does
            not have it yet, and the device has it by then; None: there are none.
        adapters: int32 [B], the place of the row's adapter, ascending among rows with one token and among chunks; -1:
            it has none; None: no row has one.
        loaded: the adapter in each place.
    """

    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    num_logits: NDArray[np.int32]
    samples: NDArray[np.bool_]
    num_decodes: int
    num_tokens: int
    new_rows: tuple[NewRow, ...] = ()
    store_blocks: tuple[BlockStore, ...] = ()
    zero_blocks: tuple[BlockRef, ...] = ()
    load_blocks: tuple[BlockLoad, ...] = ()
    copy_blocks: tuple[BlockCopy, ...] = ()
    drafts: NDArray[np.int32] | None = None
    ahead: NDArray[np.bool_] | None = None
    adapters: NDArray[np.int32] | None = None
    loaded: tuple[str | None, ...] = ()

    @property
    def ends(self) -> NDArray[np.int64]:
        """int64 [B], where each row's tokens end among those of the step."""
        return np.cumsum(self.counts, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step, aligned with the plan's rows.

    Attributes:
        token_ids: int32 [B], the sampled token (behind the accepted drafts), or `NO_TOKEN`.
        failed: bool [B], the row has no token (it is `NO_TOKEN`): for its reason below, else for non-finite values.
        logprobs: for rows that request them: row -> for each accepted draft, then for the sampled token: (chosen
            float32, top ids int32 [k], top float32 [k]).
        prompt_logprobs: for rows that request them: row -> (first position, chosen float32 [c], ids [c, k], top [c,
            k]); entry i is the log-probability of the token at `first position + i`.
        target_logprobs: for rows that request them: row -> (numbers int64 [t] of the row's `prompt_targets` that this
            step's positions have, float32 [t]).
        pooled: for rows that request it and whose prompt is complete: row -> float32 [hidden].
        reasons: for rows that failed by their own rules, on finite values: row -> why.
        accepted: int32 [B], leading drafts of the row that equal the sampled tokens; None: there were none.
        tainted: rows whose rejected drafts left non-finite values in the cache.
    """

    token_ids: NDArray[np.int32]
    failed: NDArray[np.bool_]
    logprobs: dict[int, list[tuple[float, NDArray[np.int32], NDArray[np.float32]]]]
    prompt_logprobs: dict[int, tuple[int, NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]]
    pooled: dict[int, NDArray[np.float32]]
    reasons: dict[int, str] = field(default_factory=dict)
    accepted: NDArray[np.int32] | None = None
    tainted: frozenset[int] = frozenset()
    target_logprobs: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = field(default_factory=dict)
