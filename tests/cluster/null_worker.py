"""A worker whose model costs nothing and whose answers can be calculated; everything but the model is real.

    python -m tests.cluster.null_worker --model MODEL … [--root ROOT] [--step-ms MS] [--switch-after SECONDS]
                                        [--candidate] [--version NUMBER]

It is `tokenmill worker` with another loader: MODEL's own tokenizer, and an engine whose runner makes each token from
the whole prompt, the position and the previous token. A row with another row's tokens, or one that was resumed from a
wrong checkpoint, therefore differs from the text of `ExpectedAnswers`. Its pin differs from the real model's, so
neither takes the other's shards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig, ScheduleConfig
from engine.models.load import describe_model
from engine.plan import NO_TOKEN, RowState, StepOutput, StepPlan
from engine.runner.runner import StepRunner
from schemas.requests.parsing import CHAT_URL, COMPLETIONS_URL, ChatBody, CompletionBody, load_body
from schemas.settings.settings import Settings
from tokenmill.config.job_options import choose_model
from tokenmill.services import candidate_worker as candidates
from tokenmill.services import worker as working
from tokenmill.settings import read_settings
from workers.model.loaded_model import LoadedModel, model_digest, model_path
from workers.policies.policy import NO_POLICIES
from workers.text.tokenizer import TokenIds, Tokenizer
from workers.translation.prompts import encode
from workers.translation.requests import JobRules, ModelLimits, Translator

NUM_BLOCKS: Final = 16_384
"""Number of cache blocks, of 32 tokens each."""

FIRST_TOKEN: Final = 256
"""First ordinary token; special tokens and single bytes are below."""


def next_tokens(prompts: Any, last: Any, known: Any, vocab_size: int) -> Any:
    """The token at position `known`, behind `last`; `prompts` from `prompt_number`. Integers or int64 arrays."""
    return FIRST_TOKEN + (prompts * 1_000_003 + last * 31 + known * 7) % (vocab_size - FIRST_TOKEN)


def prompt_number(prompt: TokenIds) -> int:
    """What of a prompt (int32 [tokens]) goes into each token of its answer."""
    return zlib.crc32(np.ascontiguousarray(prompt, dtype="<i4").tobytes())


class PromptRunner:
    """Answers at once, or after `step_seconds`, with `next_tokens`. `meter`: int64 [2], see `open_meter`."""

    def __init__(
        self,
        rows: RowState,
        vocab_size: int,
        step_seconds: float = 0.0,
        meter: NDArray[np.int64] | None = None,
    ) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._meter = np.zeros(2, dtype=np.int64) if meter is None else meter
        self._prompts: NDArray[np.int64] = np.zeros(len(rows.num_known), dtype=np.int64)

    def execute(self, plan: StepPlan) -> StepOutput:
        """The step's tokens; no log-probabilities."""
        for row, request, _ in plan.new_rows:
            self._prompts[row] = prompt_number(request.prompt_token_ids)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        known = (plan.starts + plan.counts).astype(np.int64)
        last = self._rows.token_ids[plan.rows, known - 1].astype(np.int64)
        tokens = next_tokens(self._prompts[plan.rows], last, known, self._vocab_size)
        self._meter[:] = self._meter[0] + np.count_nonzero(plan.samples), len(plan.rows)
        token_ids = np.where(plan.samples, tokens, NO_TOKEN).astype(np.int32)
        return StepOutput(token_ids, np.zeros(len(plan.rows), dtype=np.bool_), {}, {}, {})


class ExpectedAnswers:
    """What null workers with this model answer, worked out from the requests alone."""

    def __init__(self, model: Path) -> None:
        path = model_path(model)
        spec = describe_model(path).spec
        self._tokenizer = Tokenizer.load(path)
        self._limits = ModelLimits(spec.max_position, spec.vocab_size, spec.eos_token_ids)
        self._translator = Translator(self._tokenizer, self._limits, JobRules())

    def texts(self, bodies: Sequence[Mapping[str, Any]]) -> list[str]:
        """The texts for bodies of chats or completions, which name max_tokens and no stop strings."""
        parsed = [_parsed(body) for body in bodies]
        prompts = [self._prompt(body) for body in parsed]
        answers = [self._ids(prompt, body.output_limit or 0) for prompt, body in zip(prompts, parsed, strict=True)]
        return self._tokenizer.decode_answers(prompts, answers)

    def _prompt(self, body: ChatBody | CompletionBody) -> TokenIds:
        inputs = [self._translator.prompts_of(body)]
        ((prompt,),) = encode(self._tokenizer, inputs, chat=isinstance(body, ChatBody))
        return prompt

    def _ids(self, prompt: TokenIds, tokens: int) -> list[int]:
        number, last, ids = prompt_number(prompt), int(prompt[-1]), list[int]()
        for known in range(len(prompt), len(prompt) + tokens):
            last = next_tokens(number, last, known, self._limits.vocab_size)
            ids.append(last)
        return ids


