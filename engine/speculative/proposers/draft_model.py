"""Drafts by a smaller model of the same vocabulary.

It reads the same rows, and stores its keys under the same block ids: block b of the model's full-attention group also
exists in the draft model's own storage, so one table and one reservation serve both. A counter holds the computed
tokens of a row; it is lowered to the known tokens whenever the model rejected a draft. The draft model draws with the
uniforms that the model will draw with (see verify.py), from its own distribution under the request's temperature and
filters. It ignores penalties and masks, which costs acceptance and nothing else.
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

NO_EPOCH = -1


def draft_layout(spec: ModelSpec, groups: tuple[CacheGroup, ...], block_size: int) -> tuple[int, KVLayout]:
    """Return the group of the model's cache whose block ids the draft model uses, and the layout of its keys.

    Raises:
        UnsupportedModel: the model has no full-attention group, or the draft model has states.
    """
    full = next((index for index, group in enumerate(groups) if group.window is None), None)
    if full is None:
        raise UnsupportedModel(
            "a draft model or head needs the blocks of whole sequences, but all layers of the model have sliding "
            "windows; draft with n-grams instead"
        )
    if spec.state_layers:
        raise UnsupportedModel("a model with states beside keys and values can't draft; draft with n-grams instead")
    own = tuple(CacheGroup(layers, window, groups[full].num_blocks) for window, layers in spec.window_layers.items())
    return full, KVLayout.of(spec, own, block_size)


def without_rules(request: Request) -> Request:
    """Return the request with temperature, filters and seed only, without penalties and mask."""
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
    """Load the draft model of the settings; None: they name none.

    Args:
        target: the model that it drafts for.
        max_model_len: maximum tokens of a sequence.
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
    """A draft model with the cache parameters of its target model.

    Attributes:
        groups: of the model's cache.  block_size: tokens of a block.
        max_tokens: of a step.
    """

    draft: CausalModel
    groups: tuple[CacheGroup, ...]
    block_size: int
    max_tokens: int

    def proposer(
        self,
        rows: RowState,
        attend: Callable[[KVLayout], AttentionBackend],
        compute: Callable[[CausalModel, AttentionBackend, RowState], StepRunner],
    ) -> DraftModelProposer:
        """Create the proposer for these rows; `attend` makes the attention over a layout, `compute` a model's runner.

        Raises:
            UnsupportedModel: the model has no full-attention group.
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
            max_positions=self.draft.spec.max_position,
            max_tokens=self.max_tokens,
            zero=zero,
        )


class DraftModelProposer:
    """Drafts tokens with a smaller model.

    Args:
        execute: computes steps of the draft model, over `rows`.
        rows: the model's rows, with the draft model's block tables.
        max_positions: maximum tokens of one sequence in the draft model.
        max_tokens: positions that it computes at once.
        zero: zeroes blocks of its storage.
    """

    def __init__(
        self,
        execute: Execute,
        rows: RowState,
        *,
        max_positions: int,
        max_tokens: int,
        zero: Callable[[list[int]], None],
    ) -> None:
        self._execute = execute
        self._rows = rows
        self._max_positions = max_positions
        self._max_tokens = max_tokens
        self._zero = zero
        num_rows = len(rows.num_known)
        self._epoch = np.full(num_rows, NO_EPOCH, dtype=np.int64)
        self._computed = np.zeros(num_rows, dtype=np.int32)
        self._is_disabled = np.zeros(num_rows, dtype=np.bool_)

    def learn(self, request: Request, token_ids: Ints) -> None:
        """Do nothing: the draft model does not learn."""

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        new = tuple(self._register(request) for request in requests if self._epoch[request.row] != request.epoch)
        enabled = [request for request in requests if not self._is_disabled[request.row] and self._length(request) > 0]
        lengths = {request.row: self._length(request) for request in enabled}
        self._catch_up([request.row for request in enabled], new)
        known = self._rows.num_known
        going, offset = sorted(lengths), 0
        while going:
            rows = np.array(going, dtype=np.int32)
            tokens = self._step(rows, known[rows] + offset)
            alive = tokens >= 0
            for row in rows[~alive].tolist():
                self._disable(row)
                lengths[row] = offset
            self._rows.token_ids[rows[alive], known[rows[alive]] + offset] = tokens[alive]
            offset += 1
            going = [row for row in rows[alive].tolist() if lengths[row] > offset]
        return [self._draft(request.row, lengths.get(request.row, 0)) for request in requests]

    def _draft(self, row: int, length: int) -> Draft:
        known = int(self._rows.num_known[row])
        return Draft(self._rows.token_ids[row, known : known + length].copy(), "draft") if length else NO_DRAFT

    def _length(self, request: DraftRequest) -> int:
        return min(request.max_drafts, self._max_positions - int(self._rows.num_known[request.row]))

    def _register(self, request: DraftRequest) -> NewRow:
        """Reset a row with a new owner. (Shared blocks are computed again: the same keys at the same positions.)"""
        self._epoch[request.row] = request.epoch
        self._computed[request.row] = 0
        self._is_disabled[request.row] = False
        return NewRow(request.row, without_rules(request.request), request.choice)

    def _catch_up(self, rows: list[int], new: tuple[NewRow, ...]) -> None:
        """Compute the known tokens of these rows up to the last one, which yields the first draft."""
        for row in rows:
            # Keys behind the first rejected draft belong to tokens that were not accepted.
            last = int(self._rows.num_known[row]) - 1
            self._computed[row] = min(int(self._computed[row]), last)
        left = [row for row in rows if self._computed[row] < self._rows.num_known[row] - 1]
        while left:
            room, part, counts = self._max_tokens, [], []
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
        """Compute one more position, the one before `ends`, and return the token sampled there, negative if none."""
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

    def _disable(self, row: int) -> None:
        """Disable drafts for a sequence with non-finite values in the draft model, and zero its blocks."""
        self._is_disabled[row] = True
        table = self._rows.block_tables[0][row]
        self._zero(table[table != NO_BLOCK].tolist())
