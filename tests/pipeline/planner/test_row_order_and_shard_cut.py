"""Prefixes side by side, long answers first, shards near their size."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planner.prefix_chain import prefix_chain
from pipeline.planner.row_order import find_leaders
from pipeline.planner.shard_cut import LARGEST_UNIT, ShardLimits, cut

RULES = "Follow the rules. " * 20
OTHER = "Answer in verse. " * 20


def lines(tools: Any, *requests: tuple[str, str, int]) -> bytes:
    """Lines of (system prompt, question, max_tokens); ids are their order."""
    made = []
    for number, (system, question, max_tokens) in enumerate(requests):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        made.append(tools.line(str(number), messages=messages, max_tokens=max_tokens, ignore_eos=True))
    return b"\n".join(made)


def test_groups_run_together_ordered_by_their_longest_answer(tools: Any) -> None:
    """Given two groups interleaved with loners, then the group with the longest answer comes first, whole, longest
    answer first, and loners stand where their own answer puts them."""
    data = lines(
        tools,
        (RULES, "a", 10),
        (OTHER, "b", 30),
        ("short", "c", 20),
        (RULES, "d", 40),
        (OTHER, "e", 5),
        ("brief", "f", 50),
        (RULES, "g", 1),
    )
    planned = tools.plan(data)
    assert [row["row"] for row in planned.rows] == [5, 3, 0, 6, 1, 4, 2]
    rules, other = planned.rows[1]["prefix_group"], planned.rows[4]["prefix_group"]
    assert [row["prefix_group"] for row in planned.rows] == [None, rules, rules, rules, other, other, None]
    assert [row["prefix_readers"] for row in planned.rows] == [None, 2, 1, 0, 1, 0, None]
    assert [row["expected_tokens"] for row in planned.rows] == [50, 40, 10, 1, 30, 5, 20]
    assert planned.summary.segments[0].prefix_groups == 2


def test_where_shards_begin_small_each_models_first_ones_grow_to_the_target_and_split_groups() -> None:
    """Given 300 requests of 10 tokens in one group and 100 of another model, and a target of 640 tokens."""
    tokens, copies = np.full(400, 10), np.zeros(400, dtype=np.int64)
    models = np.repeat(np.array([0, 1], dtype=np.int32), [300, 100])
    joined = np.ones(400, dtype=bool)
    joined[[0, 300]] = False
    limits = ShardLimits(tokens=640, rows=1000, copies=10, small_first=True)
    sizes = [end - start for start, end in cut(tokens, copies, models, joined, limits)]
    # 10 tokens, 20, 40, 80, 160, 320, and then what is left of the group.
    assert sizes[:6] == [1, 2, 4, 8, 16, 32]
    assert sum(sizes[: sizes.index(1, 1)]) == 300, "the other model begins small, too"
    assert sizes[sizes.index(1, 1) :][:6] == [1, 2, 4, 8, 16, 32]


def test_a_group_inside_a_group_counts_for_both(tools: Any) -> None:
    """Given 20 requests under one system prompt, 10 of which also share a long example, then the 10 are a group of
    their own, run together, and are readers of the outer prefix too."""
    example = "For example, one may say this. " * 20
    data = lines(
        tools,
        *((RULES, f"plain {n}", 5) for n in range(10)),
        *((RULES, f"{example}{n}", 5) for n in range(10)),
    )
    planned = tools.plan(data)
    outer, inner = planned.rows[0], planned.rows[-1]
    assert [row["prefix_group"] for row in planned.rows] == [outer["prefix_group"]] * 10 + [inner["prefix_group"]] * 10
    assert (outer["prefix_readers"], inner["prefix_readers"]) == (19, 0)
    assert outer["prefix_group"] != inner["prefix_group"]


def test_readers_are_counted_down_across_shards(tools: Any) -> None:
    data = lines(tools, *((RULES, str(n), 5) for n in range(10)))
    planned = tools.plan(data, tools.job(plan={"max_shard_rows": 4, "min_group_rows": 2}))
    counts = [[row["prefix_readers"] for row in rows] for rows in planned.shards.values()]
    assert counts == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]


def test_shared_tokens_are_those_after_the_first_reader(tools: Any) -> None:
    planned = tools.plan(lines(tools, *((RULES, str(n), 5) for n in range(5))))
    message = len(f"system\x00{RULES}\x01") / 4
    assert planned.summary.shared_prefix_tokens == round(4 * message)


def test_token_prompts_share_prefixes_too(tools: Any) -> None:
    made = []
    for number in range(4):
        body = {"model": "demo", "prompt": [*range(200), number], "temperature": 0}
        made.append(
            json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}).encode()
        )
    planned = tools.plan(b"\n".join(made))
    assert len({row["prefix_group"] for row in planned.rows}) == 1
    assert [row["prefix_readers"] for row in planned.rows] == [3, 2, 1, 0]
    assert [row["estimated_prompt_tokens"] for row in planned.rows] == [201] * 4


def test_models_do_not_mix(tools: Any) -> None:
    made = [tools.line(str(n), RULES + str(n), model=("demo", "other")[n % 2]) for n in range(6)]
    planned = tools.plan(b"\n".join(made), tools.job(models=("demo", "other")))
    assert [{row["model"] for row in rows} for rows in planned.shards.values()] == [{"demo"}, {"other"}]
    assert len({row["prefix_group"] for row in planned.rows}) == 2


def test_only_a_sample_is_tokenized(tools: Any) -> None:
    counted: list[str] = []

    def counter(text: str) -> int:
        counted.append(text)
        return len(text)

    data = b"\n".join(tools.line(str(n), "x" * 400 + str(n)) for n in range(200))
    planned = tools.plan(data, counter=counter)
    assert len(counted) == 64
    estimates = [row["estimated_prompt_tokens"] for row in planned.rows]
    assert all(400 <= estimate <= 425 for estimate in estimates)


texts = st.lists(st.binary(min_size=0, max_size=40).map(lambda data: b"shared " * 5 + data), min_size=2, max_size=2)


@given(texts, st.integers(1, 50))
def test_chains_agree_exactly_as_far_as_the_prompts_do(prompts: list[bytes], min_bytes: int) -> None:
    first, second = (prefix_chain(prompt, (), b"key", min_bytes) for prompt in prompts)
    for (one, size), (two, other) in zip(zip(*first, strict=True), zip(*second, strict=True), strict=False):
        assert (one == two) == (prompts[0][:size] == prompts[1][:other])
    shared = next((n for n, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b), min(map(len, prompts)))
    agreed = [size for one, two, size in zip(first.hashes, second.hashes, first.sizes, strict=False) if one == two]
    # Cuts double, so at least half of what is shared is found.
    assert max(agreed, default=0) * 2 > shared or shared < min_bytes + 1
    assert first.hashes[:1] != prefix_chain(prompts[0], (), b"other", min_bytes).hashes[:1] or not first.hashes


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40), st.integers(1, 5))
def test_leaders_are_the_earliest_and_lead_few_enough(requests: list[tuple[int, bool]], max_copies: int) -> None:
    hashes = np.array([[number, 9] for number, _ in requests], dtype=np.uint64).reshape(-1, 2)
    shareable = np.array([number > 0 for number, _ in requests], dtype=bool)
    leaders = find_leaders(hashes, shareable, max_copies).tolist()
    waiting: dict[int, tuple[int, int]] = {}  # hash -> its newest leader and that one's copies
    for index, (number, _) in enumerate(requests):
        leader, copies = waiting.get(number, (None, max_copies))
        if number == 0 or leader is None or copies == max_copies:
            leader, copies = index, -1
        waiting[number] = (leader, copies + 1)
        assert leaders[index] == leader


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3), st.integers(0, 1), st.booleans()), max_size=60),
    st.integers(1, 100),
    st.integers(1, 10),
    st.integers(3, 20),
)
def test_shards_cover_all_and_respect_their_limits(
    requests: list[tuple[int, int, int, bool]], tokens: int, rows: int, copies: int
) -> None:
    requests.sort(key=lambda request: request[2])
    sizes = np.array([request[0] for request in requests], dtype=np.int64)
    waiting = np.array([request[1] for request in requests], dtype=np.int64)
    models = np.array([request[2] for request in requests], dtype=np.int32)
    joined = np.array([request[3] for request in requests], dtype=bool)
    joined[:1] = False
    joined[1:] &= models[1:] == models[:-1]
    shards = cut(sizes, waiting, models, joined, ShardLimits(tokens, rows, copies))
    assert [position for start, end in shards for position in range(start, end)] == list(range(len(requests)))
    for start, end in shards:
        assert end > start
        assert len(set(models[start:end].tolist())) == 1
        assert end - start <= rows
        assert waiting[start:end].sum() <= copies
        whole_unit = bool(joined[start + 1 : end].all())
        assert (
            sizes[start:end].sum() <= tokens
            or (whole_unit and sizes[start:end].sum() <= LARGEST_UNIT * tokens)
            or (end - start == 1)
        )
        if start and joined[start]:  # split inside a unit: only because no shard could hold it
            begin = max(position for position in range(start) if not joined[position])
            stop = next((position for position in range(start, len(joined)) if not joined[position]), len(joined))
            assert (
                sizes[begin:stop].sum() > LARGEST_UNIT * tokens
                or stop - begin > rows
                or waiting[begin:stop].sum() > copies
            )


def test_a_small_group_stays_whole_and_a_large_one_is_split(tools: Any) -> None:
    """Given shards that want 2 of 6 requests of a group, then the group is split only when 6 is not small."""
    data = lines(tools, *((RULES, str(n), 5) for n in range(6)))
    tokens = tools.plan(data).summary
    target = (tokens.prompt_tokens + tokens.expected_tokens) // 3
    for min_group_rows, sizes in ((7, [6]), (6, [2, 2, 2])):
        plan = {"shard_tokens": target, "min_group_rows": min_group_rows}
        planned = tools.plan(data, tools.job(plan=plan))
        assert [len(rows) for rows in planned.shards.values()] == sizes
