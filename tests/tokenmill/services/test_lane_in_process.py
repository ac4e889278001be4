"""The lane of `serve`: callers in the same process are answered by its worker, as `run` would answer them."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.client import answer
from schemas.workers.lane import EndEvent, ErrorEvent, LaneRequest, TokensEvent
from tests.waiting import HANG_SECONDS
from tokenmill.config.job_options import ChosenModel
from tokenmill.models.sources import ModelSource
from tokenmill.root import open_root
from tokenmill.services.backends import in_process_backends
from tokenmill.services.worker import WorkerService, load_any
from tokenmill.settings import read_settings
from workers.text.chat_options import OWN_CHAT


@pytest.mark.slow
def test_a_caller_in_the_process_gets_the_text_that_run_gives(
    folder: Path, model_folder: Path, chat: Any, write_lines: Any, tokenmill: Any, results: Any
) -> None:
    lines = [chat(f"r{n}", f"question {n}", max_tokens=12) for n in range(3)]
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1)
    assert tokenmill("run", write_lines(*lines), "--output", "alone", *engine).code == 0
    alone = [row["text"] for row in results(folder / "alone")]
    settings, stop, clock = read_settings(), threading.Event(), SystemClock()
    chosen = ChosenModel("tiny", ModelSource("tiny", model_folder, None, 0))
    load = partial(load_any, chosen, EngineConfig(dtype="float32", threads=1), OWN_CHAT)
    with open_root(str(folder / "root"), settings) as root:
        backends = in_process_backends(root, settings)
        worker = WorkerService(root, backends, [load], settings, 60.0)
        key = load().pin().key
        thread = threading.Thread(target=worker, args=(stop,))
        thread.start()
        for number, line in enumerate(lines):
            *tokens, last = answer(backends.lane, LaneRequest(f"r{number}", key, line["body"]), clock)
            assert isinstance(last, EndEvent)
            assert last.response["choices"][0]["message"]["content"] == alone[number]
            assert "".join(event.text for event in tokens if isinstance(event, TokensEvent)) == alone[number]
        capped = LaneRequest("much", key, {**lines[0]["body"], "max_tokens": 9_000})
        (refused,) = answer(backends.lane, capped, clock)
        assert isinstance(refused, ErrorEvent)
        assert "allows at most 8192" in refused.message, "the cap of the tier interactive"
        stop.set()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
