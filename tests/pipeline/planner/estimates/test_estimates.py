"""Estimates agree with plans, and the bounds are those of the data sheets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.planner import HARDWARE, DoesNotFit, ModelShape, at_rate, bound, measure
from pipeline.planner.estimates.capacity import compute_seconds, concurrent_sequences, read_seconds
from pipeline.planner.tokens import TemplateTokens, TokenEstimator
from schemas.requests.errors import RowErrorCode
from schemas.requests.parsing import RERANK_URL, parse_body

LLAMA_70B = ModelShape(parameters=70_000_000_000, kv_elements=80 * 2 * 8 * 128)
LLAMA_8B = ModelShape(parameters=8_030_000_000, kv_elements=32 * 2 * 8 * 128)


def data(tools: Any) -> bytes:
    rules = "Follow the rules. " * 30
    made = [tools.line(str(n), f"{rules} {n % 20}", max_tokens=10) for n in range(30)]
    return b"\n".join([*made, b"", b"bad", tools.line("0"), b"worse"])


def test_measuring_finds_what_planning_finds(tools: Any) -> None:
    job = tools.job(plan={"segment_rows": 12})
    summary = tools.plan(data(tools), job).summary
    with tools.world() as world:
        estimate = measure(tools.source(data(tools)), job, world)
    for name in ("rejected", "unique", "blank_lines", "prompt_tokens", "expected_tokens", "max_tokens"):
        assert getattr(estimate, name) == getattr(summary, name), name
    assert estimate.rows == summary.total == 33
    assert estimate.shards == sum(len(segment.shards) for segment in summary.segments)
    assert estimate.shared_prefix_tokens == pytest.approx(summary.shared_prefix_tokens, abs=3)
    assert estimate.reasons == {RowErrorCode.INVALID_JSON: 2, RowErrorCode.DUPLICATE_CUSTOM_ID: 1}
    assert estimate.computed_prompt_tokens < estimate.prompt_tokens / 4
    assert estimate.tokens_of_models == {"demo": estimate.prompt_tokens + estimate.expected_tokens}
    assert not estimate.exact


@pytest.mark.slow
def test_exact_estimates_tokenize_every_prompt(tools: Any) -> None:
    counted: list[str] = []

    def counter(text: str) -> int:
        counted.append(text)
        return 100

    lines = b"\n".join(tools.line(str(n), f"question {n}") for n in range(200))
    with tools.world() as world:
        estimate = measure(tools.source(lines), tools.job(), world, counter=counter, exact=True)
    assert len(counted) == 200
    assert estimate.exact
    assert estimate.prompt_tokens == 200 * (100 + 8)  # and what the template puts around one message


@pytest.mark.parametrize(("exact", "refused"), [(False, 1), (True, 2)])
def test_rows_beyond_the_context_are_counted_as_refused(exact: bool, refused: int, tools: Any) -> None:
    # Given a context of 256 tokens, an answer that is longer, one that fits it only without its prompt, and no limit
    limits = ({"max_tokens": 9999}, {"max_tokens": 200}, {"max_tokens": 5}, {})
    lines = b"\n".join(tools.line(str(n), f"question {n}", **more) for n, more in enumerate(limits))
    with tools.world() as world:
        estimate = measure(
            tools.source(lines), tools.job(), world, counter=lambda _: 100, exact=exact, max_model_len=256
        )
    # When it is measured, then what can't fit is refused, and an answer without a limit gets what is left
    assert estimate.reasons == {RowErrorCode.CONTEXT_LENGTH_EXCEEDED: refused}
    assert (estimate.rows, estimate.unique) == (4, 4 - refused)
    assert estimate.max_tokens == (5 + 256 - 108 if exact else 200 + 5 + 255)


def test_an_input_without_rows_is_counted_whole(tools: Any) -> None:
    with tools.world() as world:
        estimate = measure(tools.source(b"\n\n"), tools.job(), world)
    assert (estimate.rows, estimate.unique, estimate.exact) == (0, 0, True)


def test_what_a_template_adds_depends_on_whether_it_brings_a_system_message_of_its_own(tools: Any) -> None:
    template = TemplateTokens(alone=30, with_system=12, message=5)
    assert [template.of(roles.split()) for roles in ("user", "user assistant user", "system user", "system")] == [
        30, 40, 12, 7,
    ]  # fmt: skip
    lines = b"\n".join(tools.line(str(n), f"question {n}") for n in range(10))
    with tools.world() as world:
        estimate = measure(
            tools.source(lines), tools.job(), world, counter=lambda _: 100, exact=True, template=template
        )
    assert estimate.prompt_tokens == 10 * 130


@pytest.mark.parametrize(("billions", "gigabytes"), [(7, 14), (13, 26), (70, 140), (405, 810)])
def test_weights_in_16_bits(billions: int, gigabytes: int) -> None:
    assert ModelShape(billions * 10**9, 2).weight_bytes == gigabytes * 10**9


def test_a_mixture_computes_with_its_active_parameters_and_reads_more_with_each_sequence() -> None:
    # Given a mixture a tenth of whose parameters compute a token
    dense = ModelShape(30 * 10**9, 48 * 2 * 4 * 128)
    mixture = replace(dense, active_parameters=3 * 10**9)
    # Then a token is a tenth of the work, one sequence reads a tenth, two less than twice that, and many read all
    assert compute_seconds(mixture, HARDWARE["h100"], 1000) == pytest.approx(
        compute_seconds(dense, HARDWARE["h100"], 1000) / 10
    )
    assert [mixture.read_bytes(n) for n in (1, 2)] == pytest.approx([6e9, 6e9 + 0.9 * 6e9])
    assert mixture.read_bytes(500) == pytest.approx(dense.read_bytes(1)) == pytest.approx(60e9)
    # and it needs as much memory
    assert concurrent_sequences(mixture, HARDWARE["h100"], 100) == concurrent_sequences(dense, HARDWARE["h100"], 100)


def test_states_take_the_same_room_and_time_however_long_a_sequence_is() -> None:
    # Given a model of which a quarter of the layers attend, and the others have states of 75 MB
    keys = ModelShape(8 * 10**9, 12 * 2 * 2 * 256)
    states = replace(keys, state_bytes=75 * 10**6)
    # Then a sequence needs as much more room as 3052 tokens, and each step reads and writes it
    assert 75e6 / keys.kv_bytes_per_token == pytest.approx(3052, abs=1)
    more = [concurrent_sequences(states, HARDWARE["h100"], n) for n in (100, 1000)]
    assert more == pytest.approx([concurrent_sequences(keys, HARDWARE["h100"], n + 3052) for n in (100, 1000)], abs=1)
    extra = [read_seconds(states, HARDWARE["h100"], 8, n) - read_seconds(keys, HARDWARE["h100"], 8, n) for n in (1, 99)]
    assert extra == pytest.approx([8 * 150e6 / HARDWARE["h100"].bandwidth] * 2)


def test_known_numbers_of_a_70b_model() -> None:
    assert LLAMA_70B.kv_bytes_per_token * 4096 == pytest.approx(1.34e9, rel=0.01)
    assert read_seconds(LLAMA_70B, HARDWARE["h100"], 0, 0) == pytest.approx(0.042, rel=0.01)


def test_an_8b_model_on_an_h100() -> None:
    """Some 430,000 tokens of KV cache fit in memory with the weights; no run is faster than either bound."""
    assert concurrent_sequences(LLAMA_8B, HARDWARE["h100"], 1) == pytest.approx(427_000, rel=0.01)
    work = {"requests": 10_000, "prompt_tokens": 5e6, "computed_prompt_tokens": 5e6, "output_tokens": 5e6}
    least = bound(LLAMA_8B, HARDWARE["h100"], **work)
    arithmetic = 2 * LLAMA_8B.parameters * 1e7 / 989e12
    assert least.seconds >= arithmetic
    assert least.sequences is not None
    assert least.seconds >= 5e6 / least.sequences * LLAMA_8B.weight_bytes / 3.35e12
    assert least.cost is None, "no price is set"
    dear = bound(LLAMA_8B, HARDWARE["h100"], price_per_hour=36.0, **work)
    assert dear.cost == pytest.approx(dear.seconds / 100)


def test_what_does_not_fit_says_so() -> None:
    with pytest.raises(DoesNotFit, match=r"140\.0 GB.*quantize it or take larger hardware"):
        bound(LLAMA_70B, HARDWARE["h100"], requests=1, prompt_tokens=9, computed_prompt_tokens=9, output_tokens=9)


def test_time_and_cost_at_a_measured_rate() -> None:
    estimate = at_rate(3_600_000, 1000, 2.0)
    assert (estimate.seconds, estimate.cost) == (3600, 2.0)
    assert at_rate(10, 1, None).cost is None
    with pytest.raises(ValueError, match="above 0"):
        at_rate(10, 0, None)


def test_a_query_is_counted_once_and_not_with_each_document() -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text.split())

    documents = ["one", "two words", "two words"]
    body = parse_body(RERANK_URL, {"model": "m", "query": "a query of five words", "documents": documents})
    found = TokenEstimator(count, exact=True).prompt_tokens(body, 0)
    assert counted == ["a query of five words", "one", "two words"]
    assert found == (3 * (5 + 2) + (1 + 2) + 2 * (2 + 2), 11)
