"""Fixtures of workers with content policies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.policies.worker_harness import CONFIG
from tests.workers.structured import tool_templates
from workers.model.loaded_model import LoadedModel
from workers.text.chat_options import ChatOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_models: Any, kit: Any) -> LoadedModel:
    folder = tmp_path_factory.mktemp("judged") / "tiny"
    tiny_models.make_tiny_model("llama", folder, vocab_size=420, max_position_embeddings=2048)
    kit.byte_level_tokenizer().save_pretrained(folder)
    return LoadedModel.load(folder, name="tiny", config=CONFIG, chat=ChatOptions(tool_templates.HERMES))


@pytest.fixture(autouse=True)
def _end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.lane.server._TAKE_SECONDS", 0.02)