def _parsed(body: Mapping[str, Any]) -> ChatBody | CompletionBody:
    parsed = load_body(CHAT_URL if "messages" in body else COMPLETIONS_URL, json.dumps(body))
    assert isinstance(parsed, ChatBody | CompletionBody)
    assert parsed.output_limit is not None, "the request must name max_tokens"
    assert not parsed.stop, "stop strings are not worked out here"
    return parsed


def digest_of(model: Path, version: int = 0) -> str:
    """The digest of null workers with this model."""
    more = f"\0{version}" if version else ""
    return "sha256:" + hashlib.sha256(f"null\0{model_digest(model)}{more}".encode()).hexdigest()


def open_meter(folder: Path) -> NDArray[np.int64]:
    """Counts in a file of this process, which outlives it however it ends: the tokens that it sampled, and the rows of
    its last step."""
    return np.memmap(folder / f"{os.getpid()}-{time.time_ns()}.sampled", dtype=np.int64, mode="w+", shape=(2,))


def read_meters(folder: Path) -> int:
    """Tokens that all workers with this folder have sampled."""
    return sum(sampled for sampled, _ in _meters(folder))


def read_running(folder: Path) -> int:
    """Rows that all workers with this folder had in their last steps."""
    return sum(running for _, running in _meters(folder))


def _meters(folder: Path) -> Iterator[tuple[int, int]]:
    for path in folder.glob("*.sampled"):
        sampled, running = np.fromfile(path, dtype=np.int64)
        yield int(sampled), int(running)


def load_null(
    model: str,
    settings: Settings,
    schedule: ScheduleConfig,
    make_runner: Callable[[RowState, int], StepRunner] = PromptRunner,
    version: int = 0,
) -> LoadedModel:
    """The null worker's model for MODEL or NAME=MODEL."""
    chosen = choose_model(model, settings.model_cache)
    path = model_path(Path(chosen.source.path))
    loaded = LoadedModel.without_weights(
        path,
        name=chosen.name,
        config=EngineConfig(schedule=schedule),
        num_blocks=NUM_BLOCKS,
        digest=digest_of(path, version),
        make_runner=make_runner,
    )
    ends = [*loaded.limits.end_token_ids, loaded.tokenizer.eos_token_id or 0]
    if max(ends) >= FIRST_TOKEN:
        sys.exit(f"error: {path}: its end tokens {ends} could come up by chance; take a model that has them first")
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, action="append", help="MODEL or NAME=MODEL; may be repeated")
    parser.add_argument("--switch-after", type=float, default=60.0, help="seconds, as of tokenmill worker")
    parser.add_argument("--root", default=None, help="default: TOKENMILL_ROOT")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--step-ms", type=float, default=0.0, help="that a step takes at least")
    parser.add_argument("--candidate", action="store_true", help="as of tokenmill worker")
    parser.add_argument("--version", type=int, default=0, help="of the model: each has another digest, and one answer")
    parser.add_argument("--meters", type=Path, default=None, help="a folder for counts: tokens sampled, rows")
    args = parser.parse_args()
    meter = None if args.meters is None else open_meter(args.meters)
    settings = read_settings()

    schedule = ScheduleConfig(args.max_num_seqs, args.max_num_batched_tokens)
    runner = partial(PromptRunner, step_seconds=args.step_ms / 1000, meter=meter)
    loads = [partial(load_null, model, settings, schedule, runner, args.version) for model in args.model]
    if args.candidate:
        candidates.run_candidate(args.root, settings, loads[0], args.switch_after, NO_POLICIES)
    else:
        working.run_worker(args.root, settings, loads, args.switch_after)


if __name__ == "__main__":
    main()
