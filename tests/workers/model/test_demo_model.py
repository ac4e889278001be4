"""The demo model, SmolLM2-135M-Instruct from its GGUF file: its tokenizer, and real answers through the worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from schemas.requests.parsing import ChatMessage
from schemas.settings.settings import load_settings
from tokenmill.models.sources import find
from workers.model.loaded_model import LoadedModel
from workers.shards.worker import ShardWorker
from workers.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo() -> Path:
    source = find("demo", load_settings().model_cache)
    if source is None:
        pytest.skip("NOT TESTED HERE: the demo model, which is not in the cache: tokenmill models pull demo")
    return source.path


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.load(demo)


def test_its_template_and_special_tokens(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([ChatMessage(role="user", content="Hi")])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
    # <|im_start|> is 1 and <|im_end|> is 2, as in the model's own tokenizer.json
    assert [int(token) for token in ids if token in (1, 2)] == [1, 2, 1, 2, 1]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(ids).startswith(f"system\n{system}\nuser\nHi\nassistant")
    # completions get no BOS: the model was made without
    (plain,) = tokenizer.encode_batch(["Hi"], add_special_tokens=True)
    assert len(plain) == 1


def test_digits_are_split_off_before_blanks_join(tokenizer: Tokenizer) -> None:
    # Given blanks before numbers, when the GGUF file says that its merges were learnt with every digit cut off,
    # then two blanks are one token, as in the model's training, not one of their own and one for the number
    (ids,) = tokenizer.encode_batch(["x =  15"], add_special_tokens=False)
    assert [tokenizer.id_to_token(int(token)) for token in ids] == ["x", "Ġ=", "ĠĠ", "1", "5"]
    assert tokenizer.decode(ids) == "x =  15"


def test_it_answers(demo: Path, kit: Any) -> None:
    config = EngineConfig(cache=CacheConfig(num_blocks=200), schedule=ScheduleConfig(max_num_seqs=8))
    model = LoadedModel.load(demo, name="tiny", config=config)
    bodies = [
        kit.chat("What is the capital of France?", max_tokens=24, temperature=0),
        kit.completion("The capital of France is", max_tokens=6, temperature=0),
        kit.chat("Count from one to ten in words.", max_tokens=48, temperature=0, stop=["five", "Five"]),
        kit.chat("Say hello.", max_tokens=200, temperature=0, logprobs=True, top_logprobs=2),
        kit.chat("Write a poem", max_tokens=16, n=2, seed=1),
    ]
    work = kit.make_work(bodies, job=kit.make_job().model_copy(update={"models": (model.pin(),)}))
    sink = kit.MemorySink()
    ShardWorker(model, kit.ListSource([work]), sink, kit.FakeClock()).run()
    assert "Paris" in sink.rows[0].text
    assert "Paris" in sink.rows[1].text
    assert "ive" not in sink.rows[2].text
    assert sink.rows[3].finish_reason == "stop"
    content = json.loads(sink.rows[3].response)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == sink.rows[3].text
    first, second = json.loads(sink.rows[4].response)["choices"]
    assert first["message"]["content"] != second["message"]["content"]
