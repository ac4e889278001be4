"""The behaviour of the scheduler, one case each: sharing, priority, fairness, admission, endings."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config import ScheduleConfig
from engine.errors import ContextLengthExceeded, EngineError, RequestRefused
from engine.plan import CacheGroup
from engine.request import FinishReason, Request, SamplingParams
from tests.engine.scheduler.scheduler_harness import EOS, POISON, Harness


def harness(
    *,
    rows: int = 8,
    budget: int = 64,
    chunk: int | None = None,
    blocks: tuple[int, ...] = (64,),
    windows: tuple[int | None, ...] = (None,),
    block_size: int = 4,
    max_model_len: int = 64,
    prefix_caching: bool = True,
    rope_original_max: int | None = None,
    depth: int = 1,
    **options: object,
) -> Harness:
    groups = tuple(CacheGroup((i,), window, blocks[i] + 1) for i, window in enumerate(windows))
    return Harness(
        ScheduleConfig(rows, budget, chunk),
        groups,
        block_size,
        max_model_len,
        prefix_caching=prefix_caching,
        rope_original_max=rope_original_max,
        depth=depth,
        options=dict(options),
    )


def make_request(
    name: str, prompt: list[int] | int, max_tokens: int = 4, *, ignore_eos: bool = True, **more: object
) -> Request:
    """A request; an int prompt means so many distinct tokens of the request's own."""
    if isinstance(prompt, int):
        start = sum(name.encode())
        prompt = [(start + i * i) % 17 + 3 for i in range(prompt)]
    fields = {key: more.pop(key) for key in list(more) if key not in SamplingParams.__slots__}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, seed=1, **more)
    return Request(name, np.array(prompt, dtype=np.int32), params, **fields)


def shared(length: int) -> list[int]:
    return [i % 13 + 4 for i in range(length)]


def finish(h: Harness) -> None:
    h.run()
    for end in h.finished.values():
        h.check_end(end)
    h.check_empty()


