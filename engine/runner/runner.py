"""The model runner: row state -> persistent input buffers -> forward -> logits of the rows that need them -> tokens.

The host side is a handful of numpy operations over the whole step, whatever the number of rows. A step has two halves:
`submit` queues all work of the device, `result` waits for the output. Sampled tokens stay on the device as well, so
that the next step can be submitted before the host has the tokens that it begins with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.loader import AdapterLoader
from engine.attention import AttentionBackend, AttentionBatch, AttentionStep
from engine.device_transfer import Download, make_transfer
from engine.models.base import CausalModel, LayeredModel
from engine.models.encoders.pooling import Pooler
from engine.plan import NO_TOKEN, RowState, StepOutput, StepPlan
from engine.runner.graphs import Graphs
from engine.runner.second_tier import SecondTier
from engine.sampling.sampler import NON_FINITE, SampleOutput, Sampler, prompt_logprobs, target_logprobs
from engine.speculative.verify import NO_DRAFT_ID, Drafted, Line, Verifier
from engine.states import StateStep, StateStorage

LOGITS_ROWS = 128
"""Prompt positions whose logits are held at once when prompt log-probabilities are requested."""


class StepRunner(Protocol):
    """Computes steps. Implemented by the model runner and by the null runner (no model)."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute the plan's positions and sample the next tokens of the rows that are complete."""
        ...


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """A step that was submitted to the device.

    Attributes:
        plan: of the step.
        output: its results, where the host needed them at once.
        indices: int64 [S], indices of the plan's rows that sample.  packed: their samples, as `Sampler.pack` returns
            them.
    """

    plan: StepPlan
    output: StepOutput | None = None
    indices: NDArray[np.int64] | None = None
    packed: Download | None = None


@runtime_checkable
class AheadRunner(StepRunner, Protocol):
    """A runner whose steps can be submitted to the device before the host has the results of the last one."""

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Submit the plan to the device. Its rows that are `ahead` start from the samples of the step before."""
        ...

    def result(self, submitted: SubmittedStep) -> StepOutput:
        """Wait for the step's output, not for steps submitted later. Called once for each step, in order."""
        ...


def flatten(plan: StepPlan, rows: RowState) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return rows, positions and token ids of the step's tokens, each int64 [T], in plan order. The id of a token that
    is not known yet (`StepPlan.ahead`) is -1 - row."""
    if plan.num_decodes == len(plan.rows):
        at_row, positions = plan.rows.astype(np.int64), plan.starts.astype(np.int64)
    else:
        first = np.cumsum(plan.counts) - plan.counts
        at_row = np.repeat(plan.rows, plan.counts).astype(np.int64)
        positions = np.arange(plan.num_tokens, dtype=np.int64) + np.repeat(plan.starts - first, plan.counts)
    token_ids = rows.token_ids[at_row, positions].astype(np.int64)
    if plan.ahead is not None:
        last = plan.ends[plan.ahead] - 1
        token_ids[last] = -1 - at_row[last]
    return at_row, positions, token_ids


def step_batch(
    plan: StepPlan,
    rows: RowState,
    at_row: NDArray[np.int64],
    positions: NDArray[np.int64],
    wanted: NDArray[np.int32] | None,
    num_groups: int | None = None,
) -> AttentionBatch:
    """Build the attention batch of a step.

    Args:
        at_row, positions: of `flatten`.
        num_groups: the first so many cache groups have keys and values; None: all.
    """
    block, offset = np.divmod(positions, rows.block_size)
    width = int(block.max()) + 1
    tables, slots = [], []
    for table in rows.block_tables[:num_groups]:
        slots.append(table[at_row, block].astype(np.int64) * rows.block_size + offset)
        tables.append(table[plan.rows, :width])
    return AttentionBatch(plan.starts, plan.counts, plan.num_decodes, tuple(tables), tuple(slots), wanted)


@runtime_checkable
class StateReader(Protocol):
    """Reads hidden states between a model's layers in each step."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose inputs it reads, as `LayeredModel.forward_with_states` takes them."""
        ...

    def read(self, plan: StepPlan, states: Tensor) -> None:
        """Read a step's states [T, len(layers) * hidden_size], in the plan's order, before sampling."""
        ...


