"""Rows whose answers are judged: they are asked again at once, behind the same messages, and all tries count."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from schemas.jobs.checkpoints import FormerTry
from schemas.jobs.results import RowStatus
from schemas.requests.errors import RowErrorCode
from workers.model.loaded_model import LoadedModel
from workers.settings import WorkerSettings
from workers.shards.worker import ShardWorker

BLOCK_SIZE = 16
SCHEMA = {"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}}}, "required": ["n"]}


@pytest.fixture
def load(model_folder: Any) -> Callable[..., LoadedModel]:
    """Loads the tiny model with a KV cache of so many blocks."""

    def load(blocks: int | None = None) -> LoadedModel:
        config = EngineConfig(
            dtype="float32", max_model_len=256, cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=blocks),
            schedule=ScheduleConfig(max_num_seqs=4),
        )  # fmt: skip
        return LoadedModel.load(model_folder, name="tiny", config=config, digest="sha256:1")

    return load


def answer(
    model: LoadedModel, bodies: Sequence[Any], max_tries: int, check: Callable[[int, str], str | None] | None, kit: Any
) -> Any:
    """The sink of a worker that answered a shard of these bodies, with a checkpoint after each step."""
    sink, clock = kit.MemorySink(), kit.FakeClock()
    work = kit.make_work(bodies, job=kit.make_job(max_tries=max_tries))
    settings = WorkerSettings(checkpoint_seconds=0, check=check)
    ShardWorker(model, kit.ListSource([work]), sink, clock, settings, helper=kit.InlineExecutor()).run()
    return sink


def former_tries(sink: Any) -> dict[int, tuple[FormerTry, ...]]:
    """The logged tries of each row that was asked again."""
    found: dict[int, tuple[FormerTry, ...]] = {}
    for checkpoint in sink.checkpoints[1]:
        for choice in checkpoint.running:
            if len(choice.tries) > len(found.get(choice.row, ())):
                found[choice.row] = choice.tries
    return found


@pytest.mark.slow
def test_given_answers_that_are_not_accepted_when_asked_again_then_all_tries_count(
    load: Callable[..., LoadedModel], kit: Any
) -> None:
    # Given rows of which every third is accepted at once, every third at its second try, and the others never
    asked = Counter[int]()

    def check(row: int, _text: str) -> str | None:
        asked[row] += 1
        return None if row % 3 < 2 and asked[row] > row % 3 else f"no {asked[row]}"

    bodies = [kit.chat(f"tell me {row}", max_tokens=4, temperature=0.9, seed=row) for row in range(9)]
    sink = answer(load(), bodies, 3, check, kit)

    rows, tries = sink.rows, former_tries(sink)
    assert [rows[row].tries for row in range(9)] == [1, 2, 3] * 3
    for row, result in rows.items():
        former = tries.get(row, ())
        assert [one.error for one in former] == [f"no {number + 1}" for number in range(row % 3)]
        last = result.prompt_tokens - sum(one.usage.prompt for one in former)
        assert last > max((one.usage.prompt for one in former), default=0), "the conversation gets longer"
        if row % 3 == 2:
            assert (result.status, result.error_code) == (RowStatus.FAILED, RowErrorCode.INVALID_ANSWER)
            assert result.error_message == f"line {row + 1} of the input: no 3"
            assert (result.text, result.finish_reason) == (None, "length")
        else:
            usage = json.loads(result.response)["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
                result.prompt_tokens, result.completion_tokens,
            )  # fmt: skip
            assert usage["prompt_tokens_details"]["cached_tokens"] == result.cached_tokens
    assert sum(row.completion_tokens for row in rows.values()) == sink.usages[1].completion
    assert sum(row.prompt_tokens for row in rows.values()) == sink.usages[1].prompt
    assert sum(row.cached_tokens for row in rows.values()) == sink.usages[1].cached


@pytest.mark.slow
def test_given_a_small_cache_when_hundreds_of_rows_are_asked_again_then_their_prompts_are_in_it(
    load: Callable[..., LoadedModel], kit: Any
) -> None:
    chance, asked = random.Random(1), Counter[int]()
    bodies = [kit.chat("".join(chance.choices("abcdefgh ", k=60)), max_tokens=4, temperature=0) for _ in range(200)]

    def check(row: int, _text: str) -> str | None:
        asked[row] += 1
        return None if asked[row] > row % 3 else "no"

    sink = answer(load(34), bodies, 3, check, kit)

    own = hits = 0
    for row, former in former_tries(sink).items():
        result, first = sink.rows[row], former[0].usage
        own += first.prompt // BLOCK_SIZE * BLOCK_SIZE * len(former)
        cached = [one.usage.cached for one in former[1:]]
        cached.append(result.cached_tokens - first.cached - sum(cached))
        hits += sum(min(tokens, first.prompt // BLOCK_SIZE * BLOCK_SIZE) for tokens in cached)
    assert hits >= 0.95 * own > 5_000, hits / own
    assert Counter(row.tries for row in sink.rows.values()) == {1: 67, 2: 67, 3: 66}


def test_given_copies_when_their_rows_are_judged_differently_then_each_has_its_own_outcome(
    load: Callable[..., LoadedModel], kit: Any
) -> None:
    sink = answer(
        load(), [kit.chat("one", max_tokens=3, temperature=0), 0], 2, lambda row, _: "no" if row else None, kit
    )

    first, copy = sink.rows[0], sink.rows[1]
    assert (first.status, first.tries, copy.status, copy.tries) == (RowStatus.SUCCEEDED, 2, RowStatus.FAILED, 2)
    assert first.prompt_tokens == copy.prompt_tokens == copy.cached_tokens
    assert sink.usages[1].prompt == first.prompt_tokens, "a copy costs nothing"


def test_given_a_check_that_raises_when_judging_then_the_row_fails_and_is_not_asked_again(
    load: Callable[..., LoadedModel], kit: Any
) -> None:
    def check(row: int, _text: str) -> str | None:
        return None if row == 1 else json.loads({}["missing"] if row else "{")  # type: ignore[no-any-return]

    with capture_logs() as logs:
        sink = answer(load(), [kit.chat(f"{row}", max_tokens=3) for row in range(4)], 3, check, kit)

    assert [(row.error_code, row.tries) for _, row in sorted(sink.rows.items())] == [
        (None, 1) if row == 1 else (RowErrorCode.INVALID_ANSWER, 1) for row in range(4)
    ]
    here = f"test_answer_tries.py:{check.__code__.co_firstlineno + 1}"
    assert f"its check failed with JSONDecodeError at {here}, so" in sink.rows[0].error_message
    found = [(log["error"], log["at"], log.get("reason"), log.get("rows")) for log in logs if "check" in log["event"]]
    assert sorted(found[:-1], key=str) == [
        ("JSONDecodeError", here, sink.rows[0].error_message.rpartition("accepted: ")[2], None),
        ("KeyError", here, "'missing'", None),
    ]
    assert found[-1] == ("KeyError", here, None, 2), "the others of a kind and place are counted"


@pytest.mark.slow
def test_given_no_room_for_another_try_when_judged_then_the_row_has_the_reason_of_the_first(
    load: Callable[..., LoadedModel], kit: Any
) -> None:
    sink = answer(load(), [kit.chat("a b " * 50, max_tokens=30)], 5, lambda *_: "never \udc80" + "x" * 9_000, kit)

    row = sink.rows[0]
    assert (row.error_code, row.tries) == (RowErrorCode.INVALID_ANSWER, 1)
    assert "never ?xxx" in row.error_message
    assert "(asked no more: " in row.error_message
    assert row.completion_tokens == sink.usages[1].completion > 0


@pytest.mark.slow
def test_given_forms_when_answers_are_cut_off_then_those_rows_alone_are_asked_again(
    load: Callable[..., LoadedModel], kit: Any
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    bodies = [
        kit.chat("one", max_tokens=3, response_format=form), kit.chat("two", max_tokens=3),
        kit.chat("three", max_tokens=3, response_format=form, n=2), kit.completion("four", max_tokens=3),
    ]  # fmt: skip
    sink = answer(load(), bodies, 2, None, kit)

    assert [sink.rows[row].tries for row in range(4)] == [2, 1, None, None]
    assert sink.rows[0].error_code == RowErrorCode.INCOMPLETE_ANSWER
    assert [sink.rows[row].status for row in range(1, 4)] == [RowStatus.SUCCEEDED] * 3