class TestSharing:
    @pytest.mark.parametrize("windows", [(None,), (8,), (None, 8)])
    def test_64_requests_admitted_in_one_step_compute_their_prefix_once(self, windows: tuple[int | None, ...]) -> None:
        # Given 64 requests with 32 leading tokens in common,
        h = harness(rows=64, budget=2048, blocks=(512,) * len(windows), windows=windows)
        for i in range(64):
            h.scheduler.add(make_request(f"r{i}", [*shared(32), 3 + i % 7, 3 + i // 7]), 0.0)
        # when all are admitted in one step,
        plan = h.step()
        # then the first computes the prefix and the others only their own two tokens.
        assert plan is not None
        assert sorted(plan.counts.tolist()) == [2] * 63 + [34]
        assert h.scheduler.stats.prefix_hit_tokens == 63 * 32
        finish(h)
        assert [h.finished[f"r{i}", 0].cached_tokens for i in range(64)] == [0] + [32] * 63

    def test_choices_of_one_request_share_its_prompt(self) -> None:
        h = harness()
        h.scheduler.add(make_request("r", 18, n=4), 0.0)
        plan = h.step()
        assert plan is not None
        assert sorted(plan.counts.tolist()) == [2, 2, 2, 18]
        finish(h)

    def test_each_choice_s_answer_can_be_hit_by_a_prompt_that_goes_on_from_it(self) -> None:
        # Given two choices that ran one after the other, with answers of 12 tokens to a prompt of 8,
        h = harness(rows=1)
        h.scheduler.add(make_request("r", 8, 13, n=2), 0.0)
        h.run()
        for choice in range(2):
            # when a prompt goes on from either, then it hits prompt and answer.
            answer = h.finished["r", choice].token_ids.tolist()
            h.scheduler.add(
                make_request(f"next{choice}", [*make_request("r", 8).prompt_token_ids.tolist(), *answer, 3], 1), 0.0
            )
            finish(h)
            assert h.finished[f"next{choice}", 0].cached_tokens == 20

    def test_without_the_cache_every_choice_computes_the_prompt(self) -> None:
        h = harness(prefix_caching=False)
        h.scheduler.add(make_request("r", 12, n=3), 0.0)
        plan = h.step()
        assert plan is not None
        assert plan.counts.tolist() == [12, 12, 12]
        finish(h)

    def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(self) -> None:
        h = harness()
        h.scheduler.add(make_request("first", shared(16)), 0.0)
        h.run()
        h.scheduler.add(make_request("second", shared(16)), 0.0)
        plan = h.step()
        assert plan is not None
        assert (plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist()) == ([12], [4], [True])
        finish(h)

    def test_the_tail_of_a_finished_sequence_is_evicted_before_its_prefix(self) -> None:
        # Given a pool of eight blocks, six of them cached by a sequence that has ended,
        h = harness(blocks=(8,))
        h.scheduler.add(make_request("first", shared(25), 1), 0.0)
        h.run()
        # when another one takes five, then the first three of the old ones are left,
        h.scheduler.add(make_request("other", [3] * 20, 1), 0.0)
        h.run()
        h.scheduler.add(make_request("again", shared(25), 1), 0.0)
        finish(h)
        # and the same prompt hits them.
        assert h.finished["again", 0].cached_tokens == 12

    def test_rows_that_prefill_the_same_prompt_in_chunks_take_each_other_s_blocks(self) -> None:
        # Given four equal prompts of 48 tokens, and chunks of 8,
        h = harness(budget=32, chunk=8)
        for i in range(4):
            h.scheduler.add(make_request(f"r{i}", [*shared(48), 3 + i]), 0.0)
        finish(h)
        # then the 48 tokens were computed about once by all of them together, not once each:
        # the rows leapfrog, each one jumping over what the others have published.
        prompts = sum(h.computed[f"r{i}", 0] - 3 for i in range(4))
        assert prompts == 48 + 4

    @pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"pooling": "mean", "max_tokens": 0}])
    def test_requests_that_need_every_prompt_position_do_not_read_the_cache(self, more: dict) -> None:
        h = harness()
        h.scheduler.add(make_request("first", shared(16)), 0.0)
        h.run()
        h.scheduler.add(make_request("second", shared(16), **more), 0.0)
        plan = h.step()
        assert plan is not None
        assert (plan.starts.tolist(), plan.counts.tolist()) == ([0], [16])
        finish(h)
        assert h.finished["second", 0].cached_tokens == 0

    @pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"pooling": "mean", "max_tokens": 0}])
    def test_nor_do_they_while_they_run(self, more: dict) -> None:
        # Given a request that needs every position, in chunks behind another one with the same prompt,
        h = harness(chunk=8)
        h.scheduler.add(make_request("plain", shared(40)), 0.0)
        h.scheduler.add(make_request("whole", shared(40), **more), 0.0)
        h.scheduler.add(make_request("third", shared(40)), 0.0)
        # then the others leapfrog and it computes its forty tokens itself.
        finish(h)
        assert h.computed["whole", 0] >= 40
        assert h.computed["plain", 0] < 40

    def test_owners_with_different_salt_share_nothing(self) -> None:
        h = harness()
        for salt in (b"", b"one", b"two"):
            h.scheduler.add(make_request(f"r{salt!r}", shared(16), salt=salt), 0.0)
        plan = h.step()
        assert plan is not None
        assert plan.counts.tolist() == [16, 16, 16]
        finish(h)

    def test_prompts_beyond_the_original_rope_length_share_only_with_prompts_as_long(self) -> None:
        h = harness(rope_original_max=16, budget=256)
        for name, length in (("a", 20), ("b", 24), ("c", 24), ("d", 12), ("e", 16)):
            h.scheduler.add(make_request(name, shared(length)), 0.0)
        finish(h)
        # The last sampled token is never computed, and the last of a prompt is never shared.
        assert {name: count - 3 for (name, _), count in h.computed.items()} == {
            "a": 20,
            "b": 24,
            "c": 4,
            "d": 12,
            "e": 4,
        }

    @pytest.mark.parametrize("digest", [lambda parent, tokens: b"x", lambda parent, tokens: bytes([sum(tokens) % 3])])
    def test_colliding_digests_cost_hits_and_never_hand_out_a_wrong_block(self, digest: object) -> None:
        # Given a digest under which nearly all prefixes collide, when many different prompts run,
        h = harness(digest=digest, blocks=(40,))
        for i in range(12):
            h.scheduler.add(make_request(f"r{i}", [3 + i % 3, *shared(10), 3 + i % 5, *shared(8)]), 0.0)
        # then every key read is the reader's own (the harness compares them all) and every answer is right.
        finish(h)
        assert sorted(h.finished) == sorted((f"r{i}", 0) for i in range(12))

    def test_the_same_tokens_after_another_prefix_are_no_hit_even_with_equal_digests(self) -> None:
        # Given a digest that ignores the parent: the second block of both prompts has the same name,
        h = harness(digest=lambda parent, tokens: tokens[:16])
        h.scheduler.add(make_request("a", [5, 5, 5, 5, *shared(8)]), 0.0)
        h.run()
        h.scheduler.add(make_request("b", [6, 6, 6, 6, *shared(8)]), 0.0)
        plan = h.step()
        # then the second request computes all of it.
        assert plan is not None
        assert plan.starts.tolist() == [0]
        finish(h)