class ModelRunner:
    """Runs the steps of one model on one device.

    Args:
        graphs: captured forward passes for steps of some shapes; None: all steps run eagerly.
        states: of the model's layers that have states instead of keys and values; None: none have. Their cache group is
            the last one.
        second_tier: stores and fills the blocks that plans name; None: they name none.
        adapters: loads those that plans name; None: they name none.

    Attributes:
        graph_steps: steps that replayed a graph.
    """

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        rows: RowState,
        *,
        max_num_seqs: int,
        device: torch.device,
        graphs: Graphs | None = None,
        states: StateStorage | None = None,
        second_tier: SecondTier | None = None,
        adapters: AdapterLoader | None = None,
    ) -> None:
        self.graph_steps = 0
        self._adapters = adapters
        self._states = states
        self._second_tier = second_tier
        self._state_step: StateStep | None = None  # of the latest step
        self._graphs = graphs
        self._transfer = make_transfer(device)
        self._sampled = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # each row's latest token
        self._model = model
        self._attention = attention
        self._rows = rows
        self._sampler = Sampler(max_num_seqs, model.spec.vocab_size, model.spec.eos_token_ids, device)
        self._greedy: Callable[[Tensor], tuple[Tensor, Tensor]] | None = getattr(model, "greedy", None)
        self._verifier = Verifier(self._sampler, model.logits, self._greedy)
        self._pooler = Pooler()
        self._reader: StateReader | None = None
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}  # row -> how many of each, the first position
        self._targets: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}  # row -> positions, token ids

    def set_reader(self, reader: StateReader) -> None:
        """Set the reader of each step's states; the model must be a `LayeredModel`."""
        self._reader = reader

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        return self._outputs(plan, self._forward(plan))

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> SubmittedStep:
        """See `AheadRunner`. A step of which the host needs more than tokens is complete when this returns."""
        hidden = self._forward(plan)
        indices = np.flatnonzero(plan.samples)
        rows = plan.rows[indices]
        seen = plan.drafts is not None or self._scores(plan) or self._pooler.concerns(plan.rows)
        if seen or self._sampler.awaited(rows).any():
            output = self._outputs(plan, hidden)
            if len(indices):  # the next step reads its tokens from the same buffer in both cases
                self._store_sampled(rows, *self._transfer.up(output.token_ids[indices].astype(np.int64)))
            return SubmittedStep(plan, output)
        if not len(indices):
            return SubmittedStep(plan, self._empty_output(plan))
        packed = self._draw(self._last_hidden(plan, hidden, indices), rows, (plan.starts + plan.counts)[indices])
        self._store_sampled(rows, packed[0])
        return SubmittedStep(plan, None, indices, self._transfer.down(packed))

    def _store_sampled(self, rows: NDArray[np.int32], tokens: Tensor) -> None:
        """Store the tokens that these rows sampled, int64 [S], for the next step."""
        (at,) = self._transfer.up(rows.astype(np.int64))
        # A draw from non-finite values is not a token. Its row fails, but the next step still embeds it: clamp it.
        self._sampled.index_copy_(0, at, tokens.clamp(0, self._model.spec.vocab_size - 1))

    def result(self, submitted: SubmittedStep) -> StepOutput:
        """See `AheadRunner`."""
        if submitted.output is not None:
            return submitted.output
        assert submitted.indices is not None
        assert submitted.packed is not None
        output = self._empty_output(submitted.plan)
        sampled = self._sampler.unpack(submitted.packed.numpy(), submitted.plan.rows[submitted.indices])
        output.token_ids[submitted.indices] = sampled.token_ids
        output.failed[submitted.indices] = sampled.failed
        output.reasons.update((row, why) for row, why in sampled.reasons.items() if why != NON_FINITE)
        return output

    @staticmethod
    def _empty_output(plan: StepPlan) -> StepOutput:
        """Return the output of a step in which no row samples."""
        rows = len(plan.rows)
        return StepOutput(np.full(rows, NO_TOKEN, dtype=np.int32), np.zeros(rows, dtype=np.bool_), {}, {}, {})

    def _forward(self, plan: StepPlan) -> Tensor:
        """Compute the step's last hidden states [T, hidden_size], valid until the next step's."""
        self._load_rows(plan)
        at_row, positions, token_ids = flatten(plan, self._rows)
        groups = None if self._states is None else self._states.group
        batch = step_batch(plan, self._rows, at_row, positions, self._logit_tokens(plan), groups)
        input_ids, device_positions = self._transfer.up(token_ids, positions)
        if plan.ahead is not None:
            input_ids = torch.where(input_ids < 0, self._sampled[(-1 - input_ids).clamp(min=0)], input_ids)
        lengths = self._rope_lengths(at_row, positions)
        adapters = None
        if self._adapters is not None:
            self._adapters.load(plan.loaded)
            adapters = None if plan.adapters is None else np.repeat(plan.adapters, plan.counts)
        if self._graphs is not None and lengths is None and self._recordable(plan):
            shape = self._graphs.pick(len(plan.rows), plan.num_tokens, plan.num_decodes)
            if shape is not None:
                self.graph_steps += 1
                return self._graphs.forward(shape, input_ids, device_positions, batch, adapters)
        self._state_step = None if self._states is None else self._states.step(plan, self._rows)
        attend = AttentionStep(self._attention, self._attention.prepare(batch), self._state_step, batch, adapters)
        inputs = input_ids, device_positions, attend, lengths
        if self._reader is None:
            return self._model.forward(*inputs)
        assert isinstance(self._model, LayeredModel), "only a LayeredModel returns its states"
        hidden, states = self._model.forward_with_states(*inputs, self._reader.layers)
        self._reader.read(plan, states)
        return hidden

    def _recordable(self, plan: StepPlan) -> bool:
        """Whether a graph's output suffices for the step. Prompts that are scored or pooled come in long chunks, which
        seldom match a graph, and their hidden states are needed for longer than until the next step."""
        return self._reader is None and not self._pooler.concerns(plan.rows) and not self._scores(plan)

    def _scores(self, plan: StepPlan) -> bool:
        """Whether log-probabilities of prompt tokens are needed from this step."""
        if not (self._prompt_logprobs or self._targets):
            return False
        left = (self._rows.prompt_len[plan.rows] - plan.starts).tolist()
        return any(
            (count > 1 and row in self._prompt_logprobs) or (count > 0 and row in self._targets)
            for row, count in zip(plan.rows.tolist(), left, strict=True)
        )

    def _last_hidden(self, plan: StepPlan, hidden: Tensor, indices: NDArray[np.int64]) -> Tensor:
        """Return the hidden states of the last tokens of these rows of the plan [S, hidden_size]."""
        if len(indices) == plan.num_tokens:
            return hidden
        (last,) = self._transfer.up(plan.ends[indices] - 1)
        return hidden.index_select(0, last)

    def _draw(self, hidden: Tensor, rows: NDArray[np.int32], at: NDArray[np.int32]) -> Tensor:
        """Sample as `_sample`, with the result on the device: int64 [3, S] of `Sampler.pack`."""
        num_outputs = at - self._rows.prompt_len[rows]
        plain = np.zeros(len(rows), dtype=np.bool_) if self._greedy is None else self._sampler.plain(rows)
        if self._greedy is None or not plain.any():
            return self._sampler.draw(self._model.logits(hidden), rows, at, num_outputs)
        packed = torch.empty(3, len(rows), dtype=torch.int64, device=hidden.device)
        easy, rest = np.flatnonzero(plain), np.flatnonzero(~plain)
        to_easy, to_rest = self._transfer.up(easy, rest)
        tokens, alive = self._greedy(hidden[to_easy] if len(rest) else hidden)
        packed[:, to_easy] = self._sampler.pack(tokens, alive, alive)
        if len(rest):
            logits = self._model.logits(hidden[to_rest])
            packed[:, to_rest] = self._sampler.draw(logits, rows[rest], at[rest], num_outputs[rest])
        return packed

    def _load_rows(self, plan: StepPlan) -> None:
        """Store, zero, fill and copy the plan's blocks, and load the parameters of rows with a new owner."""
        if self._second_tier is not None:
            self._second_tier.store_evicted(plan.store_blocks)
        for group in {ref.group for ref in plan.zero_blocks}:
            self._attention.zero(group, [ref.block for ref in plan.zero_blocks if ref.group == group])
        if self._second_tier is not None:
            self._second_tier.load(plan.load_blocks)
        for group in {copy.group for copy in plan.copy_blocks}:
            self._attention.copy(group, [copy for copy in plan.copy_blocks if copy.group == group])
        rows = self._rows
        for row, request, choice in plan.new_rows:
            known = rows.token_ids[row, : rows.num_known[row]]
            self._sampler.assign(row, request, choice, known, int(rows.prompt_len[row]))
            self._pooler.assign(row, request)
            self._prompt_logprobs.pop(row, None)
            if request.params.prompt_logprobs is not None and choice == 0:
                first = max(0, request.params.prompt_logprobs_start - 1)
                self._prompt_logprobs[row] = request.params.prompt_logprobs, first
            self._targets.pop(row, None)
            if request.params.prompt_targets and choice == 0:
                indices, ids = np.array(request.params.prompt_targets, dtype=np.int64).T
                self._targets[row] = indices - 1, ids

    def _logit_tokens(self, plan: StepPlan) -> NDArray[np.int32] | None:
        """Return the tokens whose last hidden states `_outputs` will read; None: all."""
        total = int(plan.num_logits.sum())
        if self._reader is not None and self._reader.layers[-1] == self._model.spec.num_layers:
            return None
        if self._pooler.concerns(plan.rows) or total == plan.num_tokens:
            return None
        if total == np.count_nonzero(plan.samples):
            return np.ascontiguousarray((plan.ends - 1)[plan.samples], dtype=np.int32)
        first = plan.ends - np.cumsum(plan.num_logits)  # of each row's lines, less the lines before it
        wanted: NDArray[np.int32] = (np.arange(total) + np.repeat(first, plan.num_logits)).astype(np.int32)
        return wanted

    def _rope_lengths(self, at_row: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor | None:
        if self._model.spec.rope_original_max is None:
            return None
        lengths = np.maximum(self._rows.prompt_len[at_row].astype(np.int64), positions + 1)
        return self._transfer.up(lengths)[0]

    def _outputs(self, plan: StepPlan, hidden: Tensor) -> StepOutput:
        """Sample, score and pool from the last hidden states [T, hidden_size]."""
        token_ids, failed, logprobs, reasons = self._sample_plan(plan, hidden)
        accepted, tainted = None, frozenset[int]()
        if plan.drafts is not None:
            indices = np.flatnonzero(plan.drafts)
            verified = self._verifier.verify(hidden, self._drafted(plan, indices))
            accepted = np.zeros(len(plan.rows), dtype=np.int32)
            accepted[indices] = verified.accepted
            token_ids[indices], failed[indices] = verified.token_ids, verified.failed
            logprobs |= verified.logprobs
            reasons, tainted = reasons | verified.reasons, frozenset(verified.tainted)
            if self._state_step is not None:
                self._state_step.accept(accepted)
        reasons = {row: reason for row, reason in reasons.items() if reason != NON_FINITE}
        scored = self._score(plan, hidden, failed) if self._prompt_logprobs else {}
        for row in scored:
            if np.isnan(scored[row][1]).any():
                reasons.pop(row, None)
        targets = self._score_targets(plan, hidden, failed) if self._targets else {}
        for row in targets:
            if np.isnan(targets[row][1]).any():
                reasons.pop(row, None)
        pooled = {}
        if self._pooler.concerns(plan.rows):
            pooled = self._pooler.take(plan, hidden, plan.ends, self._rows, failed)
        return StepOutput(token_ids, failed, logprobs, scored, pooled, reasons, accepted, tainted, targets)

    def _sample_plan(
        self, plan: StepPlan, hidden: Tensor
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], dict[int, list[Line]], dict[int, str]]:
        """Sample the rows that have no drafts, and return `StepOutput`'s first fields and the reasons of failures."""
        samples = plan.samples if plan.drafts is None else plan.samples & (plan.drafts == 0)
        at = plan.starts + plan.counts
        if samples.all():
            out = self._sample(self._last_hidden(plan, hidden, np.arange(len(at))), plan.rows, at)
            token_ids, failed = out.token_ids, out.failed
        else:
            token_ids = np.full(len(at), NO_TOKEN, dtype=np.int32)
            failed = np.zeros(len(at), dtype=np.bool_)
            indices = np.flatnonzero(samples)
            if not len(indices):
                return token_ids, failed, {}, {}
            out = self._sample(self._last_hidden(plan, hidden, indices), plan.rows[indices], at[indices])
            token_ids[indices], failed[indices] = out.token_ids, out.failed
        return token_ids, failed, {row: [line] for row, line in out.logprobs.items()}, out.reasons

    def _drafted(self, plan: StepPlan, indices: NDArray[np.intp]) -> Drafted:
        """Return the rows with drafts, at `indices` of the plan."""
        assert plan.drafts is not None
        rows, counts = plan.rows[indices], plan.drafts[indices]
        at = plan.starts[indices] + plan.counts[indices] - counts  # the first draft's position
        columns = np.arange(int(counts.max()))
        drafts = self._rows.token_ids[rows[:, None], at[:, None] + np.minimum(columns, counts[:, None] - 1)]
        drafts = np.where(columns < counts[:, None], drafts, NO_DRAFT_ID).astype(np.int32)
        first = (plan.ends[indices] - counts - 1).astype(np.int64)
        return Drafted(rows, first, drafts, counts, at, at - self._rows.prompt_len[rows])

    def _sample(self, hidden: Tensor, rows: NDArray[np.int32], at: NDArray[np.int32]) -> SampleOutput:
        """Sample the next tokens of `rows`, at positions `at`, from their last hidden states [S, hidden_size].

        Where the model supports it, plain greedy rows never have all their logits written.
        """
        plain = np.zeros(len(rows), dtype=np.bool_) if self._greedy is None else self._sampler.plain(rows)
        if self._greedy is not None and plain.all():
            return self._sampler.accept(*self._greedy(hidden), rows)
        num_outputs = at - self._rows.prompt_len[rows]
        if self._greedy is None or not plain.any():
            return self._sampler.sample(self._model.logits(hidden), rows, at, num_outputs)
        easy, rest = np.flatnonzero(plain), np.flatnonzero(~plain)
        chosen = self._sampler.accept(*self._greedy(hidden[torch.from_numpy(easy)]), rows[easy])
        logits = self._model.logits(hidden[torch.from_numpy(rest)])
        out = self._sampler.sample(logits, rows[rest], at[rest], num_outputs[rest])
        token_ids = np.empty(len(rows), dtype=np.int32)
        failed = np.empty(len(rows), dtype=np.bool_)
        for lines, part in ((easy, chosen), (rest, out)):
            token_ids[lines], failed[lines] = part.token_ids, part.failed
        return SampleOutput(token_ids, failed, chosen.reasons | out.reasons, out.logprobs)

    def _score(
        self, plan: StepPlan, hidden: Tensor, failed: NDArray[np.bool_]
    ) -> dict[int, tuple[int, NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]]:
        """Compute log-probabilities of the prompt tokens that follow this step's positions: those of many rows at once,
        because the head reads all of its weights for each call."""
        ends = plan.ends
        wanted: dict[int, list[tuple[int, int, int]]] = {}  # top -> index in the plan, first position, end
        for i, row in enumerate(plan.rows.tolist()):
            if row not in self._prompt_logprobs:
                continue
            top, first = self._prompt_logprobs[row]
            start = max(first, int(plan.starts[i]))
            stop = min(int(plan.starts[i] + plan.counts[i]), int(self._rows.prompt_len[row]) - 1)
            if start < stop:
                wanted.setdefault(top, []).append((i, start, stop))
        scored = {}
        for top, parts in wanted.items():
            before = [int(ends[i] - plan.counts[i] - plan.starts[i]) for i, _, _ in parts]  # of position 0 in `hidden`
            spans = zip(before, parts, strict=True)
            index = np.concatenate([np.arange(at + start, at + stop) for at, (_, start, stop) in spans])
            targets = np.concatenate(
                [self._rows.token_ids[plan.rows[i], start + 1 : stop + 1] for i, start, stop in parts]
            )
            chosen, ids, values = self._score_positions(hidden, index, targets, top)
            borders = np.cumsum([stop - start for _, start, stop in parts])[:-1]
            lines = zip(*(np.split(array, borders) for array in (chosen, ids, values)), strict=True)
            for (i, start, _), line in zip(parts, lines, strict=True):
                failed[i] |= bool(np.isnan(line[0]).any())
                scored[int(plan.rows[i])] = (start + 1, *line)
        return scored

    def _score_targets(
        self, plan: StepPlan, hidden: Tensor, failed: NDArray[np.bool_]
    ) -> dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Compute log-probabilities of the targets behind this step's positions. Each position's logits are computed
        once, and those of many rows at once."""
        ends = plan.ends
        found: list[tuple[int, NDArray[np.int64]]] = []  # index in the plan, numbers of the row's targets
        index: list[NDArray[np.int64]] = []
        ids: list[NDArray[np.int64]] = []
        for i, row in enumerate(plan.rows.tolist()):
            if row not in self._targets:
                continue
            positions, tokens = self._targets[row]
            start, count = int(plan.starts[i]), int(plan.counts[i])
            numbers = np.flatnonzero((start <= positions) & (positions < start + count))
            if len(numbers):
                found.append((i, numbers))
                index.append(positions[numbers] + (int(ends[i]) - count - start))
                ids.append(tokens[numbers])
        if not found:
            return {}
        lines, at = np.unique(np.concatenate(index), return_inverse=True)
        targets = np.concatenate(ids)
        values = np.empty(len(targets), dtype=np.float32)
        for first in range(0, len(lines), LOGITS_ROWS):
            (part,) = self._transfer.up(lines[first : first + LOGITS_ROWS])
            here = np.flatnonzero((at >= first) & (at < first + LOGITS_ROWS))
            logits = self._model.logits(hidden.index_select(0, part))
            values[here] = target_logprobs(logits, at[here] - first, targets[here])
        scored: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        borders = np.cumsum([len(numbers) for _, numbers in found])[:-1]
        for (i, numbers), own in zip(found, np.split(values, borders), strict=True):
            failed[i] |= bool(np.isnan(own).any())
            scored[int(plan.rows[i])] = numbers, own
        return scored

    def _score_positions(
        self, hidden: Tensor, index: NDArray[np.int64], targets: NDArray[np.int32], top: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """See `prompt_logprobs`; of the hidden states at `index`."""
        parts = []
        for at in range(0, len(index), LOGITS_ROWS):
            (lines,) = self._transfer.up(index[at : at + LOGITS_ROWS])
            logits = self._model.logits(hidden.index_select(0, lines))
            parts.append(prompt_logprobs(logits, targets[at : at + LOGITS_ROWS], top))
        chosen, ids, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return chosen, ids, values
