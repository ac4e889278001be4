"""Sequences that agree up to the middle of a block: one computes that part, and the others copy it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import ScheduleConfig
from engine.plan import CacheGroup
from engine.request import FinishReason, Request
from tests.engine.scheduler.scheduler_harness import POISON, Harness
from tests.engine.scheduler.test_scheduler import finish, harness, make_request, shared


def wide(**more: object) -> Harness:
    return harness(**{"block_size": 16, "max_model_len": 128, "blocks": (40, 40), "budget": 256} | more)


def scored(name: str, prompt: list[int], **more: object) -> Request:
    """A request that only scores the end of its prompt; such ones wait for each other."""
    return make_request(name, prompt, 0, prompt_targets=((len(prompt), 5),), **more)


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 24)])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("block_size", "prompt", "more"), [(16, 30, 2), (16, 14, 2), (4, 31, 1), (16, 46, 1)])
def test_a_prompt_with_four_ends_is_computed_once(
    windows: tuple[int | None, ...], depth: int, block_size: int, prompt: int, more: int
) -> None:
    h = wide(block_size=block_size, depth=depth, windows=windows)
    for end in range(4):
        h.scheduler.add(scored(f"r{end}", [*shared(prompt), *[3 + end] * more]), 0.0)
    finish(h)
    assert h.scheduler.stats.computed_tokens == prompt + 4 * more
    assert h.scheduler.stats.steps == 2
    assert [h.finished[f"r{end}", 0].cached_tokens for end in range(4)] == [0] + [prompt] * 3
    assert h.copied == 3 * (prompt % block_size)


def test_rows_of_several_requests_do_not_wait_for_each_other() -> None:
    h = wide()
    for at in range(4):
        h.scheduler.add(make_request(f"r{at}", shared(30), 5), 0.0)
    plan = h.step()
    assert plan is not None
    assert len(plan.rows) == 4
    finish(h)


def test_choices_compute_the_last_token_of_their_prompt() -> None:
    h = wide()
    h.scheduler.add(make_request("r", shared(30), 5, n=4), 0.0)
    finish(h)
    assert h.scheduler.stats.prompt_tokens == 30 + 3
    assert [h.finished["r", choice].cached_tokens for choice in range(4)] == [0, 29, 29, 29]
    assert [h.computed["r", choice] for choice in range(4)] == [34, 5, 5, 5]


def test_a_block_that_was_computed_before_is_copied_at_once() -> None:
    h = wide()
    h.scheduler.add(make_request("first", shared(30), 9), 0.0)
    h.step()
    h.scheduler.add(make_request("second", [*shared(24), 3, 3, 3, 3, 3, 3], 9), 0.0)
    plan = h.step()
    assert plan is not None
    assert plan.starts.tolist() == [30, 24]
    (copy,) = plan.copy_blocks
    assert copy.tokens == 8
    finish(h)


def test_a_row_waits_for_most_of_its_tokens_only() -> None:
    # Given prompts that agree in 8 tokens of a block, of which others have 9 more, and 3 more,
    h = wide()
    for name, end in (("first", [3]), ("more", [9] * 9), ("few", [11] * 3)):
        h.scheduler.add(scored(name, [*shared(24), *end]), 0.0)
    # when the first two are computed together, then the third waits for a step.
    first, second = h.step(), h.step()
    assert first is not None
    assert second is not None
    assert first.counts.tolist() == [25, 17]
    assert second.counts.tolist() == [3]
    finish(h)


@pytest.mark.parametrize("options", [{"prefix_caching": False}, {"rope_original_max": 8}])
def test_nothing_is_copied_where_nothing_is_shared(options: dict[str, object]) -> None:
    h = wide(**options)
    for at in range(4):
        h.scheduler.add(make_request(f"r{at}", [*shared(30), *[3] * at], 3), 0.0)
    finish(h)
    assert h.copied == 0
    assert h.scheduler.stats.prompt_tokens == 30 + 31 + 32 + 33


def test_nothing_is_copied_from_another_owner() -> None:
    h = wide()
    for at, salt in enumerate((b"one", b"another", b"one")):
        h.scheduler.add(scored(f"r{at}", shared(30), salt=salt), 0.0)
    finish(h)
    assert h.scheduler.stats.prompt_tokens == 30 + 30 + 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_non_finite_values_behind_the_shared_part_stay_where_they_are(depth: int) -> None:
    h = wide(depth=depth)
    h.scheduler.add(scored("bad", [*shared(28), POISON]), 0.0)
    h.scheduler.add(scored("good", [*shared(28), 5]), 0.0)
    h.run()
    h.check_empty()
    assert h.copied == 12
    assert h.finished["bad", 0].finish_reason is FinishReason.ERROR
    assert h.finished["good", 0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_non_finite_values_in_the_shared_part_fail_all(depth: int) -> None:
    h = wide(depth=depth)
    h.scheduler.add(make_request("r", [*shared(20), POISON, *shared(8)], 3, n=3), 0.0)
    finish(h)
    assert h.copied == 2 * 12
    assert {end.finish_reason for end in h.finished.values()} == {FinishReason.ERROR}


def test_a_source_that_leaves_is_kept_for_those_that_wait() -> None:
    h = wide()
    h.scheduler.add(scored("first", shared(30)), 0.0)
    h.scheduler.add(scored("second", [*shared(30), 3]), 0.0)
    h.step()
    h.scheduler.cancel("first")
    h.scheduler.add(make_request("other", 30, 9), 0.0)
    plan = h.step()
    assert plan is not None
    assert len(plan.copy_blocks) == 1
    finish(h)


def test_a_row_that_waits_can_be_cancelled() -> None:
    h = wide()
    h.scheduler.add(scored("first", shared(30)), 0.0)
    h.scheduler.add(scored("second", [*shared(30), 3]), 0.0)
    h.step()
    h.scheduler.cancel("second")
    finish(h)
    assert h.copied == 0


@pytest.mark.parametrize("ends", [True, False])
def test_a_step_that_could_not_be_computed_leaves_nothing_to_copy(ends: bool) -> None:
    # Given a row that waits for the keys of a step,
    h = wide()
    h.scheduler.add(scored("first", shared(30)), 0.0)
    h.scheduler.add(scored("second", [*shared(30), 3]), 0.0)
    plan = h.scheduler.schedule(0.0)
    assert plan is not None
    assert len(plan.rows) == 1
    # when the step fails (the simulated cache has none of its keys), then all of the prompt is computed.
    if ends:
        h.scheduler.fail(plan, "broken", 1.0)
    else:
        assert h.scheduler.retract(plan, 1.0)
    h.scheduler.check_integrity()
    h.run()
    assert h.finished["first", 0].finish_reason is (FinishReason.ERROR if ends else FinishReason.LENGTH)
    assert h.finished["second", 0].finish_reason is FinishReason.LENGTH
    assert h.computed["second", 0] == (31 if ends else 15)  # the first one has left, with its part of a block
    h.check_empty()


@pytest.mark.parametrize(
    "blocks", [7, 12, pytest.param(8, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("windows", [(None,), (None, 8)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.slow
def test_answers_hold_in_a_pool_that_is_too_small_for_all(
    blocks: int, windows: tuple[int | None, ...], depth: int, max_drafts: int
) -> None:
    h = wide(blocks=(blocks, blocks), windows=windows, depth=depth, block_size=8, max_model_len=56, budget=24)
    h = Harness(h.config, h.groups, 8, 56, depth=depth, max_drafts=max_drafts)
    for at in range(6):
        prompt = [*shared(30), *[5] * (at % 3)]
        h.scheduler.add(make_request(f"r{at}", prompt, 20, n=1 + at % 3, expected_tokens=1, priority=at % 2), 0.0)
    finish(h)
    assert h.copied > 0
    assert h.scheduler.stats.preemptions > 0


def test_a_block_that_a_row_hits_in_this_step_is_not_computed_yet() -> None:
    # Given choices, of which the second hits the first one's block while it is computed,
    h = wide()
    h.scheduler.add(make_request("long", shared(20), 3, n=2), 0.0)
    h.scheduler.add(make_request("short", shared(14), 3), 0.0)
    # when a shorter prompt shares a part of that block, then it is not copied in this step.
    plan = h.step()
    assert plan is not None
    assert plan.starts.tolist() == [0, 16, 0]
    assert not plan.copy_blocks
    finish(h)
    assert h.copied == 0


@st.composite
def sharers(draw: st.DrawFn) -> list[tuple[int, Request]]:
    """Requests of a few beginnings, and the steps in which they arrive. Some only score their prompts: those wait for
    each other."""
    found = []
    only_scored = draw(st.booleans())
    lengths = draw(st.lists(st.integers(4, 40), min_size=1, max_size=2))
    for at in range(draw(st.integers(4, 10))):
        prompt = [*shared(draw(st.sampled_from(lengths))), *[3 + at % 3] * draw(st.integers(0, 3))]
        if draw(st.integers(0, 9)) == 0:
            prompt[draw(st.integers(0, len(prompt) - 1))] = POISON
        more: dict[str, object] = {}
        if only_scored or draw(st.integers(0, 3)) == 0:
            first = draw(st.sampled_from([1, max(1, len(prompt) - 3), len(prompt)]))  # what is before it is shared
            indices = draw(st.sets(st.integers(first, len(prompt)), min_size=1, max_size=3))
            more["prompt_targets"] = tuple((index, 5) for index in sorted(indices))
        request = make_request(
            f"r{at}",
            prompt,
            0 if more else draw(st.integers(0, 12)),
            n=1 if more else draw(st.integers(1, 4)),
            priority=draw(st.integers(0, 1)),
            salt=draw(st.sampled_from([b"", b"", b"", b"other"])),
            expected_tokens=draw(st.sampled_from([None, 1])),
            readers_known=draw(st.booleans()),
            **more,
        )
        found.append((draw(st.sampled_from([0, 0, 0, 1, 2, 4])), request))
    return sorted(found, key=lambda one: one[0])


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=sharers(),
    block_size=st.sampled_from([3, 4, 8, 16]),
    windows=st.sampled_from([(None,), (None, 6), (9,)]),
    blocks=st.integers(14, 40),
    budget=st.sampled_from([5, 16, 64, 256]),
    rows=st.integers(2, 9),
    depth=st.integers(1, 3),
    max_drafts=st.sampled_from([0, 0, 3]),
)
def test_every_key_that_is_read_is_the_sequences_own(
    requests: list[tuple[int, Request]],
    block_size: int,
    windows: tuple[int | None, ...],
    blocks: int,
    budget: int,
    rows: int,
    depth: int,
    max_drafts: int,
) -> None:
    groups = tuple(CacheGroup((i,), window, max(blocks, 60 // block_size + 2)) for i, window in enumerate(windows))
    h = Harness(ScheduleConfig(rows, budget, None), groups, block_size, 56, depth=depth, max_drafts=max_drafts)
    for at in range(5):
        for step, request in requests:
            if step == at:
                h.scheduler.add(request, float(at))
        h.step(float(at))
    finish(h)
