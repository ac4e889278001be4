"""OpenAI's `service_tier`: which tier the worker gets, and what the response names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.gateway.inference.request_builder import InferenceSettings
from schemas.jobs.job import Tier
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HttpHarness]:
    caps = {Tier.INTERACTIVE: 20, Tier.BULK: 10}
    with run_http_harness(tmp_path, inference=InferenceSettings(caps=caps)) as harness:
        yield harness


def last_tier(harness: HttpHarness) -> Tier:
    return list(harness.worker.requests.values())[-1].tier


@pytest.mark.parametrize(
    ("given", "own", "tier", "named"),
    [
        ("priority", None, Tier.INTERACTIVE, "priority"),
        ("default", None, Tier.STANDARD, "default"),
        ("flex", None, Tier.BULK, "flex"),
        ("auto", None, Tier.INTERACTIVE, "priority"),
        ("auto", "bulk", Tier.BULK, "flex"),
        ("flex", "bulk", Tier.BULK, "flex"),
        (None, "standard", Tier.STANDARD, None),
        (None, None, Tier.INTERACTIVE, None),
    ],
)
@pytest.mark.slow
def test_the_tier_is_the_one_that_openai_means(
    harness: HttpHarness, given: Any, own: str | None, tier: Tier, named: str | None
) -> None:
    client = harness.client()
    extra = {"extra_body": {"tokenmill": {"tier": own}}} if own else {}
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "service_tier": given, **extra}
    answer = client.chat.completions.create(**asked)
    assert (last_tier(harness), answer.service_tier) == (tier, named)
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert last_tier(harness) is tier
    assert {chunk.service_tier for chunk in chunks} == {named}
    response = client.responses.create(model="tiny", input="hello", max_output_tokens=3, service_tier=given, **extra)
    assert (last_tier(harness), response.service_tier) == (tier, named)
    text = client.completions.create(
        model="tiny", prompt="a", max_tokens=3, extra_body={"service_tier": given, **extra.get("extra_body", {})}
    )
    assert last_tier(harness) is tier
    assert text.model_dump().get("service_tier") == named


@pytest.mark.slow
def test_the_events_of_a_responses_stream_name_it(harness: HttpHarness) -> None:
    events = harness.client().responses.create(
        model="tiny", input="hello", max_output_tokens=3, service_tier="flex", stream=True
    )
    whole = [event.response for event in events if hasattr(event, "response")]
    assert len(whole) == 3
    assert {response.service_tier for response in whole} == {"flex"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"service_tier": "flex", "tokenmill": {"tier": "interactive"}}, "tokenmill.tier is interactive; remove one"),
        ({"service_tier": "scale"}, "service_tier is 'scale', but must be one of auto, priority, default, flex"),
        ({"service_tier": ["flex"]}, "service_tier is no string"),
        ({"service_tier": "flex", "max_tokens": 11}, "the bulk tier allows at most 10"),
    ],
)
def test_a_wrong_value_is_refused_by_name(harness: HttpHarness, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        harness.client().chat.completions.create(model="tiny", messages=HELLO, extra_body=fields)
    assert refused.value.param in ("service_tier", "max_tokens")
    assert not harness.worker.requests