class TestWindows:
    def test_blocks_behind_the_window_are_released_while_the_sequence_runs(self) -> None:
        # Given a window of 8 tokens and a pool that holds 5 blocks of 4, far less than the sequence of 60,
        h = harness(windows=(8,), blocks=(5,), chunk=8)
        h.scheduler.add(make_request("long", 40, 20), 0.0)
        held = []
        while h.scheduler.has_work:
            h.step()
            held.append(5 - h.scheduler.stats.free_blocks[0])
        # then it never holds more than window and chunk touch, and decodes with three blocks.
        assert max(held) <= 5
        assert set(held[8:-1]) <= {2, 3}
        finish(h)

    def test_a_prompt_hits_at_its_end_though_its_early_window_blocks_are_gone(self) -> None:
        h = harness(windows=(None, 8), blocks=(60, 6), chunk=8)
        h.scheduler.add(make_request("first", shared(40), 1), 0.0)
        h.run()
        # Given the window pool has room for six blocks only, the early ones are evicted;
        h.scheduler.add(make_request("same", shared(40), 1), 0.0)
        h.run()
        # when the same prompt comes again, it hits up to its last block;
        assert h.finished["same", 0].cached_tokens == 36
        # and when a prompt comes that shares only the first part, it hits nothing: its window is not there.
        h.scheduler.add(make_request("part", [*shared(16), 3, 3, 3], 1), 0.0)
        finish(h)
        assert h.finished["part", 0].cached_tokens == 0

    def test_all_groups_must_agree_on_a_hit(self) -> None:
        h = harness(windows=(None, 5, 9), blocks=(60, 60, 60))
        h.scheduler.add(make_request("first", shared(30), 1), 0.0)
        h.run()
        h.scheduler.add(make_request("second", [*shared(21), 3, 3], 1), 0.0)
        finish(h)
        assert h.finished["second", 0].cached_tokens == 20


class TestPriority:
    def test_a_higher_class_takes_the_rows_of_lower_ones(self) -> None:
        # Given all rows taken by bulk requests,
        h = harness(rows=2)
        for i in range(4):
            h.scheduler.add(make_request(f"bulk{i}", 8, 12, priority=2), 0.0)
        h.step()
        # when an interactive request comes,
        h.scheduler.add(make_request("chat", 8, 3, priority=0), 0.0)
        plan = h.step()
        # then it runs with the next step, in place of the newest bulk request, which finishes later.
        assert plan is not None
        assert [new.request.request_id for new in plan.new_rows] == ["chat"]
        finish(h)
        assert next(iter(h.finished)) == ("chat", 0)
        assert h.finished["bulk1", 0].preemptions == 1
        assert h.finished["bulk0", 0].preemptions == 0

    def test_a_higher_class_takes_the_blocks_of_lower_ones_newest_first(self) -> None:
        h = harness(blocks=(12,), prefix_caching=False)
        for i in range(3):
            h.scheduler.add(make_request(f"bulk{i}", 14, 2, priority=2), 0.0)
        h.step()
        h.scheduler.add(make_request("chat", 14, 2, priority=1), 0.0)
        h.step()
        assert h.scheduler.stats.preemptions == 1
        finish(h)
        assert [h.finished[f"bulk{i}", 0].preemptions for i in range(3)] == [0, 0, 1]

    def test_lower_classes_keep_their_rows_when_giving_them_up_would_not_help(self) -> None:
        # Given a standard request that holds nearly everything, and a small bulk one,
        h = harness(blocks=(12,), prefix_caching=False)
        h.scheduler.add(make_request("standard", 36, 3, priority=1), 0.0)
        h.scheduler.add(make_request("bulk", 4, 3, priority=2), 0.0)
        h.step()
        # when another standard request comes that can't fit alongside the first one,
        h.scheduler.add(make_request("late", 30, 2, priority=1), 0.0)
        h.step()
        # then bulk is left alone.
        assert h.scheduler.stats.preemptions == 0
        finish(h)

    def test_the_budget_goes_to_the_highest_class_first(self) -> None:
        h = harness(budget=8)
        h.scheduler.add(make_request("bulk", 32, priority=2), 0.0)
        h.step()
        h.scheduler.add(make_request("chat", 12, 2, priority=0), 0.0)
        plan = h.step()
        assert plan is not None
        assert [new.request.request_id for new in plan.new_rows] == ["chat"]
        assert plan.counts.tolist() == [8]
        finish(h)


