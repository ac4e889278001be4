"""Large inputs are planned in segments, each of which is independent once committed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.planner import PlanMismatch, spill
from pipeline.planner.segment_sizes import SegmentSizes
from pipeline.ports import StoreError
from schemas.jobs.job import OnInvalid


def data(tools: Any, count: int) -> bytes:
    """`count` lines; every 7th is bad, every 5th blank, and ids repeat after 20 lines."""
    made = []
    for number in range(count):
        if number % 5 == 4:
            made.append(b"")
        elif number % 7 == 6:
            made.append(b"bad")
        else:
            made.append(tools.line(f"id {number % 20}", f"question {number}"))
    return b"\n".join(made) + b"\n"


def test_segments_cover_the_input_and_number_their_shards_through(tools: Any) -> None:
    planned = tools.plan(data(tools, 50), tools.job(plan={"segment_rows": 8, "max_shard_rows": 3}))
    segments = planned.sink.committed
    assert [(segment.index, segment.first_row, segment.end_row, segment.last) for segment in segments] == [
        (index, 8 * index, min(8 * index + 8, 50), index == 6) for index in range(7)
    ]
    assert sum(segment.total for segment in segments) == planned.summary.total == 40
    numbers = [number for segment in segments for number in segment.parts]
    assert numbers == list(range(len(numbers)))
    # Part 0 is the first segment's refused rows, and each other segment that has some begins with a part of them.
    refused = [sum(segment.first_row <= row < segment.end_row for row in planned.error_of) for segment in segments]
    assert sum(refused) == len(planned.error_of)
    assert [segment.rejects.rows for segment in segments] == refused
    assert all(segment.rejects.number == min(segment.parts) for segment in segments)
    # An id that an earlier segment had is still known.
    assert planned.error_of[21] == (
        "duplicate_custom_id",
        "line 22 of the input: custom_id 'id 1' was used before, on line 2; give each line a name of its own",
    )


@pytest.mark.parametrize("count", [16, 17])
def test_the_last_segment_knows_that_it_is_last(tools: Any, count: int) -> None:
    lines = b"\n".join(tools.line(str(n)) for n in range(count))
    planned = tools.plan(lines, tools.job(plan={"segment_rows": 8}))
    assert [segment.last for segment in planned.sink.committed] == [False] * (-(-count // 8) - 1) + [True]


def test_planning_goes_on_where_an_interrupted_planner_stopped(tools: Any) -> None:
    """Given the first 3 segments stand, when the job is planned again, then only the others are planned, with the
    same result."""
    job = tools.job(plan={"segment_rows": 8, "max_shard_rows": 3})
    whole = tools.plan(data(tools, 50), job)
    standing = {segment.index: segment for segment in whole.sink.committed[:3]}
    again = tools.plan(data(tools, 50), job, sink=tools.sink(standing=standing))
    assert again.summary == whole.summary
    assert [segment.index for segment in again.sink.committed] == [3, 4, 5, 6]
    written = {shard.number for segment in whole.sink.committed[3:] for shard in segment.shards}
    assert again.shards == {number: rows for number, rows in whole.shards.items() if number in written}
    assert again.error_of == {row: error for row, error in whole.error_of.items() if row >= 24}


def test_planning_stops_after_as_many_segments_as_are_wanted(tools: Any) -> None:
    job = tools.job(plan={"segment_rows": 8})
    whole = tools.plan(data(tools, 50), job)
    some = tools.plan(data(tools, 50), job, max_segments=2)
    assert some.sink.committed == whole.sink.committed[:2]
    rest = tools.plan(data(tools, 50), job, sink=tools.sink(standing=some.sink.standing))
    assert rest.summary == whole.summary


def test_the_first_segments_are_small_and_grow_to_the_size_that_is_set(tools: Any) -> None:
    lines = b"\n".join(tools.line(str(n)) for n in range(40))
    planned = tools.plan(lines, tools.job(plan={"first_segment_rows": 3, "segment_rows": 10}))
    assert [segment.end_row for segment in planned.sink.committed] == [3, 9, 19, 29, 39, 40]
    assert [segment.index for segment in planned.sink.committed] == list(range(6))


@pytest.mark.parametrize(("first", "most"), [(1, 1), (3, 10), (5, 5), (4, 64), (10_000, 100_000)])
def test_each_row_lies_in_the_segment_that_its_borders_say(first: int, most: int) -> None:
    sizes = SegmentSizes(first, most)
    begin = index = 0
    while begin < 20 * most:
        end = sizes.end(begin)
        assert end - begin == min(first * 2**index, most)
        for row in (begin, (begin + end) // 2, end - 1):
            assert (sizes.index(row), sizes.end(row)) == (index, end)
        begin, index = end, index + 1


def test_later_segments_are_estimated_with_what_the_first_one_taught(tools: Any) -> None:
    """Given the first segment was planned with a tokenizer, when a planner without one goes on, then it estimates the
    same, and a planner with a tokenizer doesn't call it again."""
    counted: list[str] = []

    def counter(text: str) -> int:
        counted.append(text)
        return len(text)

    lines = b"\n".join(tools.line(str(n), f"question {n}") for n in range(30))
    job = tools.job(plan={"segment_rows": 8})
    whole = tools.plan(lines, job, counter=counter)
    assert len(counted) == 8
    standing = {0: whole.sink.committed[0]}
    assert standing[0].tokens_per_byte == 1.0
    again = tools.plan(lines, job, sink=tools.sink(standing=standing))
    assert again.summary == whole.summary


