"""SLO control: the tokens of other classes in steps with urgent rows, on a machine whose steps take a known time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.config import CacheConfig, EngineConfig, ScheduleConfig, SloConfig
from engine.engine import Engine
from engine.models.base import ModelSpec
from engine.plan import StepOutput, StepPlan
from engine.request import Completion, FinishReason, Request, SamplingParams
from engine.runner.null_runner import NullRunner
from engine.runner.step_size import FAST_FLOPS, STEP_SECONDS, choose_step_size
from engine.scheduler.slo_control import MIN_CHUNK_TOKENS, Limit, Quantile, SloStats, SloTerms

BASE, PER_TOKEN = 0.005, 0.001
"""A step's seconds: of its own, and for each token."""

SPEC = ModelSpec("none", 1, 1, 1, 8, 8, 1_000, 4_000, (None,), (2,), 0, torch.float32)


def make_request(name: str, prompt: int, max_tokens: int, priority: int, deadline: float | None = None) -> Request:
    start = sum(name.encode())
    tokens = np.array([(start + i * i) % 997 + 3 for i in range(prompt)], dtype=np.int32)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return Request(name, tokens, params, priority=priority, deadline=deadline)


@dataclass
class SimulatedMachine:
    """An engine whose steps take `BASE` and `PER_TOKEN` for each token, and the times of its tokens.

    Attributes:
        gaps, firsts: of urgent requests: seconds between their tokens, and until their first.
        steps_until: steps until their first token.
        plans: of all steps.  bulk_tokens: computed for other requests.
    """

    slo: SloConfig | None
    rows: int = 80
    budget: int = 512
    chunk: int | None = None
    now: float = 0.0
    gaps: dict[str, list[float]] = field(default_factory=dict)
    firsts: dict[str, float] = field(default_factory=dict)
    steps_until: dict[str, int] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    ended: dict[str, Completion] = field(default_factory=dict)
    bulk_tokens: int = 0

    def __post_init__(self) -> None:
        config = EngineConfig(
            cache=CacheConfig(block_size=16, prefix_caching=False),
            schedule=ScheduleConfig(self.rows, self.budget, self.chunk, self.slo),
        )
        self.engine = Engine.without_model(SPEC, config, 32_000, lambda: self.now, lambda rows, size: self)
        self._null = NullRunner(self.engine.scheduler.rows, SPEC.vocab_size)
        self._readers: dict[str, Request] = {}
        self._added: dict[str, tuple[float, int]] = {}
        self._last: dict[str, float] = {}
        self._given: dict[str, int] = {}
        self._urgent_rows: set[int] = set()

    def execute(self, plan: StepPlan) -> StepOutput:
        """The engine's runner."""
        self.plans.append(plan)
        for new in plan.new_rows:
            (self._urgent_rows.discard if new.request.priority else self._urgent_rows.add)(new.row)
        pairs = zip(plan.rows.tolist(), plan.counts.tolist(), strict=True)
        self.bulk_tokens += sum(count for row, count in pairs if row not in self._urgent_rows)
        self.now += BASE + PER_TOKEN * plan.num_tokens
        return self._null.execute(plan)

    def add(self, request: Request) -> None:
        self.engine.add(request)
        if request.priority == 0:
            self._readers[request.request_id] = request
            self._added[request.request_id] = self.now, len(self.plans)

    def step(self) -> None:
        for completion in self.engine.step():
            self.ended[completion.request_id] = completion
            if self._readers.pop(completion.request_id, None) is not None:
                self._record(completion.request_id, len(completion.choices[0].token_ids))
        for name, request in self._readers.items():
            for choice in self.engine.partial(request):
                self._record(name, len(choice.token_ids))

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def _record(self, name: str, tokens: int) -> None:
        if tokens <= self._given.get(name, 0):
            return
        self._given[name] = tokens
        if name not in self.firsts:
            at, steps = self._added[name]
            self.firsts[name], self.steps_until[name] = self.now - at, len(self.plans) - steps
        else:
            self.gaps.setdefault(name, []).append(self.now - self._last[name])
        self._last[name] = self.now

    @property
    def stats(self) -> SloStats:
        stats = self.engine.scheduler.stats.slo
        assert stats is not None
        return stats


def machine_with_bulk_work(slo: SloConfig | None, rows: int = 80) -> SimulatedMachine:
    """A machine with 64 rows of bulk work."""
    machine = SimulatedMachine(slo, rows)
    for i in range(64):
        machine.add(make_request(f"bulk{i}", 8, 3_000, 2))
    for _ in range(3):
        machine.step()
    machine.bulk_tokens = 0
    return machine