class TestFairness:
    def test_within_a_class_requests_start_in_the_order_of_arrival(self) -> None:
        h = harness(rows=2, blocks=(10,))
        sizes = [30, 4, 20, 4, 30, 4, 4, 4]
        for i, size in enumerate(sizes):
            h.scheduler.add(make_request(f"r{i}", size, 3), 0.0)
        finish(h)
        started = [new.request.request_id for plan in h.plans for new in plan.new_rows]
        first = list(dict.fromkeys(started))
        assert first == [f"r{i}" for i in range(len(sizes))]

    def test_the_oldest_sequence_is_never_preempted(self) -> None:
        # Given length estimates that are all far too low, and a pool for one and a half sequences,
        h = harness(blocks=(16,), prefix_caching=False)
        for i in range(6):
            h.scheduler.add(make_request(f"r{i}", 8, 36, expected_tokens=1), 0.0)
        finish(h)
        # then others are preempted, the first one never, and all end in order.
        assert h.scheduler.stats.preemptions > 0
        assert h.finished["r0", 0].preemptions == 0
        assert [name for name, _ in h.finished] == [f"r{i}" for i in range(6)]

    @pytest.mark.slow
    def test_preemption_is_bounded_by_endings(self) -> None:
        # Given 40 requests whose lengths are estimated ten times too short, in a small pool,
        h = harness(rows=16, blocks=(32,))
        for i in range(40):
            h.scheduler.add(make_request(f"r{i}", 6, 30, expected_tokens=3), 0.0)
        # when they run, a sequence takes a row again only after another has ended since it last did,
        ended_at: dict[str, int] = {}
        while h.scheduler.has_work:
            ended = len(h.finished)
            plan = h.step()
            for new in plan.new_rows if plan is not None else ():
                assert ended_at.get(new.request.request_id, -1) < ended
                ended_at[new.request.request_id] = ended
        # and the waste stays small, though every estimate was wrong.
        finish(h)
        stats = h.scheduler.stats
        assert stats.preemptions > 0
        assert 0 < stats.recomputed_tokens < 0.3 * stats.computed_tokens

    @pytest.mark.slow
    def test_accepted_drafts_lead_to_no_preemption(self) -> None:
        h = harness(rows=16, blocks=(32,))
        for i in range(40):
            h.scheduler.add(make_request(f"r{i}", 6, 30 - i % 11, expected_tokens=30 - i % 11), 0.0)
        finish(h)
        assert h.scheduler.stats.preemptions == 0
        assert max(len(plan.rows) for plan in h.plans) >= 3

    def test_a_preempted_sequence_waits_until_another_has_ended(self) -> None:
        h = harness(blocks=(16,), prefix_caching=False)
        for name in ("a", "b"):
            h.scheduler.add(make_request(name, 8, 36, expected_tokens=1), 0.0)
        while not h.scheduler.stats.preemptions:
            h.step()
        while ("a", 0) not in h.finished:
            plan = h.step()
            assert plan is not None
            assert not plan.new_rows
        finish(h)


