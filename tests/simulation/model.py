"""A model for the simulation: the real engine without weights, behind a real tokenizer of single letters and words.

Ids: specials, then one for each ASCII character, then words " w00" … " w59", of which the last one ends an answer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine, EngineStats
from engine.expert_load import ExpertLoad
from engine.models.base import ModelSpec
from engine.plan import CacheGroup, RowState, StepOutput, StepPlan
from engine.request import Completion, PartialChoice, Request
from engine.runner.null_runner import NullRunner
from engine.scheduler.latency import ClassStats
from engine.scheduler.slo_control import SloTerms
from schemas.models import ModelPin
from tests.simulation.machine import Process, ProcessClock
from tests.simulation.scenario import WORDS, Poison
from tests.simulation.watch import EngineWatch, row_of
from workers.model.loaded_model import LoadedModel
from workers.shards.isolation import PROBE
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import ModelLimits

SPECIALS = ("<pad>", "<s>", "<end>", "<turn>")
FIRST_CHARACTER = len(SPECIALS)
FIRST_WORD = 256
VOCABULARY = FIRST_WORD + WORDS
END = VOCABULARY - 1
CONTEXT = 128
TEMPLATE = "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}<turn>assistant:"

PIN = ModelPin(name="tiny", source="tiny", digest="sha256:1", dtype="float32")

FindPoison = Callable[[str], Poison | None]
"""What is poisonous of a request, by its id."""


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level, without merges: each character is a token."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    as_written = {chr(code): chr(code) for code in range(33, 127)} | {" ": "Ġ", "\n": "Ċ"}
    vocabulary = {text: at for at, text in enumerate(SPECIALS)}
    for character, letter in as_written.items():
        assert letter in alphabet
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


class FaultyRunner:
    """The null runner, whose steps fail or end the process on a fault or at a poison row.

    Args:
        poison: what a process that computes the request of this id meets, if the request is poison.
    """

    def __init__(self, rows: RowState, process: Process, poison: FindPoison, watch: EngineWatch) -> None:
        self._runner = NullRunner(rows, VOCABULARY)
        self._process = process
        self._poison = poison
        self._watch = watch
        self._requests: dict[int, Request] = {}

    def execute(self, plan: StepPlan) -> StepOutput:
        self._requests.update((slot, request) for slot, request, _ in plan.new_rows)
        ids = {slot: self._requests[slot].request_id for slot in plan.rows.tolist()}
        process = self._process
        if process.failing:
            process.failing -= 1
            self._fail(set(ids.values()), "the machine trips")
        at = (plan.starts + plan.counts).tolist()
        for slot, known, samples in zip(plan.rows.tolist(), at, plan.samples.tolist(), strict=True):
            poison = self._poison(ids[slot])
            token = known - len(self._requests[slot].prompt_token_ids) + 1
            if poison is not None and samples and token == poison.token:
                if poison.kills:
                    process.machine.poison(process, f"row {row_of(ids[slot])}")
                self._fail(set(ids.values()), f"row {row_of(ids[slot])} is poison")
        return self._runner.execute(plan)

    def _fail(self, requests: set[str], why: str) -> None:
        self._process.machine.counters["steps failed"] += 1
        self._watch.step_failed(requests, broken=math.isinf(self._process.failing))
        raise RuntimeError(why)


class SteppedEngine:
    """`StepEngine` of one process: each step is a port call and takes its time."""

    def __init__(self, engine: Engine, process: Process, seconds: float, watch: EngineWatch) -> None:
        self._engine = engine
        self._process = process
        self._seconds = seconds
        self._watch = watch

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

    def settle(self, *, more_to_come: bool) -> None:
        self._engine.settle(more_to_come=more_to_come)

    def set_drafting(self, *, enabled: bool) -> bool:
        return self._engine.set_drafting(enabled=enabled)

    def add(self, request: Request) -> None:
        self._engine.add(request)
        if request.request_id == PROBE:
            return
        self._watch.added(self._process, request)
        resumed = sum(len(choice.token_ids) for choice in request.partial)
        self._process.machine.counters["tokens resumed"] += resumed

    def cancel(self, request_id: str, choice: int | None = None) -> bool:
        self._watch.left(self._process, [request_id])
        return self._engine.cancel(request_id, choice)

    def step(self) -> list[Completion]:
        self._process.point("engine.step")
        self._process.machine.counters["steps alongside a second thread"] += len(self._process.threads) > 1
        before = self._engine.stats().generated
        completions = self._engine.step()
        probed = sum(done.generated_tokens for done in completions if done.request_id == PROBE)
        sampled = self._engine.stats().generated - before - probed
        self._process.machine.counters["tokens sampled"] += sampled
        self._watch.stepped(self._process, sampled)
        self._process.sleep(self._seconds)
        self._watch.left(self._process, [completion.request_id for completion in completions])
        return completions

    def take_ended(self) -> list[Completion]:
        completions = self._engine.take_ended()
        self._watch.left(self._process, [completion.request_id for completion in completions])
        return completions

    def partial(
        self, request: Request, given: Mapping[int, int] | None = None, only: Collection[int] | None = None
    ) -> tuple[PartialChoice, ...]:
        return self._engine.partial(request, given, only)

    def growing(self) -> Mapping[str, Collection[int]]:
        return self._engine.growing()

    def resumes(self, request: Request) -> bool:
        return self._engine.resumes(request)

    def close(self) -> None:
        self._engine.close()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def expert_load(self) -> ExpertLoad | None:
        return self._engine.expert_load()

    def set_slo_weights(self, weights: SloTerms) -> bool:
        return self._engine.set_slo_weights(weights)

    def classes(self) -> tuple[ClassStats, ...]:
        return self._engine.classes()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """How an engine is: rows in its running batch, and seconds that a step takes."""

    max_num_seqs: int
    step_seconds: float


def load(
    process: Process, facts: EngineFacts, poison: FindPoison, watch: EngineWatch, pin: ModelPin = PIN
) -> LoadedModel:
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
        schedule=ScheduleConfig(max_num_seqs=facts.max_num_seqs, max_num_batched_tokens=64),
    )
    clock = ProcessClock(process)
    num_blocks = 6 * facts.max_num_seqs + 9
    engine = Engine(
        config,
        spec,
        (CacheGroup((0,), None, num_blocks),),
        CONTEXT,
        lambda scheduler: FaultyRunner(scheduler.rows, process, poison, watch),
        clock.monotonic,
    )
    return LoadedModel(
        name=pin.name,
        source=pin.source,
        engine=SteppedEngine(engine, process, facts.step_seconds, watch),
        tokenizer=tokenizer(),
        limits=ModelLimits(engine.max_model_len, VOCABULARY, (END,)),
        dtype="float32",
        max_num_seqs=facts.max_num_seqs,
        digest=pin.digest,
    )