def test_steps_of_a_device_are_sized_so_that_a_first_stream_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the controller has measured anything: with bulk work of any size, on an H100 with a model of 8B."""
    monkeypatch.setattr(f"{__name__}.BASE", 0.008)
    monkeypatch.setattr(f"{__name__}.PER_TOKEN", 2 * 8e9 / FAST_FLOPS)
    model = ModelSpec("llama", 32, 32, 8, 128, 4096, 128_256, 8_192, (None,) * 32, (2,), 8_030_000_000, torch.bfloat16)
    for slo, is_late in ((SloConfig(), False), (None, True)):
        seconds = STEP_SECONDS if slo is None else slo.itl_seconds
        size = choose_step_size(model, 79 << 30, 56 << 30, step_seconds=seconds)
        machine = SimulatedMachine(slo, size.rows, size.tokens)
        for i in range(40):
            machine.add(make_request(f"bulk{i}", 3_000, 50, 2))
        machine.step()
        stream(machine, "reader", 30)
        assert max(plan.num_tokens for plan in machine.plans) == size.tokens
        assert (max(machine.gaps["reader"]) > 0.1) == is_late
        assert machine.firsts["reader"] < 1.0


def stream(machine: SimulatedMachine, name: str, tokens: int, prompt: int = 8) -> None:
    """Add an urgent request, and step until it has ended."""
    machine.add(make_request(name, prompt, tokens, 0))
    while name not in machine.ended:
        machine.step()


class TestStreams:
    @pytest.mark.slow
    def test_the_objective_holds_for_the_wanted_share_of_tokens(self) -> None:
        # Given 64 bulk rows, with which a step takes 70 ms, and an objective of 40 ms between two tokens,
        machine = machine_with_bulk_work(SloConfig(itl_seconds=0.040, weight_utilisation=0))
        # when an urgent request generates 600 tokens,
        stream(machine, "reader", 600)
        # then 95 % of them come in time,
        gaps = np.array(machine.gaps["reader"])
        assert np.quantile(gaps, 0.95) <= 0.040
        # and bulk work keeps most of what could be left to it: 34 tokens of a step, for 600 steps.
        assert machine.bulk_tokens > 0.75 * 34 * 600

    def test_without_slo_control_every_token_is_late(self) -> None:
        machine = machine_with_bulk_work(None)
        stream(machine, "reader", 100)
        assert min(machine.gaps["reader"]) > 0.040

    def test_an_objective_that_holds_anyway_costs_bulk_work_nothing(self) -> None:
        machine = machine_with_bulk_work(SloConfig(itl_seconds=0.2, ttft_seconds=5.0))
        stream(machine, "reader", 100)
        assert machine.bulk_tokens >= 64 * 99
        assert machine.stats.utilisation == 1.0

    def test_without_urgent_rows_bulk_work_has_the_whole_step_again(self) -> None:
        machine = machine_with_bulk_work(SloConfig(itl_seconds=0.030))
        stream(machine, "reader", 100)
        machine.step()
        assert machine.plans[-1].num_tokens == 64

    def test_measured_times_are_stored_for_the_next_reader(self) -> None:
        machine = machine_with_bulk_work(SloConfig(itl_seconds=0.030))
        stream(machine, "first", 200)
        stream(machine, "second", 50)
        assert np.quantile(machine.gaps["second"], 0.9) <= 0.030

    def test_an_unreachable_objective_leaves_bulk_work_its_minimum(self) -> None:
        machine = machine_with_bulk_work(SloConfig(itl_seconds=0.001, min_tokens=3))
        stream(machine, "reader", 100)
        assert machine.bulk_tokens >= 3 * 99
        assert machine.stats.beside_streams == 3

    def test_the_oldest_bulk_rows_go_on_and_all_end(self) -> None:
        # Given an SLO so tight that most bulk rows stand still while an urgent request decodes,
        machine = SimulatedMachine(SloConfig(itl_seconds=0.020))
        for i in range(20):
            machine.add(make_request(f"bulk{i}", 8, 30, 2))
        stream(machine, "reader", 40)
        ended_meanwhile = [name for name in machine.ended if name.startswith("bulk")]
        # when the reader has left,
        machine.run()
        # then all are answered, and none has lost a token.
        assert ended_meanwhile == sorted(ended_meanwhile, key=lambda name: int(name[4:]))
        assert {len(machine.ended[f"bulk{i}"].choices[0].token_ids) for i in range(20)} == {30}


class TestPrompts:
    def test_a_request_gets_its_row_in_the_next_step_and_its_first_token_with_it(self) -> None:
        machine = machine_with_bulk_work(SloConfig())
        stream(machine, "reader", 2)
        assert machine.steps_until["reader"] == 1

    def test_without_a_free_row_a_bulk_row_gives_way_at_once(self) -> None:
        machine = machine_with_bulk_work(SloConfig(), 64)
        stream(machine, "reader", 2)
        assert machine.steps_until["reader"] == 1

    @pytest.mark.slow
    def test_first_tokens_are_in_time_though_bulk_prompts_wait(self) -> None:
        # Given bulk prompts that would fill each step to the budget (0.5 s), and an objective of 0.2 s to first tokens,
        machine = SimulatedMachine(SloConfig(ttft_seconds=0.2, itl_seconds=10.0, weight_utilisation=0))
        for i in range(400):
            machine.add(make_request(f"bulk{i}", 1_500, 1, 2))
        # when urgent requests come one after the other, each at the beginning of a step,
        for i in range(200):
            stream(machine, f"urgent{i}", 1, prompt=50)
        # then first tokens come in time.
        assert np.mean(np.array(list(machine.firsts.values())[20:]) <= 0.2) >= 0.95
        assert machine.stats.late_first_tokens > 0

    def test_an_urgent_prompt_is_cut_so_that_other_readers_streams_hold(self) -> None:
        machine = SimulatedMachine(SloConfig(itl_seconds=0.150, ttft_seconds=10.0), budget=2048)
        machine.add(make_request("reader", 8, 300, 0))
        for _ in range(3):
            machine.step()
        for i in range(4):
            machine.add(make_request(f"long{i}", 1_500, 2, 0))
        machine.run()
        # The first chunk is as long as the budget lets it; then it is known what that costs.
        assert sum(gap > 0.160 for gap in machine.gaps["reader"]) <= 6
        assert machine.stats.beside_streams >= MIN_CHUNK_TOKENS

    def test_a_reader_s_next_token_comes_before_another_s_chunk(self) -> None:
        # Given an older prompt with chunks of 1,000 tokens, and sixteen requests that decode in the same steps,
        machine = SimulatedMachine(SloConfig(itl_seconds=0.050, ttft_seconds=10.0), budget=2048, chunk=1000)
        machine.add(make_request("long", 3_900, 2, 0))
        for i in range(16):
            machine.add(make_request(f"reader{i}", 4, 100, 0))
        machine.step()
        # when its chunks are cut because their tokens come late,
        while "long" not in machine.firsts:
            machine.step()
            # then each step has a token of each of them all the same.
            assert machine.plans[-1].num_decodes == 16
        assert len(machine.plans) >= 5


class TestDrops:
    def test_one_that_ran_into_its_deadline_counts_and_lowers_the_limit(self) -> None:
        machine = machine_with_bulk_work(SloConfig())
        before = machine.stats.beside_prompts
        machine.add(make_request("late", 8, 100, 0, deadline=machine.now + 0.1))
        while "late" not in machine.ended:
            machine.step()
        assert machine.ended["late"].choices[0].finish_reason is FinishReason.TIMEOUT
        assert machine.stats.drops == 1
        assert machine.stats.beside_prompts < before


class TestWeights:
    @pytest.mark.slow
    def test_other_weights_apply_from_the_next_step_on(self) -> None:
        # Given a stream whose tokens are late as seldom as the objective wants,
        machine = machine_with_bulk_work(SloConfig(itl_seconds=0.040, weight_utilisation=0))
        stream(machine, "first", 600)
        # when work that is held back weighs as much as twelve late tokens,
        assert machine.engine.set_slo_weights(SloTerms(ttft=1, itl=1, utilisation=12, drops=0))
        stream(machine, "second", 600)
        # then late tokens are as frequent as where both forces balance: (1 - q)(1 + 12) / (q + (1 - q)(1 + 12)),
        late = np.array(machine.gaps["second"][100:]) > 0.040
        assert np.mean(late) == pytest.approx(0.287, abs=0.05)
        assert np.mean(np.array(machine.gaps["first"][100:]) > 0.040) < 0.06
        # and the statistics have the new weights.
        assert machine.stats.weights == SloTerms(1, 1, 12, 0)
        assert machine.stats.objective == machine.stats.terms.weighed(SloTerms(1, 1, 12, 0))

    @pytest.mark.parametrize(("weight", "tokens"), [(0, 462), (1, 195)])
    def test_the_weight_of_first_tokens_is_that_of_the_limit_with_prompts(self, weight: float, tokens: int) -> None:
        """Steps of up to 195 tokens are in time; 462 of 512 were left beside the first urgent prompt."""
        machine = SimulatedMachine(SloConfig(ttft_seconds=0.2, itl_seconds=10.0, weight_utilisation=0))
        for i in range(400):
            machine.add(make_request(f"bulk{i}", 1_500, 1, 2))
        machine.engine.set_slo_weights(SloTerms(ttft=weight, itl=1, utilisation=0, drops=0))
        for i in range(40):
            stream(machine, f"urgent{i}", 1, prompt=50)
        assert machine.stats.beside_prompts == tokens if weight == 0 else machine.stats.beside_prompts <= tokens

    def test_an_engine_without_slo_has_none_to_set(self) -> None:
        assert not SimulatedMachine(None).engine.set_slo_weights(SloTerms())


class TestReport:
    def test_the_objective_is_the_weighted_sum_of_its_terms(self) -> None:
        config = SloConfig(
            itl_seconds=0.040, ttft_seconds=0.5, weight_ttft=2, weight_itl=3, weight_utilisation=5, weight_drops=7
        )
        machine = machine_with_bulk_work(config)
        stream(machine, "reader", 200)
        stats = machine.stats
        expected = 2 * stats.ttft / 0.5 + 3 * stats.itl / 0.040 + 5 * (1 - stats.utilisation)
        assert stats.objective == pytest.approx(expected)
        assert 0 < stats.utilisation < 1
        assert stats.later_tokens == 199
        assert stats.steps == 200
        assert 0 < stats.throttled_steps < stats.steps
        assert (stats.weights.ttft, stats.weights.itl) == (2, 3)
        assert (stats.weights.utilisation, stats.weights.drops) == (5, 7)
        assert (stats.terms.ttft, stats.terms.itl) == pytest.approx((stats.ttft / 0.5, stats.itl / 0.040))
        assert (stats.terms.utilisation, stats.terms.drops) == (pytest.approx(1 - stats.utilisation), 0)

    def test_the_share_of_other_classes_is_measured_with_streams(self) -> None:
        machine = machine_with_bulk_work(SloConfig(itl_seconds=0.040, weight_utilisation=0.0))
        mixed_steps: list[tuple[int, int]] = []

        def watch() -> None:
            before, steps = machine.bulk_tokens, len(machine.plans)
            machine.step()
            if len(machine.plans) > steps:
                mixed_steps.append((machine.bulk_tokens - before, machine.plans[-1].num_tokens))

        machine.add(make_request("reader", 8, 150, 0))
        while "reader" not in machine.ended:
            watch()
        weights = [0.995**age for age in reversed(range(len(mixed_steps)))]
        share = sum(w * bulk for w, (bulk, _) in zip(weights, mixed_steps, strict=True))
        share /= sum(w * tokens for w, (_, tokens) in zip(weights, mixed_steps, strict=True))
        assert machine.stats.others == pytest.approx(share, rel=1e-6)
        assert 0.5 < share < 1


class TestTracking:
    def test_a_limit_comes_to_rest_where_the_wanted_share_is_in_time(self) -> None:
        # Given samples that are late when more than a random number of tokens is used,
        random = np.random.default_rng(1)
        limit = Limit(1, 10_000, 0.9, 1.0, 0.0)
        late = 0
        for i in range(40_000):
            used = limit.tokens
            is_late = used > random.lognormal(6, 0.3)
            late += is_late and i >= 2_000
            limit.record(late=bool(is_late), used=used, is_limited=True)
        assert late / 38_000 == pytest.approx(0.1, abs=0.01)

    def test_a_step_without_other_tokens_does_not_change_the_limit(self) -> None:
        limit = Limit(1, 100, 0.9, 1.0, 0.0)
        limit.record(late=True, used=0, is_limited=False)
        assert limit.tokens == 100

    def test_a_quantile_is_followed(self) -> None:
        random = np.random.default_rng(2)
        followed = Quantile(0.9)
        values = []
        for sample in random.exponential(1.0, 50_000):
            followed.record(float(sample))
            values.append(followed.value)
        assert np.mean(values[5_000:]) == pytest.approx(-np.log(0.1), rel=0.1)