class TestAdmission:
    def test_sequences_are_admitted_by_expected_length_not_by_the_longest_possible(self) -> None:
        # Given requests that may take 40 tokens but are expected to take 8: four blocks each with their prompt,
        h = harness(rows=16, budget=512, blocks=(32,), prefix_caching=False)
        for i in range(16):
            h.scheduler.add(make_request(f"r{i}", 8, 40, expected_tokens=8), 0.0)
        h.step()
        # then eight run at once, where the longest possible would have allowed two.
        assert h.scheduler.num_running == 8
        assert h.scheduler.num_waiting == 8

    def test_answers_seen_set_the_expectation_for_those_to_come(self) -> None:
        # Given a group whose answers turn out short (two tokens, then the end token),
        h = harness(rows=16, budget=512, blocks=(32,), prefix_caching=False)
        h.scheduler.add(make_request("seen", 8, 1, prefix_group=7), 0.0)
        for i in range(60):
            h.scheduler.add(make_request(f"short{i}", 8, 2, prefix_group=7), 0.0)
        h.run()
        # when requests of the group come that allow 40 tokens and bring no hint,
        for i in range(16):
            h.scheduler.add(make_request(f"r{i}", 8, 40, prefix_group=7), 0.0)
        h.step()
        # then more run at once than before anything was learnt (three, by max_tokens).
        assert h.scheduler.num_running >= 5

    @pytest.mark.slow
    def test_hints_are_scaled_by_how_earlier_ones_turned_out(self) -> None:
        # Given answers that all came out four times as long as their hints,
        h = harness(rows=16, budget=512, blocks=(32,), prefix_caching=False)
        for i in range(100):
            h.scheduler.add(make_request(f"seen{i}", 8, 24, expected_tokens=6), 0.0)
        h.run()
        # when more come with the same hint, which would admit eight at once,
        for i in range(16):
            h.scheduler.add(make_request(f"r{i}", 8, 24, expected_tokens=6), 0.0)
        h.step()
        # then it is taken for about 24 tokens, and four are admitted.
        assert h.scheduler.num_running == 4

    def test_the_tail_of_the_budget_is_cut_on_a_block_border(self) -> None:
        h = harness(budget=30)
        h.scheduler.add(make_request("a", 10), 0.0)
        h.scheduler.add(make_request("b", 40), 0.0)
        plan = h.step()
        assert plan is not None
        assert plan.counts.tolist() == [10, 20]
        finish(h)

    def test_prompt_chunks_and_decodes_share_a_step(self) -> None:
        h = harness(budget=16)
        h.scheduler.add(make_request("a", 6, 20), 0.0)
        h.step()
        h.scheduler.add(make_request("b", 40, 2), 0.0)
        plan = h.step()
        assert plan is not None
        assert (plan.num_decodes, plan.counts.tolist()) == (1, [1, 12])
        finish(h)

    @pytest.mark.parametrize(
        ("request_", "limit"),
        [(make_request("long", 50, 15), 64), (make_request("pool", 30, 12), 41), (make_request("score", 42, 0), 40)],
    )
    def test_what_never_fits_is_refused_at_once(self, request_: Request, limit: int) -> None:
        h = harness(blocks=(10,)) if limit < 64 else harness()
        with pytest.raises(ContextLengthExceeded) as refusal:
            h.scheduler.add(request_, 0.0)
        assert refusal.value.limit == limit
        assert not h.scheduler.has_work

    def test_what_just_fits_runs(self) -> None:
        h = harness(blocks=(10,))
        h.scheduler.add(make_request("pool", 30, 11), 0.0)
        finish(h)
        assert len(h.finished["pool", 0].token_ids) == 11

    def test_nonsense_is_refused_with_a_reason(self) -> None:
        h = harness()
        h.scheduler.add(make_request("r", 4), 0.0)
        for bad, reason in (
            (make_request("r", 4), "already running"),
            (make_request("empty", []), "at least one token"),
            (make_request("pooled", 4, 2, pooling="last"), "max_tokens 0"),
            (Request("wide", np.zeros(3, dtype=np.int64)), "int32"),
        ):
            with pytest.raises(RequestRefused, match=reason):
                h.scheduler.add(bad, 0.0)
        finish(h)