def test_a_lost_race_leaves_the_winners_segment(tools: Any) -> None:
    """Given another planner commits the segment first, then its shards are the ones that count."""
    lines = b"\n".join(tools.line(str(n)) for n in range(3))
    winner = tools.plan(lines).sink.committed[0].model_copy(update={"attempt": "somebody"})
    sink = tools.sink()
    sink.existing_segment = lambda index: None
    sink.standing[0] = winner
    assert tools.plan(lines, sink=sink).summary.segments == (winner,)


@pytest.mark.parametrize("race", [False, True], ids=["stood before", "lost a race"])
@pytest.mark.parametrize("on_invalid", [OnInvalid.ROW, OnInvalid.JOB])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"end_row": 5, "blank_lines": 1}, "has rows 0 to 5, but rows 0 to 4 are due: it is of another plan"),
        ({"first_row": 1, "end_row": 5}, "has rows 1 to 5, but rows 0 to 4 are due"),
        ({"last": True}, "has rows 0 to 4, the last ones, but rows 0 to 4 are due"),
    ],
)
def test_given_a_segment_of_other_rows_then_it_is_refused(
    tools: Any, change: dict[str, Any], message: str, on_invalid: OnInvalid, race: bool
) -> None:
    lines = b"\n".join(tools.line(str(n)) for n in range(10))
    job = tools.job(plan={"segment_rows": 4}, on_invalid=on_invalid)
    own = tools.plan(lines, job).sink.committed[0]
    sink = tools.sink(standing={0: own.model_copy(update=change)})
    if race:
        sink.existing_segment = lambda index: None
    with pytest.raises(PlanMismatch, match=message):
        tools.plan(lines, job, sink=sink)
    assert len(sink.standing) == 1, "nothing is planned behind it"


@pytest.mark.parametrize("segment_rows", [3, 1000])
def test_limit_counts_lines_with_content(tools: Any, segment_rows: int) -> None:
    plan = {"segment_rows": segment_rows}
    planned = tools.plan(data(tools, 50), tools.job(limit=6, plan=plan))
    assert planned.summary.total == 6
    assert sorted([*planned.error_of, *(row["row"] for row in planned.rows)]) == [0, 1, 2, 3, 5, 6]
    assert planned.sink.committed[-1].last
    assert tools.plan(data(tools, 50), tools.job(limit=1000, plan=plan)).summary.total == 40


def test_several_files_are_one_input_and_errors_name_theirs(tools: Any) -> None:
    source = tools.source(tools.line("a", "one"), b"bad\n" + tools.line("a", "two") + b"\n" + tools.line("b", "three"))
    planned = tools.plan(source)
    assert sorted(row["row"] for row in planned.rows) == [0, 3]
    assert planned.error_of[1][1].startswith("line 1: file-1.jsonl: the line is not JSON")
    assert "used before, in row 0 of the whole input" in planned.error_of[2][1]


def test_given_a_disk_that_is_nearly_full_when_a_segment_is_planned_then_it_stops_before_the_disk_is_full(
    tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = SimpleNamespace(free=spill.SPARE_BYTES + 100)
    monkeypatch.setattr(spill.shutil, "disk_usage", lambda _: left)
    with pytest.raises(StoreError, match="would leave less than 268435456 bytes; free some space"):
        tools.plan(tools.line())
    left.free += 1 << 20
    assert tools.plan(tools.line()).summary.total == 1


def test_given_two_names_of_the_same_weights_when_planned_then_equal_requests_to_both_are_no_copies(tools: Any) -> None:
    """A response has the requested name."""
    job = tools.job(models=("a", "b"))
    pins = tuple(pin.model_copy(update={"digest": "sha256:1"}) for pin in job.models)
    lines = [tools.line(str(n), model=name) for n, name in enumerate("aabb")]
    planned = tools.plan(b"\n".join(lines), job.model_copy(update={"models": pins}))
    assert {row["row"]: row["compute_row"] for row in planned.rows} == {0: 0, 1: 0, 2: 2, 3: 2}
    assert len({row["request_hash"] for row in planned.rows}) == 1
