"""How many drafts pay: on in thin batches and off in full ones, by measured times, without flapping."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from engine.config import SpeculationConfig
from engine.speculative.draft_lengths import (
    PROBE_INTERVAL_STEPS,
    AdaptiveLengths,
    FixedLengths,
    StepCosts,
    make_draft_lengths,
)

LONGEST = 8


class SimulatedMachine:
    """Steps that take a fixed time for the weights and some for each position, with the draft lengths under test.

    Args:
        fixed, each: seconds.
    """

    def __init__(self, fixed: float, each: float, rows: int = 256) -> None:
        self.fixed, self.each = fixed, each
        self.lengths = AdaptiveLengths(rows, LONGEST)
        self.noise = np.random.default_rng(1)
        self.spread = 0.0

    def step(self, rows: int, chance: float = 0.8) -> int:
        """One step of decoding rows whose drafts stay with this chance each; the drafts made."""
        at = np.arange(rows, dtype=np.int32)
        drafted = 0
        if self.lengths.is_worthwhile(at, np.ones(rows, dtype=np.int32)):
            for row in range(rows):
                length = self.lengths.trim(row, 1, 0, LONGEST)
                if length > 0:
                    stays = int(np.cumprod(self.noise.random(length) < chance).sum())
                    self.lengths.record(row, 1, 0, length, stays)
                    drafted += length
        seconds = (self.fixed + self.each * (rows + drafted)) * (1 + self.spread * self.noise.standard_normal())
        self.lengths.record_step(rows, rows + drafted, drafted, seconds)
        return drafted

    def run(self, rows: int, steps: int, chance: float = 0.8) -> list[int]:
        return [self.step(rows, chance) for _ in range(steps)]


def test_given_a_thin_batch_then_drafts_are_long() -> None:
    machine = SimulatedMachine(fixed=5.0e-3, each=0.1e-3)
    assert np.mean(machine.run(1, 200)[20:]) > 5


def test_given_full_batches_then_nothing_is_drafted_and_no_proposer_is_called() -> None:
    machine = SimulatedMachine(fixed=5.0e-3, each=0.3e-3)
    assert sum(machine.run(128, 200)) == 0
    # Also when the batch was thin before, and drafts paid there.
    assert sum(machine.run(2, 200)) > 0
    assert sum(machine.run(128, 200)) == 0


def test_given_a_job_that_drains_then_drafts_begin_when_the_batch_is_thin() -> None:
    machine = SimulatedMachine(fixed=5.0e-3, each=0.3e-3)
    drafted = {rows: sum(machine.run(rows, 40)) for rows in (128, 96, 64, 32, 16, 8, 4, 2, 1)}
    assert [drafted[rows] for rows in (128, 96, 64)] == [0, 0, 0]
    assert all(drafted[rows] > 0 for rows in (8, 4, 2, 1))
    assert drafted[1] / 1 > drafted[8] / 8


def test_given_a_machine_that_computes_all_the_time_then_even_one_row_drafts_little() -> None:
    machine = SimulatedMachine(fixed=0.0, each=1e-3)
    machine.run(1, 100)
    assert sum(machine.run(1, 100)) < 40


def test_given_rows_that_fare_differently_then_each_has_a_length_of_its_own() -> None:
    lengths = AdaptiveLengths(4, LONGEST)
    rows = np.arange(3, dtype=np.int32)
    for _ in range(30):
        lengths.record_step(3, 3, 0, 10e-3)
        lengths.record_step(3, 12, 9, 16e-3)
        assert lengths.is_worthwhile(rows, np.ones(3, dtype=np.int32))
        for row, stays in enumerate((6, 1, 0)):
            lengths.trim(row, 1, 0, LONGEST)
            lengths.record(row, 1, 0, 6, stays)
    good, poor, bad = (lengths.trim(row, 1, 0, LONGEST) for row in range(3))
    assert good > poor > bad
    # A new owner of the row begins with what is known of all.
    fresh = [lengths.trim(row, 2, 0, LONGEST) for row in (0, 2)]
    assert fresh[0] == fresh[1]
    assert bad <= fresh[1] <= good


def test_given_kinds_of_drafts_that_fare_differently_then_each_has_a_length_of_its_own() -> None:
    lengths = AdaptiveLengths(4, 16)
    rows = np.arange(1, dtype=np.int32)
    for _ in range(30):
        lengths.record_step(1, 1, 0, 10e-3)
        lengths.record_step(1, 9, 8, 26e-3)  # a draft costs a fifth of a token
        assert lengths.is_worthwhile(rows, np.ones(1, dtype=np.int32))
        for trust, stays in ((5, 8), (2, 2), (0, 0)):
            lengths.trim(0, 1, trust, 16)
            lengths.record(0, 1, trust, 8, stays)
    sure, middling, bad = (lengths.trim(0, 1, trust, 16) for trust in (5, 2, 0))
    assert sure == 16
    assert sure > middling > 0
    assert bad == 0


def test_given_a_row_whose_drafts_were_bad_then_it_is_tried_again_after_a_while() -> None:
    lengths = AdaptiveLengths(2, LONGEST)
    rows = np.arange(2, dtype=np.int32)
    for _ in range(10):
        lengths.record_step(2, 2, 0, 10e-3)
        lengths.record_step(2, 4, 2, 13e-3)  # a draft costs 0.3 tokens
    assert lengths.is_worthwhile(rows, np.ones(2, dtype=np.int32))
    for _ in range(30):
        for row, stays in ((0, 0), (1, 4)):
            lengths.trim(row, 1, 0, LONGEST)
            lengths.record(row, 1, 0, 4, stays)
    assert lengths.trim(0, 1, 0, LONGEST) == 0
    later = [lengths.trim(0, 1, 0, LONGEST) for _ in range(200)]
    assert later[-1] > 0


@pytest.mark.slow
def test_given_noise_about_the_price_where_drafts_stop_paying_then_they_are_not_switched_at_every_step() -> None:
    machine = SimulatedMachine(fixed=5.0e-3, each=0.15e-3)
    machine.spread = 0.05
    machine.run(64, 30)
    on = [bool(drafted) for drafted in machine.run(24, 600)]
    switches = sum(one != other for one, other in pairwise(on))
    # Apart from probes of the time of a step without drafts, which come once in `PROBE_INTERVAL_STEPS` steps.
    assert switches <= 2 * (600 // PROBE_INTERVAL_STEPS) + 12


def test_given_a_price_that_was_measured_wrong_when_few_decode_then_it_is_found_out() -> None:
    machine = SimulatedMachine(fixed=5.0e-3, each=0.1e-3)
    machine.run(2, 20)
    true, machine.each = machine.each, 10e-3
    machine.run(2, 200)  # something else runs on the machine whenever there are drafts
    machine.each = true
    assert machine.lengths._costs.price(2) > 0.45  # type: ignore[operator]
    assert sum(machine.run(2, 40)) < 40
    machine.run(2, 64 * 30)
    assert np.mean(machine.run(2, 100)) > 3
    full = SimulatedMachine(fixed=5.0e-3, each=0.3e-3)
    assert sum(full.run(64, 500)) == 0


def test_given_drafts_that_pay_then_now_and_then_a_step_goes_without_to_see_what_it_takes() -> None:
    machine = SimulatedMachine(fixed=5.0e-3, each=0.05e-3)
    drafted = machine.run(1, 400, chance=1.0)
    assert 3 <= drafted[10:].count(0) <= 400 // PROBE_INTERVAL_STEPS + 1


def test_given_a_step_that_computes_a_prompt_then_no_row_drafts_and_its_time_is_not_counted() -> None:
    lengths = AdaptiveLengths(4, LONGEST)
    assert not lengths.is_worthwhile(np.arange(2, dtype=np.int32), np.array([1, 300], dtype=np.int32))
    costs = StepCosts()
    lengths.record_step(2, 301, 0, 1.0)
    assert costs.price(2) is None
    assert lengths.is_worthwhile(np.arange(2, dtype=np.int32), np.ones(2, dtype=np.int32))


def test_a_price_is_the_share_of_what_a_token_costs_without() -> None:
    costs = StepCosts()
    assert costs.price(4) is None
    costs.record(4, 0, 10e-3)
    costs.record(4, 8, 12e-3)
    assert costs.price(4) == pytest.approx(0.25e-3 / (10e-3 / 4))
    # Where no drafts were measured, rows say what positions cost.
    costs.record(64, 0, 40e-3)
    costs.record(128, 0, 72e-3)
    assert costs.price(64) == pytest.approx(0.5e-3 / (40e-3 / 64))


def test_settings_say_who_decides() -> None:
    assert isinstance(make_draft_lengths(SpeculationConfig("auto"), 4), AdaptiveLengths)
    fixed = make_draft_lengths(SpeculationConfig("ngram", longest=3), 4)
    assert isinstance(fixed, FixedLengths)
    assert fixed.max_drafts == 3
    assert (
        make_draft_lengths(SpeculationConfig("ngram"), 4).max_drafts
        > make_draft_lengths(SpeculationConfig("draft"), 4).max_drafts
    )
    with pytest.raises(ValueError, match="longest is 0, but must be 1 or more"):
        make_draft_lengths(SpeculationConfig("auto", longest=0), 4)
