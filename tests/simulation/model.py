"""A model for the simulation: the real engine without weights, behind a real tokenizer of single letters and words.

Ids: specials, then one for each ASCII character, then words " w00" … " w59", of which the last one ends an answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine, EngineStats
from engine.models.base import ModelSpec
from engine.request import Completion, PartialChoice, Request
from schemas.job import ModelPin
from tests.simulation.machine import Process, ProcessClock
from tests.simulation.scenario import WORDS, Scenario
from workers.model_host import LoadedModel
from workers.tokenizer import Tokenizer
from workers.translate import ModelLimits

SPECIALS = ("<pad>", "<s>", "<end>", "<turn>")
FIRST_CHARACTER = len(SPECIALS)
FIRST_WORD = 256
VOCABULARY = FIRST_WORD + WORDS
END = VOCABULARY - 1
CONTEXT = 128
TEMPLATE = "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}<turn>assistant:"

PIN = ModelPin(name="tiny", source="tiny", digest="sha256:1", dtype="float32")


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level, without merges: each character is a token."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    as_written = {chr(code): chr(code) for code in range(33, 127)} | {" ": "Ġ", "\n": "Ċ"}
    vocabulary = {text: at for at, text in enumerate(SPECIALS)}
    for character, letter in as_written.items():
        assert letter in letters
        vocabulary[letter] = FIRST_CHARACTER + ord(character)
    vocabulary |= {f"Ġw{word:02d}": FIRST_WORD + word for word in range(WORDS)}
    rust = RustTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    hf: Any = PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="<end>", pad_token="<pad>", extra_special_tokens=["<turn>"]
    )
    hf.chat_template = TEMPLATE
    return Tokenizer(hf)


class SteppedEngine:
    """`TokenEngine` of one process: each step is a port call and takes its time."""

    def __init__(self, engine: Engine, process: Process, seconds: float) -> None:
        self._engine = engine
        self._process = process
        self._seconds = seconds

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def clock(self) -> Callable[[], float]:
        return self._engine.clock

    def add(self, request: Request) -> None:
        self._engine.add(request)
        resumed = sum(len(choice.token_ids) for choice in request.partial)
        self._process.machine.counters["tokens resumed"] += resumed

    def cancel(self, request_id: str) -> bool:
        return self._engine.cancel(request_id)

    def step(self) -> list[Completion]:
        self._process.point("engine.step")
        before = self._engine.stats().generated
        completions = self._engine.step()
        self._process.machine.counters["tokens sampled"] += self._engine.stats().generated - before
        self._process.sleep(self._seconds)
        return completions

    def partial(self, request: Request, given: Mapping[int, int] | None = None) -> tuple[PartialChoice, ...]:
        return self._engine.partial(request, given)

    def stats(self) -> EngineStats:
        return self._engine.stats()


def load(process: Process, scenario: Scenario) -> LoadedModel:
    """A model for one life of a worker."""
    spec = ModelSpec(
        architecture="null", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8,
        vocab_size=VOCABULARY, max_position=CONTEXT, windows=(None,), eos_token_ids=(END,), num_parameters=0,
        dtype=torch.float32,
    )  # fmt: skip
    config = EngineConfig(
        dtype="float32",
        max_model_len=CONTEXT,
        cache=CacheConfig(block_size=16),
        schedule=ScheduleConfig(max_num_seqs=scenario.max_num_seqs, max_num_batched_tokens=64),
    )
    clock = ProcessClock(process)
    engine = Engine.without_model(spec, config, num_blocks=6 * scenario.max_num_seqs + 9, clock=clock.monotonic)
    return LoadedModel(
        name=PIN.name,
        source=PIN.source,
        engine=SteppedEngine(engine, process, scenario.step_seconds),
        tokenizer=tokenizer(),
        limits=ModelLimits(engine.max_model_len, VOCABULARY, (END,)),
        dtype="float32",
        max_num_seqs=scenario.max_num_seqs,
        digest=PIN.digest,
    )
