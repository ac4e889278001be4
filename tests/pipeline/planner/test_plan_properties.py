"""Properties of every plan, for any input: no row lost, no row twice, copies in the shard of their original."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PREFIXES = ["", "You are terse. " * 20, "You are terse. " * 20 + "Also kind. " * 30, "Other rules. " * 25]
CHARS_WORTH = 256


def request(
    prefix: int, text: int, max_tokens: int, temperature: float, seed: int | None, model: str
) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {text}"}]
    if PREFIXES[prefix]:
        messages.insert(0, {"role": "system", "content": PREFIXES[prefix]})
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    return {"method": "POST", "url": "/v1/chat/completions", "body": body}


requests = st.builds(
    request,
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([4, 50]),
    st.sampled_from([0, 1]),
    st.sampled_from([None, 7]),
    st.sampled_from(["demo", "other"]),
)
bad = st.sampled_from(["", "   ", "x", '{"custom_id": "b"}', json.dumps({"custom_id": "row 0"})])
plans = st.fixed_dictionaries(
    {
        "segment_rows": st.sampled_from([3, 10, 1000]),
        "shard_tokens": st.sampled_from([1, 300, 10**6]),
        "max_shard_rows": st.sampled_from([2, 5, 100]),
        "max_copies": st.sampled_from([1, 2, 100]),
        "min_group_rows": st.sampled_from([1, 3, 100]),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(requests | bad, max_size=30), plans)
@pytest.mark.slow
def test_every_plan(tools: Any, lines: list[Any], plan: dict[str, int]) -> None:
    texts = [
        line if isinstance(line, str) else json.dumps({"custom_id": f"row {row}"} | line)
        for row, line in enumerate(lines)
    ]
    data = "\n".join([*texts, ""]).encode()
    job = tools.job(models=("demo", "other"), plan=plan)
    planned = tools.plan(data, job)

    # Each non-blank line is in exactly one shard or refused.
    wanted = [row for row, text in enumerate(texts) if text.strip()]
    ends = Counter(row["row"] for row in planned.rows) + Counter(planned.error_of.keys())
    assert ends == Counter(wanted)
    assert planned.summary.total == len(wanted)
    assert planned.summary.blank_lines == len(texts) - len(wanted)
    # What is valid and comes first under its name is planned.
    assert {row["row"] for row in planned.rows} >= {n for n, line in enumerate(lines) if isinstance(line, dict) and n}

    by_number = {shard.number: shard for segment in planned.summary.segments for shard in segment.shards}
    assert list(by_number) == sorted(planned.shards)
    parts = [number for segment in planned.summary.segments for number in sorted(segment.parts)]
    assert parts == list(range(len(parts))), "no number is left out or used twice"
    refused = {segment.rejects.number: segment.rejects.rows for segment in planned.summary.segments if segment.rejects}
    assert refused == {number: sum(map(len, tables)) for number, tables in planned.sink.rejects.items()}
    for number, rows in planned.shards.items():
        check_shard(rows, lines, plan)
        shard = by_number[number]
        computed = [row for row in rows if row["row"] == row["compute_row"]]
        assert (shard.rows, shard.computed_rows, shard.model) == (len(rows), len(computed), rows[0]["model"])
        assert shard.prompt_tokens == sum(row["estimated_prompt_tokens"] for row in computed)
    check_sharing(planned.rows, lines, plan)
    check_readers(planned)

    # Planned again, it is the same plan.
    again = tools.plan(data, job)
    assert again.shards == planned.shards
    assert [row | {"finished_at": None} for row in again.rejected] == [
        row | {"finished_at": None} for row in planned.rejected
    ]


def check_shard(rows: list[dict[str, Any]], lines: list[Any], plan: dict[str, int]) -> None:
    assert len({row["model"] for row in rows}) == 1
    leaders = {row["row"]: row for row in rows if row["row"] == row["compute_row"]}
    assert len(leaders) <= plan["max_shard_rows"]
    copies = Counter(row["compute_row"] for row in rows if row["row"] != row["compute_row"])
    assert sum(copies.values()) <= plan["max_copies"]
    for row in rows:
        leader = leaders[row["compute_row"]]
        assert leader["row"] <= row["row"]
        assert leader["request_hash"] == row["request_hash"]
        original = lines[row["row"]]["body"]
        assert original == lines[leader["row"]]["body"] or original["temperature"] == 0  # greedy: the seed says nothing
        assert {**original, "seed": 0} == {**lines[leader["row"]]["body"], "seed": 0}
        if row is leader:
            body = json.loads(row["body"])
            assert body["messages"] == original["messages"]
            assert body.get("max_tokens") == original["max_tokens"]
            assert body.get("seed") == original["seed"]
        else:
            assert (row["body"], row["prefix_group"]) == ("", None)
            assert original["temperature"] == 0 or original["seed"] is not None


def check_sharing(rows: list[dict[str, Any]], lines: list[Any], plan: dict[str, int]) -> None:
    """Equal requests of a segment are computed as often as copies demand, sampled ones each for itself."""
    computed: Counter[tuple[int, bytes]] = Counter()
    total: Counter[tuple[int, bytes]] = Counter()
    for row in rows:
        original = lines[row["row"]]["body"]
        if original["temperature"] == 0 or original["seed"] is not None:
            key = (row["row"] // plan["segment_rows"], row["request_hash"])
            total[key] += 1
            computed[key] += row["row"] == row["compute_row"]
        else:
            assert row["row"] == row["compute_row"]
    for key, count in total.items():
        assert computed[key] == -(-count // (plan["max_copies"] + 1))


def check_readers(planned: Any) -> None:
    """`prefix_readers` says how many computed requests after this one (in its segment) begin with the prefix, and these
    come next, side by side."""
    for segment in planned.summary.segments:
        rows = [row for shard in segment.shards for row in planned.shards[shard.number] if row["body"]]
        for at, row in enumerate(rows):
            if row["prefix_group"] is None:
                continue
            same = [other for other in rows[at:] if other["prefix_group"] == row["prefix_group"]]
            readers = rows[at : at + row["prefix_readers"] + 1]
            assert all(other in readers for other in same)
            assert len(common_prefix([text_of(other) for other in readers])) >= CHARS_WORTH or len(readers) == 1


def text_of(row: dict[str, Any]) -> str:
    return "".join(message["content"] for message in json.loads(row["body"])["messages"])


def common_prefix(texts: list[str]) -> str:
    first, last = min(texts), max(texts)
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:same]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({}, {"user": "me", "metadata": {"a": "b"}, "store": True}, True),
        ({}, {"seed": 5, "top_p": 0.5, "top_k": 3}, True),
        ({"max_tokens": 9}, {"max_completion_tokens": 9}, True),
        ({"logit_bias": {"1": 1, "2": 2}}, {"logit_bias": {"2": 2.0, "1": 1.0}}, True),
        ({"temperature": 1, "seed": 3}, {"temperature": 1.0, "seed": 3}, True),
        ({"temperature": 1, "seed": 3}, {"temperature": 1, "seed": 4}, False),
        ({"temperature": 1}, {"temperature": 1}, False),
        ({}, {"max_tokens": 8}, False),
        ({}, {"logprobs": True}, False),
        ({}, {"repetition_penalty": 1.1}, False),
        ({}, {"content": "Hi"}, False),
    ],
)
def test_what_counts_as_the_same_request(tools: Any, first: dict[str, Any], second: dict[str, Any], same: bool) -> None:
    planned = tools.plan(tools.line("a", **first) + b"\n" + tools.line("b", **second))
    assert planned.summary.unique == (1 if same else 2)


def test_a_new_leader_when_too_many_copies_wait(tools: Any) -> None:
    """Given 7 equal requests and room for 2 copies each, then 3 are computed and no shard holds more than 2
    copies."""
    data = b"\n".join(tools.line(str(n)) for n in range(7))
    planned = tools.plan(data, tools.job(plan={"max_copies": 2}))
    assert [[(row["row"], row["compute_row"]) for row in rows] for rows in planned.shards.values()] == [
        [(0, 0), (1, 0), (2, 0)],
        [(3, 3), (4, 3), (5, 3), (6, 6)],
    ]
