"""The order of fields, compared with all orders of small tables."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.frames.field_order import FieldOrder, order_fields, shared_characters

Rows = list[tuple[str, ...]]


def best_of_all(rows: Rows) -> int:
    """The most shared characters with any orders of the rows' fields, each row's chosen alone."""
    every = list(itertools.permutations(range(len(rows[0]))))
    return max(shared_characters(rows, list(orders)) for orders in itertools.product(every, repeat=len(rows)))


def best_fixed(rows: Rows) -> int:
    """The most shared characters with one order of the columns for all rows."""
    every = itertools.permutations(range(len(rows[0])))
    return max(shared_characters(rows, [order] * len(rows)) for order in every)


def reviews(chance: random.Random, rows: int, columns: int) -> Rows:
    """Products with a description, their brand and shop, reviews of them, and a rating; shuffled."""
    brands = [f"brand: {chance.choice('ABCDEFG')}{n}\n" for n in range(max(1, rows // 12))]
    products = [
        (f"description: {n} {'x' * chance.randint(20, 200)}\n", chance.choice(brands)) for n in range(rows // 5)
    ]
    made = []
    for n in range(rows):
        description, brand = chance.choice(products or [("description: one\n", brands[0])])
        review = f"review: {n} {'y' * chance.randint(10, 150)}\n"
        made.append((review, description, f"rating: {chance.randint(1, 5)}\n", brand, f"shop: {n % 3}\n")[:columns])
    return made


def test_given_a_unique_column_first_when_ordered_then_the_repeated_one_comes_first() -> None:
    rows = [
        ("review: good\n", "item: a lamp\n"),
        ("review: bad\n", "item: a lamp\n"),
        ("review: fine\n", "item: a cup\n"),
    ]

    assert order_fields(rows) == [(1, 0), (1, 0), (0, 1)]
    assert shared_characters(rows, [(0, 1)] * 3) == 0
    assert shared_characters(rows, order_fields(rows)) == len("item: a lamp\n")


def test_given_a_long_value_and_a_frequent_short_one_when_ordered_then_the_squared_length_decides() -> None:
    rows = [("l" * 30, "s", "1"), ("l" * 30, "s", "2"), ("m", "s", "3"), ("n", "s", "4")]

    assert [order[0] for order in order_fields(rows)] == [0, 0, 1, 1]


def test_given_groups_within_a_group_when_ordered_then_they_are_found_too() -> None:
    rows = [("a" * 9, "1", "x" * 5), ("a" * 9, "2", "x" * 5), ("a" * 9, "3" * 3, "y"), ("a" * 9, "3" * 3, "z")]

    assert order_fields(rows) == [(0, 2, 1), (0, 2, 1), (0, 1, 2), (0, 1, 2)]


@pytest.mark.parametrize("rows", [[], [()], [("a",)], [("a", "b")] * 3])
def test_given_a_table_without_a_choice_when_ordered_then_each_row_has_all_fields(rows: Rows) -> None:
    assert order_fields(rows) == [tuple(range(len(row))) for row in rows]


tables = st.integers(1, 4).flatmap(
    lambda columns: st.lists(
        st.tuples(*[st.sampled_from(["a", "bb", "cccc", "dddddd"])] * columns), min_size=1, max_size=12
    )
)


@given(tables)
@settings(max_examples=60, deadline=None)
def test_orders_are_permutations_and_depend_on_nothing_but_the_table(rows: Rows) -> None:
    orders = order_fields(rows)

    assert all(sorted(order) == list(range(len(row))) for order, row in zip(orders, rows, strict=True))
    assert orders == order_fields(list(rows))
    total = sum(len(text) for row in rows for text in row)
    assert 0 <= shared_characters(rows, orders) < total


@pytest.mark.parametrize(("rows", "columns"), [(4, 3), (3, 4), (6, 2), (2, 5)])
@pytest.mark.parametrize("seed", range(6))
def test_given_small_tables_of_reviews_when_ordered_then_95_percent_of_the_best_orders_are_reached(
    rows: int, columns: int, seed: int
) -> None:
    table = reviews(random.Random(f"{rows} {columns} {seed}"), rows, columns)

    best = best_of_all(table)
    found = shared_characters(table, order_fields(table))
    assert 0.95 * best <= found <= best


@pytest.mark.parametrize("columns", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(4))
def test_given_tables_of_reviews_when_ordered_then_no_fixed_order_is_better(columns: int, seed: int) -> None:
    table = reviews(random.Random(f"{columns} {seed}"), 60, columns)

    best = best_fixed(table)
    assert best > 0, "else there is nothing to find"
    assert shared_characters(table, order_fields(table)) >= 0.95 * best


def naive(rows: Rows) -> list[FieldOrder]:
    """Greedy Group Recursion as the paper writes it: one group, then the other rows, then the rest of the group."""

    def order(members: list[int], fields: tuple[int, ...]) -> dict[int, FieldOrder]:
        scored = [
            (-(len(text) ** 2) * (len(group) - 1), field, text, group)
            for field in fields
            for text in {rows[row][field] for row in members}
            if len(group := [row for row in members if rows[row][field] == text]) > 1
        ]
        if not scored:
            return dict.fromkeys(members, fields)
        _, field, _, group = min(scored)
        rest = order(group, tuple(other for other in fields if other != field))
        others = order([row for row in members if row not in group], fields)
        return others | {row: (field, *after) for row, after in rest.items()}

    found = order(list(range(len(rows))), tuple(range(len(rows[0]))))
    return [found[row] for row in range(len(rows))]


@given(tables)
@settings(max_examples=30, deadline=None)
def test_the_heap_of_old_gains_chooses_as_the_papers_recursion_does(rows: Rows) -> None:
    assert order_fields(rows) == naive(rows)
