"""A model's sampling defaults over HTTP: what the worker gets, and what the answer store takes for the same."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.models.catalog import Catalog
from schemas.models import CatalogEntry
from schemas.requests.sampling_defaults import SamplingDefaults
from schemas.settings.answers import AnswerOptions
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.pipeline.made_jobs import PIN

DEFAULTS = SamplingDefaults(temperature=0.0, top_k=20, max_new_tokens=7)
HELLO: Any = [{"role": "user", "content": "hello"}]


def publish(harness: HttpHarness, defaults: SamplingDefaults | None) -> None:
    pin = PIN.model_copy(update={"sampling_defaults": defaults})
    now = harness.world.clock.now() + timedelta(seconds=1)
    Catalog(harness.world.store).publish(CatalogEntry(pin=pin, max_model_len=2_048, published_at=now))


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HttpHarness]:
    with run_http_harness(tmp_path, cache=AnswerOptions(always=True)) as harness:
        publish(harness, DEFAULTS)
        yield harness


@pytest.mark.slow
def test_a_request_gets_the_models_defaults_where_it_sets_none(harness: HttpHarness) -> None:
    client = harness.client()
    for fields in ({"max_tokens": 2}, {"max_tokens": 2, "temperature": 1.0, "seed": 3}):
        client.chat.completions.create(model="tiny", messages=HELLO, **fields)
    first, second = (request.body for request in harness.worker.requests.values())
    assert (first["temperature"], first["top_k"]) == (0.0, 20)
    assert (second.get("temperature", 1.0), second["top_k"]) == (1.0, 20)


@pytest.mark.slow
def test_a_response_is_cached_by_the_values_that_apply(harness: HttpHarness) -> None:
    client = harness.client()

    def ask(**fields: Any) -> bool:
        before = len(harness.worker.requests)
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, **fields)
        return len(harness.worker.requests) == before

    assert not ask()
    assert ask(), "the model's temperature is 0, so the answer is always the same"
    assert ask(temperature=0.0)
    assert not ask(temperature=1.0), "it is sampled"
    assert not ask(temperature=1.0)
