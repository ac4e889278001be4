"""Drafts by an EAGLE-3 head, which reads the model's own states (see models/eagle.py).

In each step the head reads the states of all positions. At position p it combines them with the token at p + 1, so it
computes all positions whose next token is known, and stores the states of a row's last position, and of its drafts,
until the next step determines the tokens behind them. Then they are computed, and a chain of drafts begins behind the
last:

    states read         |- computed at once -|- stored: last known, drafts -|
    after the update    |- ... - known - 2 -| <- the first draft, of token `known`, is sampled here

Its keys use the model's block ids, as a draft model's do: block b of the full-attention group also exists in the head's
own storage. So a prefix hit includes the head's keys, and blocks are copied there as well. Only the key at the last
position of a hit may depend on the token that followed in another text. Nothing corrects that: it costs acceptance, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionStep, KVLayout
from engine.config import SpeculationConfig
from engine.errors import UnsupportedModel
from engine.models.base import CausalModel, LayeredModel
from engine.models.eagle import EagleHead
from engine.models.eagle_checkpoint import load_head
from engine.plan import CacheGroup, RowState, StepPlan
from engine.request import Request
from engine.runner.runner import flatten, step_batch
from engine.sampling.sampler import Sampler
from engine.speculative.base import NO_DRAFT, Draft, DraftRequest
from engine.speculative.proposers.draft_model import draft_layout, without_rules

Ints = NDArray[np.int32]


def load_eagle(
    config: SpeculationConfig, model: CausalModel, max_model_len: int, device: torch.device
) -> EagleHead | None:
    """Load the head of the settings; None: they name none.

    Args:
        model: that it drafts for, on `device`.  max_model_len: maximum tokens of a sequence.

    Raises:
        UnsupportedModel: the model does not return its states, or the head does not fit it.
        ModelNotFound, CorruptWeights: as `load_head` does.
    """
    if config.method != "eagle3":
        return None
    if config.draft_model is None:
        raise UnsupportedModel("guessing by an EAGLE-3 head needs one; name its folder")
    if not isinstance(model, LayeredModel):
        raise UnsupportedModel(
            f"an EAGLE-3 head reads states between the layers, which transformers' code for "
            f"{model.spec.architecture} does not return here; draft with n-grams instead"
        )
    embedding, spec = model.embedding, model.spec
    return load_head(
        Path(config.draft_model), spec, embedding, dtype=spec.dtype, device=device, max_positions=max_model_len,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class HeadProposerState:
    """A head with the cache parameters of its target model.

    Attributes:
        groups: of the model's cache.  block_size: tokens of a block.
        vocab_size: of the model.  longest: maximum drafts for a row in a step.
    """

    head: EagleHead
    groups: tuple[CacheGroup, ...]
    block_size: int
    vocab_size: int
    longest: int

    def proposer(self, rows: RowState, attend: Callable[[KVLayout], AttentionBackend]) -> EagleProposer:
        """Create the proposer for these rows; `attend` makes the attention over a layout.

        Raises:
            UnsupportedModel: the model has no full-attention group.
        """
        full, layout = draft_layout(self.head.spec, self.groups, self.block_size)
        own = rows.with_tables([rows.block_tables[full]])
        return EagleProposer(
            self.head, attend(layout), own, group=full, vocab_size=self.vocab_size, longest=self.longest
        )


class EagleProposer:
    """Drafts tokens with a head; a `Proposer`, and a `StateReader`.

    Args:
        attention: over the head's keys.
        rows: the model's rows, with the full-attention group's table.
        group: the index of that group in the model's cache.
        vocab_size: of the model.
        longest: maximum drafts for a row in a step.
    """

    def __init__(
        self,
        head: EagleHead,
        attention: AttentionBackend,
        rows: RowState,
        *,
        group: int,
        vocab_size: int,
        longest: int,
    ) -> None:
        self._head = head
        self._group = group
        self._attention = attention
        self._rows = rows
        self._max_positions = head.spec.max_position
        num_rows, self._vocab_size = len(rows.num_known), vocab_size
        self._device = head.device
        self._sampler = Sampler(num_rows, vocab_size, (), self._device)
        self._owner: list[tuple[Request, int] | None] = [None] * num_rows
        # For each row: the first position that the head has not computed, and the number of stored states from there.
        self._next = np.zeros(num_rows, dtype=np.int32)
        self._count = np.zeros(num_rows, dtype=np.int32)
        shape = num_rows, 1 + longest, head.spec.hidden_size
        self._states = torch.zeros(shape, dtype=head.spec.dtype, device=self._device)

    @property
    def layers(self) -> tuple[int, ...]:
        """See `StateReader.layers`."""
        return self._head.layers

    def learn(self, request: Request, token_ids: Ints) -> None:
        """Do nothing: the head does not learn."""

    @torch.inference_mode()
    def read(self, plan: StepPlan, states: Tensor) -> None:
        """See `StateReader.read`."""
        if copies := [copy for copy in plan.copy_blocks if copy.group == self._group]:
            self._attention.copy(0, copies)
        for row, request, choice in plan.new_rows:
            known = self._rows.token_ids[row, : self._rows.num_known[row]]
            self._sampler.assign(row, without_rules(request), choice, known, int(self._rows.prompt_len[row]))
            self._owner[row] = (request, choice)
            self._next[row] = self._count[row] = 0
        rows, starts, ends = plan.rows, plan.starts, plan.starts + plan.counts
        joined, first = self._head.join(states), np.cumsum(plan.counts) - plan.counts
        # Stored states of rejected drafts are void; behind positions that were not read, all are.
        old = starts - self._next[rows]
        lost = (old < 0) | (old > self._count[rows])
        self._next[rows[lost]], old[lost] = starts[lost], 0
        # Up to here the token behind each position is known.
        done = np.minimum(np.minimum(ends, self._rows.num_known[rows] - 1), self._max_positions)
        counts = done - self._next[rows]
        busy = np.flatnonzero(counts > 0)
        if busy.size:
            busy = busy[np.argsort(counts[busy] > 1, kind="stable")]  # single positions come first
            parts = []
            for i in busy.tolist():
                parts.append(self._states[rows[i], : min(old[i], counts[i])])
                parts.append(joined[first[i] : first[i] + max(0, done[i] - starts[i])])
            self._compute(rows[busy], self._next[rows[busy]], counts[busy], torch.cat(parts))
        self._store_states(rows, np.maximum(done, starts), ends, joined, first - starts)

    def _store_states(self, rows: Ints, begins: Ints, ends: Ints, joined: Tensor, shift: Ints) -> None:
        """Store the states of positions from `begins` to `ends`; `joined` holds those of position p at p + `shift`."""
        counts = np.minimum(ends - begins, self._states.shape[1])
        self._next[rows], self._count[rows] = begins, counts
        offset = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        source = joined.index_select(0, self._upload(np.repeat(begins + shift, counts) + offset))
        self._states.index_put_((self._upload(np.repeat(rows, counts)), self._upload(offset)), source)

    @torch.inference_mode()
    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        lengths = {request.row: length for request in requests if (length := self._length(request)) > 0}
        if lengths:
            rows, max_drafts = np.array(list(lengths), dtype=np.int32), np.array(list(lengths.values()), dtype=np.int32)
            lengths = self._write_drafts(rows, max_drafts)
        return [self._draft(request.row, lengths.get(request.row, 0)) for request in requests]

    def _length(self, request: DraftRequest) -> int:
        """Return how many drafts the head can make: none where it has not read the row's last state."""
        owner, known = self._owner[request.row], int(self._rows.num_known[request.row])
        if owner is None or owner[0] is not request.request or owner[1] != request.choice:
            return 0
        if not 1 <= known - 1 - self._next[request.row] <= self._count[request.row]:
            return 0
        return min(request.max_drafts, self._max_positions + 2 - known)

    def _write_drafts(self, rows: Ints, lengths: Ints) -> dict[int, int]:
        """Write up to `lengths` drafts behind the known tokens of these rows; returns row -> number of drafts."""
        known = self._rows.num_known[rows]
        counts = known - 1 - self._next[rows]
        order = np.argsort(counts > 1, kind="stable")
        rows, lengths, known, counts = rows[order], lengths[order], known[order], counts[order]
        states = torch.cat(
            [self._states[row, :count] for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]
        )
        hidden = self._compute(rows, self._next[rows], counts, states)
        hidden = hidden.index_select(0, self._upload(np.cumsum(counts) - 1))
        self._next[rows], self._count[rows] = known - 1, 0
        made, offset = dict.fromkeys(rows.tolist(), 0), 0
        while True:
            tokens = self._sample(hidden, rows, known + offset)
            alive = tokens >= 0
            self._rows.token_ids[rows[alive], known[alive] + offset] = tokens[alive]
            offset += 1
            made |= dict.fromkeys(rows[alive].tolist(), offset)
            going = np.flatnonzero(alive & (lengths > offset))
            if not going.size:
                return made
            rows, lengths, known = rows[going], lengths[going], known[going]
            hidden = hidden.index_select(0, self._upload(going))
            hidden = self._compute(rows, known + offset - 2, np.ones(len(rows), dtype=np.int32), hidden)

    def _draft(self, row: int, length: int) -> Draft:
        known = int(self._rows.num_known[row])
        return Draft(self._rows.token_ids[row, known : known + length].copy(), "eagle3") if length else NO_DRAFT

    def _compute(self, rows: Ints, starts: Ints, counts: Ints, joined: Tensor) -> Tensor:
        """Compute positions of the head, single ones first; returns their outputs [T, hidden]."""
        none = np.zeros(len(rows), dtype=np.int32)
        plan = StepPlan(
            rows=rows, starts=starts, counts=counts, num_logits=none, samples=none > 0,
            num_decodes=int(np.count_nonzero(counts == 1)), num_tokens=int(counts.sum()),
        )  # fmt: skip
        at_row, positions, _ = flatten(plan, self._rows)
        next_ids = self._upload(self._rows.token_ids[at_row, positions + 1])
        prepared = self._attention.prepare(step_batch(plan, self._rows, at_row, positions, None))
        attend = AttentionStep(self._attention, prepared)
        return self._head.forward(joined, next_ids, self._upload(positions), attend)

    def _sample(self, hidden: Tensor, rows: Ints, at: Ints) -> Ints:
        """Sample tokens of the model's vocabulary at positions `at`, negative where none; hidden [S, hidden]."""
        logits, targets = self._head.logits(hidden), self._head.targets
        if self._sampler.plain(rows).all():
            best, tokens = logits.max(-1)
            tokens = tokens if targets is None else targets[tokens]
            return self._sampler.accept(tokens, torch.isfinite(best), rows).token_ids
        if targets is not None:
            # In the model's order, so that equal distributions draw equal tokens.
            whole = torch.full((len(rows), self._vocab_size), -torch.inf, device=self._device)
            logits = whole.index_copy_(1, targets, logits)
        return self._sampler.sample(logits, rows, at, at - self._rows.prompt_len[rows]).token_ids

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)
