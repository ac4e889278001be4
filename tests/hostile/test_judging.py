"""The criteria of hostile runs: a death, memory growth, slowness or an unexpected answer breaks a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from tests.hostile.attack import Answer, Attack, Expected, tally, unexpected
from tests.hostile.deployment import ProcessDeath
from tests.hostile.judging import MAX_GROWTH_BYTES, ttft_quantile
from tests.hostile.parquet_files import mutated
from tests.hostile.report import document, markdown
from tests.hostile.run import Options, Outcome, Result
from tests.hostile.table import ATTACKS, chosen
from tests.hostile.well_behaved import GIVE_UP_SECONDS, Sample

REFUSED: Final = Expected("http", "4..", message="names the cause")
ATTACK: Final = Attack("an attack", lambda _: [], (REFUSED,))


def good_run() -> Outcome:
    """Twenty chats each, and one attack that was answered as expected."""
    result = Result(ATTACK, [Answer("http", "400", "invalid_request", "Names the cause")], begun=100.0, ended=120.0)
    result.peaks = {"serve": MAX_GROWTH_BYTES + 1_000}
    return Outcome(
        "serve", Options(seed=1),
        quiet=[Sample(50.0 + number, 0.2, ended=True) for number in range(20)],
        attacked=[Sample(100.0 + number, 0.5, ended=True) for number in range(20)],
        results=[result], memory_before={"serve": 1_000}, memory_after={"serve": 2_000},
        pids_before={"serve": 7}, pids_after={"serve": 7}, batch=Answer("job", "completed"), batch_wrong=None,
    )  # fmt: skip


def broken(outcome: Outcome) -> list[str]:
    return [verdict.criterion.split(" ")[0] for verdict in outcome.verdicts() if not verdict.holds]


def test_a_run_in_which_all_held_is_not_broken() -> None:
    assert broken(good_run()) == []


def test_a_death_breaks_a_run_and_so_does_another_pid() -> None:
    run = good_run()
    run.deaths = [ProcessDeath("serve", 1, 110.0, "")]
    assert broken(run) == ["all"]
    assert broken(replace(good_run(), pids_after={"serve": 8})) == ["all"]
    assert broken(replace(good_run(), restarts=["by hand"])) == ["all"]


def test_growth_breaks_a_run_at_the_peak_and_at_the_end() -> None:
    run = good_run()
    run.results[0].peaks = {"serve": MAX_GROWTH_BYTES + 1_001}
    assert broken(run) == ["memory"]
    assert broken(replace(good_run(), memory_after={"serve": MAX_GROWTH_BYTES + 1_001})) == ["memory"]


def test_slow_and_failed_chats_break_a_run_when_they_are_more_than_one_in_twenty() -> None:
    run = good_run()
    run.attacked[3].ttft = 5.0
    assert broken(run) == []
    run.attacked[4].ttft = None
    run.attacked[4].error = "closed"
    assert broken(run) == ["TTFT"]
    assert ttft_quantile(run.attacked, 1.0) == GIVE_UP_SECONDS


def test_a_wrong_batch_and_a_wrong_answer_break_a_run() -> None:
    assert broken(replace(good_run(), batch_wrong="a row is missing")) == ["the"]
    run = good_run()
    run.results[0].wrong = "http 200"
    assert broken(run) == ["each"]


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([Answer("http", "400", "x", "It names the cause.")], None),
        ([], "no answer"),
        ([Answer("http", "500", "x", "It names the cause.")], "http 500 x"),
        ([Answer("http", "400", "x", "Something is wrong.")], "http 400 x"),
        ([Answer("closed", "connection")], "closed connection"),
        ([Answer("http", "400", "x", "names the cause"), Answer("timeout", "no answer")], "timeout no answer"),
    ],
)
def test_answers_are_compared_with_what_is_expected(answers: list[Answer], why: str | None) -> None:
    found = unexpected((REFUSED,), answers)
    assert found is None if why is None else found is not None and found.startswith(why)


def test_a_required_answer_must_be_there() -> None:
    expected = (Expected("http", "200"), Expected("http", "429", required=True))
    assert unexpected(expected, [Answer("http", "200")]) == "no answer is http 429"
    assert unexpected(expected, [Answer("http", "200"), Answer("http", "429")]) is None


def test_a_table_of_two_runs_has_the_columns_of_both() -> None:
    run = good_run()
    before = document([replace(run, deaths=[ProcessDeath("serve", 1, 110.0, "")])], "demo", (0.1, 0.2, 0.3))
    shown = markdown(document([run], "demo", (0.1, 0.2, 0.3)), before)
    assert "**broken**: 1 deaths (serve), 0 restarts by hand | holds: 0 deaths, 0 restarts by hand |" in shown
    assert "| an attack | http 4.. /names the cause/ | as expected | 0.50 | as expected | 0.50 |" in shown


def test_the_same_seed_draws_the_same_files() -> None:
    assert list(mutated(3, 20)) == list(mutated(3, 20))
    assert list(mutated(3, 20)) != list(mutated(4, 20))
    assert all(data.startswith(b"PAR1") for data in mutated(3, 200))


def test_the_table_has_enough_attacks_and_no_name_twice() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert len(chosen("cluster")) >= 40
    assert len(chosen("serve")) >= 40
    assert {attack.name for attack in chosen("serve", ["parquet: *"])} == {n for n in names if n.startswith("parquet")}
    with pytest.raises(ValueError, match="no attack is named"):
        chosen("serve", ["nothing"])


def test_equal_answers_are_counted_together() -> None:
    found = tally([Answer("http", "200"), Answer("http", "429", "x", "first"), Answer("http", "429", "x", "second", 2)])
    assert found == [Answer("http", "200"), Answer("http", "429", "x", "first", 3)]
