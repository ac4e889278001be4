"""Drafts by a smaller model of the same vocabulary.

It reads the same rows, and keeps its keys in the same blocks: block b of the model's full-attention group has a place
in the draft model's own storage, too, so one table and one reservation serve both. What it has computed of a row is a
counter again, lowered to the known tokens whenever the model took another token than it had guessed. It draws with the
uniforms that the model will draw with (see verify.py), from its own distribution under the request's temperature and
filters; penalties and masks it does not know, which costs acceptance and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.attention.base import AttentionBackend, KVLayout
from engine.config import SpeculationConfig
from engine.errors import UnsupportedModel
from engine.models.base import CausalModel, ModelSpec
from engine.models.load import describe_model
from engine.plan import NO_BLOCK, CacheGroup, NewRow, RowState, StepOutput, StepPlan
from engine.request import Request, SamplingParams
from engine.runner.runner import StepRunner
from engine.speculative.base import NO_DRAFT, Draft, DraftRequest

Ints = NDArray[np.int32]
Execute = Callable[[StepPlan], StepOutput]

NOBODY = -1


def draft_layout(spec: ModelSpec, groups: tuple[CacheGroup, ...], block_size: int) -> tuple[int, KVLayout]:
    """The group of the model's cache in whose blocks the draft model keeps its keys, and how they lie.

    Raises:
        UnsupportedModel: the model keeps no whole sequence.
    """
    full = next((index for index, group in enumerate(groups) if group.window is None), None)
    if full is None:
        raise UnsupportedModel(
            "a draft model or head needs the blocks of whole sequences, but all layers of the model have sliding "
            "windows; guess with n-grams instead"
        )
    windows = sorted(set(spec.windows), key=lambda window: (window is not None, window or 0))
    own = tuple(
        CacheGroup(tuple(i for i, of in enumerate(spec.windows) if of == window), window, groups[full].num_blocks)
        for window in windows
    )
    return full, KVLayout(own, block_size, spec.num_kv_heads, spec.head_dim, spec.num_heads)


def without_rules(request: Request) -> Request:
    """The request with what it says of a draw alone: temperature, filters and seed, no penalties and no mask."""
    params = request.params
    own = SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
    )
    return replace(request, params=own, watcher=None, mask=None, pooling=None, partial=())


def load_draft(
    config: SpeculationConfig, target: ModelSpec, max_model_len: int, load: Callable[..., CausalModel]
) -> CausalModel | None:
    """The draft model that the settings name; None: they name none.

    Args:
        target: the model for which it guesses.
        max_model_len: most tokens of a sequence.
        load: as `load_model`, for the device and dtype of the model.

    Raises:
        UnsupportedModel: its token ids are not the model's.
        ModelNotFound, CorruptWeights: as `load_model` does.
    """
    if config.method != "draft":
        return None
    if config.draft_model is None:
        raise UnsupportedModel("guessing by a draft model needs one; name it")
    spec = describe_model(config.draft_model).spec
    if spec.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"the draft model {config.draft_model} has a vocabulary of {spec.vocab_size} tokens, but the model has "
            f"{target.vocab_size}; choose a smaller model with the same tokenizer"
        )
    return load(config.draft_model, max_positions=min(spec.max_position, max_model_len))


@dataclass(frozen=True, slots=True, eq=False)
class DraftProposerState:
    """A draft model beside a model.

    Attributes:
        groups: of the model's cache.  block_size: tokens of a block.
        most_tokens: of a step.
    """

    draft: CausalModel
    groups: tuple[CacheGroup, ...]
    block_size: int
    most_tokens: int

    def proposer(
        self,
        rows: RowState,
        attend: Callable[[KVLayout], AttentionBackend],
        compute: Callable[[CausalModel, AttentionBackend, RowState], StepRunner],
    ) -> DraftModelProposer:
        """It as a proposer for these rows; `attend` makes the attention over a layout, `compute` a model's steps.

        Raises:
            UnsupportedModel: the model keeps no whole sequence.
        """
        full, layout = draft_layout(self.draft.spec, self.groups, self.block_size)
        attention = attend(layout)
        own = rows.with_tables([rows.block_tables[full]] * len(layout.groups))

        def zero(blocks: list[int]) -> None:
            for group in range(len(layout.groups)):
                attention.zero(group, blocks)

        return DraftModelProposer(
            compute(self.draft, attention, own).execute,
            own,
            most_positions=self.draft.spec.max_position,
            most_tokens=self.most_tokens,
            zero=zero,
        )


class DraftModelProposer:
    """Lets a smaller model answer ahead.

    Args:
        execute: computes steps of the draft model, over `rows`.
        rows: the model's rows, as the draft model sees them.
        most_positions: tokens of one sequence that the draft model was made for.
        most_tokens: positions that it computes at once.
        zero: clears blocks of its storage.
    """

    def __init__(
        self,
        execute: Execute,
        rows: RowState,
        *,
        most_positions: int,
        most_tokens: int,
        zero: Callable[[list[int]], None],
    ) -> None:
        self._execute = execute
        self._rows = rows
        self._most_positions = most_positions
        self._most_tokens = most_tokens
        self._zero = zero
        num_rows = len(rows.num_known)
        self._epoch = np.full(num_rows, NOBODY, dtype=np.int64)
        self._computed = np.zeros(num_rows, dtype=np.int32)
        self._barred = np.zeros(num_rows, dtype=np.bool_)

    def learn(self, request: Request, token_ids: Ints) -> None:
        """Nothing: the draft model knows what it knows."""

    def propose(self, asks: list[DraftRequest]) -> list[Draft]:
        new = tuple(self._take(ask) for ask in asks if self._epoch[ask.row] != ask.epoch)
        able = [ask for ask in asks if not self._barred[ask.row] and self._length(ask) > 0]
        lengths = {ask.row: self._length(ask) for ask in able}
        self._catch_up([ask.row for ask in able], new)
        known = self._rows.num_known
        going, place = sorted(lengths), 0
        while going:
            rows = np.array(going, dtype=np.int32)
            tokens = self._step(rows, known[rows] + place)
            alive = tokens >= 0
            for row in rows[~alive].tolist():
                self._bar(row)
                lengths[row] = place
            self._rows.token_ids[rows[alive], known[rows[alive]] + place] = tokens[alive]
            place += 1
            going = [row for row in rows[alive].tolist() if lengths[row] > place]
        return [self._draft(ask.row, lengths.get(ask.row, 0)) for ask in asks]

    def _draft(self, row: int, length: int) -> Draft:
        known = int(self._rows.num_known[row])
        return Draft(self._rows.token_ids[row, known : known + length].copy(), "draft") if length else NO_DRAFT

    def _length(self, ask: DraftRequest) -> int:
        return min(ask.max_drafts, self._most_positions - int(self._rows.num_known[ask.row]))

    def _take(self, ask: DraftRequest) -> NewRow:
        """A row has another owner. (What it shares with others is computed again: the same keys to the same places.)"""
        self._epoch[ask.row] = ask.epoch
        self._computed[ask.row] = 0
        self._barred[ask.row] = False
        return NewRow(ask.row, without_rules(ask.request), ask.choice)

    def _catch_up(self, rows: list[int], new: tuple[NewRow, ...]) -> None:
        """Compute the known tokens of these rows up to the last one, which the first guess comes from."""
        for row in rows:
            # Behind the first token that the model took in place of a guess, keys are of tokens that did not stay.
            last = int(self._rows.num_known[row]) - 1
            self._computed[row] = min(int(self._computed[row]), last)
        left = [row for row in rows if self._computed[row] < self._rows.num_known[row] - 1]
        while left:
            room, part, counts = self._most_tokens, [], []
            for row in left:
                count = min(int(self._rows.num_known[row]) - 1 - int(self._computed[row]), room)
                if count > 0:
                    part.append(row)
                    counts.append(count)
                    room -= count
            order = np.argsort(np.array(counts) > 1, kind="stable")  # single positions come first
            self._compute(np.array(part, dtype=np.int32)[order], np.array(counts, dtype=np.int32)[order], new)
            new = ()
            left = [row for row in left if self._computed[row] < self._rows.num_known[row] - 1]

    def _step(self, rows: Ints, ends: Ints) -> Ints:
        """Compute one position more, the one before `ends`; the token that comes there, negative where none can."""
        output = self._compute(rows, np.ones(len(rows), dtype=np.int32), (), samples=True)
        assert (self._computed[rows] == ends).all()
        return output.token_ids

    def _compute(self, rows: Ints, counts: Ints, new: tuple[NewRow, ...], *, samples: bool = False) -> StepOutput:
        sampled = np.full(len(rows), samples)
        plan = StepPlan(
            rows=rows,
            starts=self._computed[rows],
            counts=counts,
            num_logits=sampled.astype(np.int32),
            samples=sampled,
            num_decodes=int(np.count_nonzero(counts == 1)),
            num_tokens=int(counts.sum()),
            new_rows=new,
        )
        self._computed[rows] += counts
        return self._execute(plan)

    def _bar(self, row: int) -> None:
        """The draft model met non-finite values: it is not asked again for this sequence, and leaves none behind."""
        self._barred[row] = True
        table = self._rows.block_tables[0][row]
        self._zero(table[table != NO_BLOCK].tolist())
