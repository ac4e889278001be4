"""Whatever the pools, classes, cancels, deadlines and failures: every answer is the one that the model dictates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import ScheduleConfig, SloConfig
from engine.errors import ContextLengthExceeded
from engine.plan import STATE_WINDOW, CacheGroup
from engine.request import FinishReason, Request, SamplingParams
from tests.engine.scheduler.scheduler_harness import ADAPTERS, POISON, VOCAB, DictTier, Harness


class EveryNth:
    """A watcher that ends its choice at the first token divisible by n."""

    def __init__(self, n: int) -> None:
        self.n = n

    def push(self, token_id: int) -> bool:
        return token_id % self.n == 0


def colliding(parent: bytes, token_bytes: bytes) -> bytes:
    """A digest with three values."""
    return bytes([sum(parent + token_bytes) % 3])


@dataclass(frozen=True)
class Event:
    step: int
    kind: str
    request: Request


@st.composite
def requests(draw: st.DrawFn, index: int) -> Request:
    shared = draw(st.integers(0, 3))
    prefix = [(shared * 7 + i) % (VOCAB - 2) + 2 for i in range(draw(st.integers(0, 20)))]
    tail = draw(st.lists(st.integers(1, VOCAB - 1), min_size=0 if prefix else 1, max_size=8))
    prompt = prefix + tail
    if draw(st.integers(0, 9)) == 0:
        prompt.insert(draw(st.integers(0, len(prompt))), POISON)
    max_tokens = draw(st.integers(0, 24))
    kind = draw(st.sampled_from(["plain"] * 6 + ["scored", "watched", "pooled", "mean"]))
    pooled = kind in ("pooled", "mean")
    many_stops = tuple(range(10, 20)) if draw(st.integers(0, 7)) == 0 else ()
    params = SamplingParams(
        max_tokens=0 if pooled else max_tokens,
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        seed=index if draw(st.booleans()) else 1,
        min_tokens=0 if pooled else draw(st.integers(0, min(max_tokens, 3))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=many_stops or ((5, 6) if draw(st.booleans()) else ()),
        prompt_logprobs=1 if kind == "scored" else None,
        prompt_logprobs_start=draw(st.integers(0, len(prompt) + 1)) if kind == "scored" else 0,
    )
    n = draw(st.integers(3, 9))
    return Request(
        f"r{index}",
        np.array(prompt, dtype=np.int32),
        params,
        priority=draw(st.integers(0, 2)),
        deadline=float(draw(st.integers(1, 40))) if draw(st.integers(0, 7)) == 0 else None,
        expected_tokens=draw(st.sampled_from([None, None, 0, 1, 8, 100])),
        prefix_group=shared if draw(st.booleans()) else None,
        readers_known=draw(st.booleans()),
        retain=draw(st.sampled_from([(), (), ((len(prompt), 5.0),), ((len(prompt) // 2, 30.0), (len(prompt), 3.0))])),
        salt=draw(st.sampled_from([b"", b"", b"one", b"another"])),
        adapter=draw(st.sampled_from([None, None, *ADAPTERS])),
        watcher=(lambda _choice: EveryNth(n)) if kind == "watched" else None,
        pooling={"pooled": "last", "mean": "mean"}.get(kind),
    )


@st.composite
def harnesses(draw: st.DrawFn) -> Harness:
    options = draw(st.sampled_from([{}, {}, {"digest": colliding}]))
    # A tier finds blocks by digests alone, and so needs ones that don't collide.
    damage_every = None if options else draw(st.sampled_from([None, 0, 3]))
    block_size = draw(st.sampled_from([1, 2, 4, 5, 8]))
    usable = draw(st.integers(2, 24))
    windows = draw(st.sampled_from([(None,), (None,), (None, 6), (6,), (None, 3, 9), (1,)]))
    every = draw(st.sampled_from([None, None, None, 1, 2, 5]))
    states = (
        ()
        if every is None
        else (CacheGroup((len(windows),), STATE_WINDOW, draw(st.integers(3, 24)) + 1, snapshot_blocks=every),)
    )
    return Harness(
        ScheduleConfig(
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.sampled_from([1, 3, 7, 16, 64])),
            max_chunk_tokens=draw(st.sampled_from([None, None, 1, 3, 8])),
            slo=draw(st.sampled_from([None, SloConfig(1e-9, 1e-9), SloConfig(1e9, 1e9), SloConfig(1.0, 1.0)])),
        ),
        tuple(
            CacheGroup((i,), window, (usable if i == 0 else draw(st.integers(2, 24))) + 1)
            for i, window in enumerate(windows)
        )
        + states,
        block_size=block_size,
        prefix_caching=draw(st.booleans()),
        rope_original_max=draw(st.sampled_from([None, None, 12])),
        depth=draw(st.sampled_from([1, 1, 2, 3])),
        options=options,
        max_drafts=draw(st.sampled_from([0, 1, 3, 9])),
        tier=None if damage_every is None else DictTier(damage_every),
        host_slots=None if options else draw(st.sampled_from([None, 1, 4, 30])),
        max_loads=draw(st.integers(1, 9)),
        max_loras=draw(st.integers(1, 3)),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    events = []
    for index in range(draw(st.integers(1, 12))):
        request = draw(requests(index))
        at = draw(st.integers(0, 12))
        events.append(Event(at, "add", request))
        if draw(st.integers(0, 5)) == 0:
            events.append(Event(at + draw(st.integers(0, 10)), "cancel", request))
    return sorted(events, key=lambda event: event.step)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(harness=harnesses(), history=histories())
def test_every_answer_is_what_the_model_dictates_under_any_history(harness: Harness, history: list[Event]) -> None:
    check_history(harness, history)
    if harness.tier is not None:  # again by a later process, which finds blocks of the first one
        check_history(replace(harness), history)


def check_history(harness: Harness, history: list[Event]) -> None:
    # Given requests that come and go at any time, a pool of any size, and any limits,
    accepted: list[Request] = []
    step = 0
    for event in history:
        while step < event.step:
            harness.step(float(step))
            step += 1
        if event.kind == "cancel":
            harness.scheduler.cancel(event.request.request_id)
            continue
        request = harness.suited(event.request)
        try:
            harness.scheduler.add(request, float(step))
        except ContextLengthExceeded:
            continue
        accepted.append(request)
    # when all steps are computed on a simulated paged cache (which checks every key that is read),
    harness.run(float(step))
    # then each choice ends exactly once, with exactly its tokens, and nothing is left behind.
    due = {(request.request_id, choice) for request in accepted for choice in range(request.params.n)}
    assert set(harness.finished) == due
    cancelled = {event.request.request_id for event in history if event.kind == "cancel"}
    for (request_id, _), end in harness.finished.items():
        harness.check_end(end)
        if end.finish_reason is FinishReason.CANCELLED:
            assert request_id in cancelled
        if end.finish_reason is FinishReason.TIMEOUT:
            assert end.request.deadline is not None
            assert end.request.deadline <= step
    harness.check_empty()
