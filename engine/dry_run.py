"""Dry run of an engine: the real scheduler plans steps over the real prefix cache; tokens are placeholders.

So chunks, prefix hits, admission and preemption are real and not modelled. Only the model's output is synthetic, and
with it the length of answers: the expected number of tokens, unless the request ignores end tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engine.adapters.places import AdapterPlaces
from engine.config import EngineConfig
from engine.models.base import ModelSpec
from engine.plan import NO_TOKEN, CacheGroup, StepPlan
from engine.request import Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import FinishedSequence
from engine.scheduler.step_cost import count_group_work

NEVER = np.iinfo(np.int32).max


class StepWork(NamedTuple):
    """The work of a step, as far as its time depends on it.

    Attributes:
        tokens: positions computed.  logits: of them, those whose logits are needed.
        reads: keys read by rows that compute one token, those in shared blocks counted once; mean over the layers.
        pairs: (query, key) pairs of all rows; mean over the layers.
        waiting: sequences that had no row.
    """

    tokens: int
    logits: int
    reads: float
    pairs: float
    waiting: int


class DryRun:
    """An engine's scheduler without a model, with the engine's interface for requests.

    Attributes:
        prompt_tokens: of all requests that have ended.  cached_tokens: of them, taken from the prefix cache when the
            first choice was admitted.  generated_tokens: of their answers, all choices.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec, groups: tuple[CacheGroup, ...]) -> None:
        adapters = {name: name.encode() for name, _ in config.lora.adapters}
        self.scheduler = Scheduler(
            config.schedule,
            groups,
            config.cache.block_tokens,
            spec.max_position if config.max_model_len is None else min(config.max_model_len, spec.max_position),
            prefix_caching=config.cache.prefix_caching,
            eos_token_ids=(),
            rope_original_max=spec.rope_original_max,
            places=AdapterPlaces(adapters, min(config.lora.max_loras, len(adapters))),
        )
        self._end_token = spec.vocab_size  # no prompt holds it
        self._ends_at = np.full(config.schedule.rows, NEVER, dtype=np.int64)  # known tokens, by row
        # Layers that read those of others (`ModelSpec.reads`) are in no group, but attend.
        attending = [spec.windows[layer] for layer in spec.attending_layers]
        self._groups = [
            (group.window, attending.count(group.window) / spec.num_layers)
            for group in groups
            if group.snapshot_blocks is None
        ]
        self._seen = np.zeros(max(group.num_blocks for group in groups) + 1, dtype=np.bool_)
        self._lengths: dict[str, int] = {}
        self._choices: dict[str, int] = {}
        self._steps = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request; its answer ends after `expected_tokens`. Raises as `Scheduler.add`."""
        params = replace(request.params, stop_token_ids=(self._end_token,), ignore_eos=True, min_tokens=0)
        free = not request.params.ignore_eos and request.expected_tokens is not None
        self.scheduler.add(replace(request, params=params, watcher=None, mask=None, partial=()), 0.0)
        self._choices[request.request_id] = params.n
        if free and request.expected_tokens is not None and request.expected_tokens < params.max_tokens:
            self._lengths[request.request_id] = request.expected_tokens

    def step(self) -> tuple[StepWork, list[str]] | None:
        """Plan a step and count it as computed: returns its work, and the requests that ended with it. None: no step
        can be planned."""
        plan = self.scheduler.schedule(0.0)
        if plan is None:
            return None
        rows = self.scheduler.rows
        for new in plan.new_rows:
            length = self._lengths.get(new.request.request_id)
            self._ends_at[new.row] = NEVER if length is None else len(new.request.prompt_token_ids) + length
        work = self._work(plan)
        self._steps += 1
        # Tokens differ from row to row and from step to step, so that no answer equals another's prefix.
        made = (plan.rows.astype(np.int64) * 7919 + self._steps * 31) % self._end_token
        tokens = np.where(rows.num_known[plan.rows] + 1 >= self._ends_at[plan.rows], self._end_token, made)
        tokens = np.where(plan.samples, tokens, NO_TOKEN).astype(np.int32)
        ended = self.scheduler.update(plan, tokens, np.zeros(len(plan.rows), dtype=np.bool_), 0.0)
        return work, [name for sequence in ended if (name := self._end(sequence)) is not None]

    def _work(self, plan: StepPlan) -> StepWork:
        singles = slice(0, plan.num_decodes)
        one_each = replace(
            plan, rows=plan.rows[singles], starts=plan.starts[singles], counts=plan.counts[singles],
            num_logits=plan.num_logits[singles], samples=plan.samples[singles],
        )  # fmt: skip
        state, reads, pairs = self.scheduler.rows, 0.0, 0.0
        for (window, share), table in zip(self._groups, state.block_tables, strict=False):  # states come last
            pairs += share * count_group_work(plan, table, window, state.block_size, self._seen).pairs
            if plan.num_decodes:
                reads += share * count_group_work(one_each, table, window, state.block_size, self._seen).read_tokens
        return StepWork(plan.num_tokens, int(plan.num_logits.sum()), reads, pairs, self.scheduler.num_waiting)

    def _end(self, sequence: FinishedSequence) -> str | None:
        """Count a sequence that has ended; returns its request's id if it was the request's last one."""
        request = sequence.request
        self.generated_tokens += sequence.generated_tokens
        if sequence.choice == 0:
            self.prompt_tokens += len(request.prompt_token_ids)
            self.cached_tokens += sequence.cached_tokens
        self._choices[request.request_id] -= 1
        if self._choices[request.request_id]:
            return None
        del self._choices[request.request_id]
        self._lengths.pop(request.request_id, None)
        return request.request_id
