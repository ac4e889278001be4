"""The tier in host memory: preempted rows load their blocks, and no answer depends on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import ScheduleConfig
from engine.plan import STATE_WINDOW, CacheGroup
from engine.request import FinishReason, Request, SamplingParams
from tests.engine.scheduler.scheduler_harness import POISON, VOCAB, DictTier, Harness
from tests.engine.scheduler.test_scheduler_properties import Event, check_history

BLOCK = 4


def request(name: str, prompt: int = 10, answer: int = 24, **changes: object) -> Request:
    """A request that is expected to end at once, so that the pool is filled with rows that grow."""
    rng = np.random.default_rng(int(name, 36))
    params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=int(name, 36) * 5 + 1)
    made = Request(name, rng.integers(2, VOCAB, prompt, dtype=np.int32), params, expected_tokens=1)
    return replace(made, **changes)


def run(host_slots: int | None, blocks: int = 20, count: int = 6, **changes: object) -> Harness:
    """Run requests that need more blocks than there are, to their ends."""
    groups = changes.pop("groups", (CacheGroup((0,), None, blocks + 1),))
    harness = Harness(ScheduleConfig(4, 16), groups, BLOCK, host_slots=host_slots, **{"max_loads": 20, **changes})
    for number in range(count):
        harness.scheduler.add(request("abcdefghijkl"[number]), 0.0)
    harness.run()
    for end in harness.finished.values():
        harness.check_end(end)
    harness.check_empty()
    return harness


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "groups",
    [
        (CacheGroup((0,), None, 21),),
        (CacheGroup((0,), None, 21), CacheGroup((1,), 9, 21)),
        (CacheGroup((0,), None, 21), CacheGroup((1,), STATE_WINDOW, 21, snapshot_blocks=2)),
    ],
    ids=["full", "window", "states"],
)
def test_preempted_rows_load_their_blocks_instead_of_computing_them(groups: tuple[CacheGroup, ...], depth: int) -> None:
    without = run(None, groups=groups, depth=depth).scheduler.stats
    harness = run(60, groups=groups, depth=depth)
    stats = harness.scheduler.stats
    assert without.preemptions > 0
    assert without.recomputed_tokens > stats.preemptions * BLOCK
    # then only what is behind the last whole block is computed again, generated tokens included
    assert harness.loaded > 0
    slack = BLOCK * 2 if len(groups) > 1 and groups[1].snapshot_blocks else BLOCK
    assert stats.recomputed_tokens <= stats.preemptions * slack


def test_a_block_that_is_there_is_not_copied_again() -> None:
    harness = run(60)
    stored = [store.key for plan in harness.plans for store in plan.store_blocks]
    assert len(stored) == len(set(stored))


def test_blocks_that_no_request_will_read_are_not_stored() -> None:
    harness = Harness(ScheduleConfig(2, 16), (CacheGroup((0,), None, 21),), BLOCK, host_slots=60)
    for name in "abcdefgh":
        harness.scheduler.add(request(name, readers_known=True, expected_tokens=24), 0.0)
    harness.run()
    assert not any(plan.store_blocks for plan in harness.plans)
    for name in "ijklmnop":
        harness.scheduler.add(request(name, expected_tokens=24), 0.0)
    harness.run()
    assert any(plan.store_blocks for plan in harness.plans)


def test_a_prefix_of_another_owner_is_not_loaded() -> None:
    harness = run(60, count=4)
    before = harness.loaded
    for name in "abcd":
        harness.scheduler.add(request(name, salt=b"another", answer=1), 1.0)
    harness.finished.clear()
    harness.run()
    assert harness.loaded == before


def test_a_row_that_led_to_non_finite_values_leaves_nothing_in_host_memory() -> None:
    # Given a row that is preempted before its prompt, which is poisoned, is computed,
    harness = Harness(ScheduleConfig(4, 8), (CacheGroup((0,), None, 13),), BLOCK, host_slots=60, max_loads=20)
    good = request("a", prompt=24, answer=4, priority=0)
    bad = request("b", prompt=36, answer=2, priority=1)
    bad = replace(bad, prompt_token_ids=np.insert(bad.prompt_token_ids, 1, POISON).astype(np.int32))
    harness.scheduler.add(bad, 0.0)
    for _ in range(3):
        harness.step()
    harness.scheduler.add(good, 0.0)
    harness.scheduler.add(replace(good, request_id="c", prompt_token_ids=good.prompt_token_ids[::-1].copy()), 0.0)
    # when its blocks are stored and loaded again,
    harness.run()
    assert harness.scheduler.stats.preemptions > 0
    assert any(store.is_suspect for plan in harness.plans for store in plan.store_blocks)
    assert any(plan.load_blocks for plan in harness.plans)
    # then it fails, no other row does, and its blocks are gone.
    for end in harness.finished.values():
        harness.check_end(end)
    assert harness.finished["b", 0].finish_reason is FinishReason.ERROR
    assert harness.host is not None
    poisoned = {store.key for plan in harness.plans for store in plan.store_blocks if store.is_suspect}
    assert not any(harness.host.contains(key) for key in poisoned)


@pytest.mark.parametrize("lose", ["fail", "retract"])
def test_blocks_that_a_failed_step_was_to_fill_are_not_in_host_memory(lose: str) -> None:
    """Steps are planned ahead, so a block may be copied before the step that fills it is found to have failed."""
    harness = Harness(ScheduleConfig(4, 16), (CacheGroup((0,), None, 21),), BLOCK, host_slots=60, depth=2)
    for name in "abcdef":
        harness.scheduler.add(request(name), 0.0)
    while not (harness.in_flight and harness.in_flight[-1].store_blocks):
        harness.step()
    plan = harness.in_flight[0]
    stored = [store.key for flight in harness.in_flight for store in flight.store_blocks]
    assert harness.host is not None
    assert any(harness.host.contains(key) for key in stored)
    if lose == "fail":
        harness.scheduler.fail(plan, "lost", 0.0)
    else:
        assert harness.scheduler.retract(plan, 0.0)
    assert not any(harness.host.contains(key) for key in stored)


def test_host_memory_is_in_front_of_a_disk() -> None:
    # Given a prefix that is on the disk, and evicted from the pool,
    tier = DictTier()
    shared = {"prompt_token_ids": np.arange(2, 22, dtype=np.int32), "expected_tokens": 24}
    harness = Harness(
        ScheduleConfig(2, 16), (CacheGroup((0,), None, 21),), BLOCK, tier=tier, host_slots=60, max_loads=20
    )
    for name in "ab":
        harness.scheduler.add(request(name, **shared), 0.0)
        harness.run()
    assert tier.blocks
    for name in "cdef":
        harness.scheduler.add(request(name), 0.0)
        harness.run()
    # when a request has it, its blocks come from host memory;
    reads = tier.num_loads
    harness.scheduler.add(request("g", **shared), 0.0)
    harness.run()
    assert harness.loaded > 0
    assert tier.num_loads == reads
    # where host memory lacks them, from the disk.
    later = Harness(ScheduleConfig(2, 16), harness.groups, BLOCK, tier=tier, host_slots=60, max_loads=20)
    later.scheduler.add(request("h", **shared), 0.0)
    later.run()
    assert later.loaded > 0
    assert tier.num_loads == reads + later.loaded


@st.composite
def harnesses(draw: st.DrawFn) -> Harness:
    """A pool that is too small for its rows, so that they are preempted."""
    blocks = draw(st.integers(4, 12))
    second = draw(
        st.sampled_from(
            [
                (),
                (),
                (CacheGroup((1,), 6, blocks + 1),),
                (CacheGroup((1,), STATE_WINDOW, blocks + 1, snapshot_blocks=2),),
            ]
        )
    )
    return Harness(
        ScheduleConfig(draw(st.integers(2, 5)), draw(st.sampled_from([3, 8, 24]))),
        (CacheGroup((0,), None, blocks + 1), *second),
        block_size=draw(st.sampled_from([2, 4])),
        depth=draw(st.sampled_from([1, 2, 3])),
        max_drafts=draw(st.sampled_from([0, 0, 3])),
        tier=draw(st.sampled_from([None, 0, 3]).map(lambda every: None if every is None else DictTier(every))),
        host_slots=draw(st.sampled_from([1, 2, 5, 40])),
        max_loads=draw(st.integers(1, 9)),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Requests that share prefixes and are longer than expected; some are cancelled, or come again."""
    events = []
    for index in range(draw(st.integers(2, 10))):
        made = request(
            "abcdefghij"[draw(st.integers(0, index))], draw(st.integers(1, 14)), draw(st.integers(1, 16)),
            request_id=f"r{index}", priority=draw(st.sampled_from([0, 1, 1])), readers_known=draw(st.booleans()),
            salt=draw(st.sampled_from([b"", b"", b"another"])),
        )  # fmt: skip
        if draw(st.integers(0, 6)) == 0:
            prompt = np.insert(made.prompt_token_ids, draw(st.integers(0, len(made.prompt_token_ids))), POISON)
            made = replace(made, prompt_token_ids=prompt.astype(np.int32))
        at = draw(st.integers(0, 20))
        events.append(Event(at, "add", made))
        if draw(st.integers(0, 6)) == 0:
            events.append(Event(at + draw(st.integers(0, 10)), "cancel", made))
    return sorted(events, key=lambda event: event.step)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(harness=harnesses(), history=histories())
def test_every_answer_is_what_the_model_dictates_in_a_pool_that_preempts(
    harness: Harness, history: list[Event]
) -> None:
    check_history(harness, history)


@pytest.mark.exhaustive
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(harness=harnesses(), history=histories())
def test_every_answer_is_what_the_model_dictates_in_many_pools_that_preempt(
    harness: Harness, history: list[Event]
) -> None:
    check_history(harness, history)
