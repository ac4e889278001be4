"""Thoughts through vLLM: budgets are kept, and forms bind behind them, as with our engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from schemas.jobs.results import RowStatus
from tests.workers.structured import thinking_templates
from tests.workers.structured.test_structured_output import FORMAT, SCHEMA, results_of
from workers.model.loaded_model import LoadedModel

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"),
]

CONFIG = EngineConfig(
    dtype="float32", max_model_len=512, cache=CacheConfig(num_blocks=300), schedule=ScheduleConfig(max_num_seqs=16)
)


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny_models: Any, kit: Any) -> Iterator[LoadedModel]:
    folder: Path = tmp_path_factory.mktemp("vllm") / "tiny"
    tiny_models.make_tiny_model(
        "llama", folder, vocab_size=420, max_position_embeddings=1024, hidden_size=64, head_dim=32
    )
    tokenizer = kit.byte_level_tokenizer(thinking_templates.OPENED)
    if request.param:
        tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    loaded = LoadedModel.load(folder, name="tiny", config=CONFIG, engine_name="vllm")
    yield loaded
    loaded.close()


@pytest.mark.slow
def test_budgets_are_kept_and_forms_bind_behind_thoughts(model: LoadedModel, kit: Any) -> None:
    budgets = [0, 1, 3, 9, 20, 40]
    bodies = [kit.chat(f"{b}", seed=b, max_tokens=90, thinking_token_budget=b) for b in budgets]
    bodies += [
        kit.chat(f"{n}", seed=n, max_tokens=300, thinking_token_budget=5, response_format=FORMAT) for n in range(8)
    ]
    rows = results_of(kit, model, bodies)
    ended = 0
    for body, row in zip(bodies, rows, strict=True):
        if not model.tokenizer.reasoning_ids and body["thinking_token_budget"]:
            assert "plain text is not available with vLLM" in row.error_message
            continue
        assert row.status is RowStatus.SUCCEEDED, row.error_message
        usage = json.loads(row.response)["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] <= body["thinking_token_budget"]
        assert "</think>" not in row.text
        assert "</think>" not in (row.reasoning or "")
        assert row.text
        if "response_format" in body and row.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(row.text), SCHEMA)
    assert ended >= 4 or not model.tokenizer.reasoning_ids