class TestEndings:
    def test_an_end_token_ends_the_answer_and_is_not_part_of_it(self) -> None:
        h = harness()
        h.scheduler.add(make_request("r", 5, 40, stop_token_ids=tuple(range(2, 9))), 0.0)
        finish(h)
        end = h.finished["r", 0]
        assert end.finish_reason is FinishReason.STOP
        assert end.stop_token_id in range(2, 9)
        assert end.stop_token_id not in end.token_ids
        assert end.generated_tokens == len(end.token_ids) + 1

    def test_more_stop_tokens_than_a_table_row_holds_still_stop(self) -> None:
        h = harness()
        h.scheduler.add(make_request("r", 5, 40, stop_token_ids=tuple(range(1, 23))), 0.0)
        finish(h)
        assert len(h.finished["r", 0].token_ids) == 0

    def test_nothing_ends_an_answer_before_min_tokens(self) -> None:
        h = harness()
        h.scheduler.add(make_request("r", 5, 40, stop_token_ids=tuple(range(1, 23)), min_tokens=7), 0.0)
        finish(h)
        assert len(h.finished["r", 0].token_ids) == 7

    def test_the_model_s_end_token_is_an_ordinary_one_when_ignored(self) -> None:
        ends = {}
        for ignore in (False, True):
            h = harness()
            for i in range(8):
                h.scheduler.add(make_request(f"r{i}", 5, 50, ignore_eos=ignore), 0.0)
            finish(h)
            ends[ignore] = [end.stop_token_id for end in h.finished.values()]
        assert EOS[0] in ends[False]
        assert set(ends[True]) == {None}

    def test_a_watcher_that_raises_ends_its_own_request_only(self) -> None:
        class Broken:
            def push(self, token_id: int) -> bool:
                raise KeyError(token_id)

        h = harness()
        h.scheduler.add(make_request("broken", 5, 9, watcher=lambda _: Broken()), 0.0)
        h.scheduler.add(make_request("fine", 6, 9), 0.0)
        h.scheduler.add(make_request("unmade", 7, 9, watcher=lambda _: 1 / 0), 0.0)
        while h.scheduler.has_work:
            plan = h.scheduler.schedule(0.0)
            assert plan is not None
            tokens = np.full(len(plan.rows), 9, dtype=np.int32)
            h._note(h.scheduler.update(plan, tokens, np.zeros(len(plan.rows), dtype=np.bool_), 0.0))
        assert "KeyError" in (h.finished["broken", 0].error or "")
        assert "ZeroDivisionError" in (h.finished["unmade", 0].error or "")
        assert h.finished["fine", 0].finish_reason is FinishReason.LENGTH

    def test_cancelling_frees_everything_at_once_wherever_the_request_stands(self) -> None:
        # Given one request that runs, one that was preempted, and one that waits,
        h = harness(blocks=(16,), prefix_caching=False)
        for name in ("a", "b"):
            h.scheduler.add(make_request(name, 8, 36, expected_tokens=1), 0.0)
        while not h.scheduler.stats.preemptions:
            h.step()
        h.scheduler.add(make_request("c", 8, n=2), 0.0)
        # when all are cancelled,
        assert all(h.scheduler.cancel(name) for name in "abc")
        # then each choice has ended once, with the tokens it had, and the pool is whole.
        ended = h.scheduler.take_finished()
        assert [(end.request.request_id, end.choice) for end in ended] == [("a", 0), ("b", 0), ("c", 0), ("c", 1)]
        assert len(ended[0].token_ids) > 0
        assert len(ended[1].token_ids) > 0
        h.check_empty()
        assert not h.scheduler.cancel("a")

    def test_one_choice_can_be_cancelled_and_its_siblings_go_on(self) -> None:
        h = harness(rows=2)
        h.scheduler.add(make_request("a", 8, 6, n=3), 0.0)
        h.step()
        # One that runs and one that waits,
        assert h.scheduler.cancel("a", 0)
        assert h.scheduler.cancel("a", 2)
        assert not h.scheduler.cancel("a", 0)
        assert not h.scheduler.cancel("a", 7)
        h._note(h.scheduler.take_finished())
        assert h.scheduler.num_running == 1
        while h.scheduler.has_work:
            h.step()
        reasons = [h.finished["a", choice].finish_reason for choice in range(3)]
        assert reasons == [FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.CANCELLED]
        h.check_empty()

    def test_a_deadline_ends_running_and_waiting_requests(self) -> None:
        h = harness(rows=1)
        h.scheduler.add(make_request("runs", 8, 50, deadline=3.0), 0.0)
        h.scheduler.add(make_request("waits", 8, 4, deadline=2.0), 0.0)
        h.scheduler.add(make_request("later", 8, 4, deadline=99.0), 0.0)
        for now in (0.0, 1.0, 2.0, 3.0):
            h.step(now)
        reasons = {name: end.finish_reason for (name, _), end in h.finished.items()}
        assert reasons == {"waits": FinishReason.TIMEOUT, "runs": FinishReason.TIMEOUT}
        assert h.finished["waits", 0].finished_at == 2.0
        finish(h)

    def test_an_id_can_be_used_again_and_an_old_deadline_does_not_hurt_it(self) -> None:
        h = harness()
        h.scheduler.add(make_request("r", 4, 1, deadline=5.0), 0.0)
        h.run()
        h.finished.clear()
        h._scripts.clear()
        h.scheduler.add(make_request("r", 4, 3), 1.0)
        h.run(now=9.0)
        assert h.finished["r", 0].finish_reason is FinishReason.LENGTH

    def test_a_failed_row_takes_its_prefix_out_of_the_cache_and_its_blocks_are_zeroed(self) -> None:
        # Given a prompt that leads to NaN in its fifth block,
        h = harness(blocks=(8,))
        h.scheduler.add(make_request("bad", [*shared(18), POISON, 3]), 0.0)
        h.run()
        assert h.finished["bad", 0].finish_reason is FinishReason.ERROR
        assert "non-finite" in (h.finished["bad", 0].error or "")
        assert h.scheduler.stats.cached_blocks == (0,)
        # when a healthy one starts the same way, it computes all of it, in zeroed blocks.
        h.scheduler.add(make_request("good", [*shared(18), 5, 3]), 0.0)
        plan = h.step()
        assert plan is not None
        assert plan.starts.tolist() == [0]
        assert len(plan.zero_blocks) == 5
        finish(h)

    def test_what_was_cancelled_before_anything_showed_it_finite_is_zeroed_too(self) -> None:
        # Given a prompt with NaN that is cancelled in the middle, before any logits could show it,
        h = harness(blocks=(8,), budget=8)
        h.scheduler.add(make_request("bad", [POISON, *shared(26)]), 0.0)
        h.step()
        h.scheduler.cancel("bad")
        # when another takes all blocks (the harness fails it on any NaN in a block it reads), it is not hurt.
        h.scheduler.add(make_request("good", 28, 4), 0.0)
        h.run()
        assert h.finished["good", 0].finish_reason is FinishReason.LENGTH

    def test_a_step_that_could_not_be_computed_ends_its_sequences_and_empties_the_cache(self) -> None:
        h = harness(rows=2, budget=16)
        h.scheduler.add(make_request("before", shared(12), 1), 0.0)
        h.run()
        assert h.scheduler.stats.cached_blocks == (3,)
        for name in ("a", "b", "c"):
            h.scheduler.add(make_request(name, [*shared(8), 3], 3), 0.0)
        plan = h.scheduler.schedule(0.0)
        assert plan is not None
        h.scheduler.fail(plan, "no memory", 1.0)
        h.scheduler.check_integrity()
        assert {(e.request.request_id, e.error) for e in h.scheduler.take_finished()} == {
            ("a", "no memory"),
            ("b", "no memory"),
        }
        assert h.scheduler.stats.cached_blocks == (0,)
        finish(h)
        assert h.finished["c", 0].finish_reason is FinishReason.LENGTH

    def test_score_only_requests_end_with_their_prompt_and_sample_nothing(self) -> None:
        h = harness(budget=8)
        h.scheduler.add(make_request("score", 20, 0, prompt_logprobs=2), 0.0)
        finish(h)
        assert [(plan.num_logits.tolist(), plan.samples.any()) for plan in h.plans] == [
            ([8], False),
            ([8], False),
            ([4], False),
        ]
        assert h.finished["score", 0].finish_reason is FinishReason.LENGTH
        assert h.finished["score", 0].prompt_computed

    def test_a_missing_token_is_not_taken_for_an_answer(self) -> None:
        h = harness()
        h.scheduler.add(make_request("r", 4), 0.0)
        plan = h.scheduler.schedule(0.0)
        assert plan is not None
        with pytest.raises(EngineError, match="gave no token"):
            h.scheduler.update(plan, np.array([-1], dtype=np.int32), np.array([False]), 0.0)
