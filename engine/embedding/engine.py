"""An encoder behind the engine's own interface: requests in, one batch a step, pooled hidden states out.

A text is computed in one step, batched with others of about its length; no state remains between steps, so there is no
cache, and no request is ever partially computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.adapters.places import AdapterPlaces
from engine.checkpoints.config import folder_config
from engine.config import EngineConfig
from engine.embedding.waiting import WaitingPrompts
from engine.engine import EngineStats, resolve_device, resolve_model_dtype
from engine.errors import ContextLengthExceeded, EngineError, RequestRefused, UnsupportedModel
from engine.models.base import ModelSpec
from engine.models.encoders.encoder import load_encoder
from engine.models.encoders.settings import is_classifier, required_settings
from engine.request import (
    Choice,
    Completion,
    FinishReason,
    PartialChoice,
    Pooling,
    Request,
    as_token_ids,
    check_request,
)
from engine.scheduler.latency import ClassStats, LatencyHistogram
from engine.scheduler.sequence import CLASSES, class_of
from engine.scheduler.slo_control import SloTerms

WAITING_PROMPTS: Final = 1024
"""Recommended number of waiting requests: among so many, those of similar length fill a batch."""

_NO_TOKENS: Final = as_token_ids([])


class PoolingModel(Protocol):
    """Computes a batch (implemented by `Encoder`)."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def num_token_types(self) -> int:
        """The texts of a pair that token types distinguish; 0: the model reads no token types."""
        ...

    def pool(
        self, prompts: list[NDArray[np.int32]], mode: Pooling, skips: list[int], types: list[NDArray[np.int32] | None]
    ) -> NDArray[np.float32]:
        """Pooled hidden states, float32 [prompts, hidden]; or the logits of labels, [prompts, labels]."""
        ...


class EncoderEngine:
    """One encoder. Only requests with the model's own pooling are accepted."""

    attention_name = "torch"
    max_num_seqs = WAITING_PROMPTS

    def __init__(
        self,
        config: EngineConfig,
        model: PoolingModel,
        pooling: Pooling,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.spec = model.spec
        self.max_model_len = min(config.max_model_len or model.spec.max_position, model.spec.max_position)
        self.clock = clock
        self.weight_bytes: Mapping[str, int] = {}
        self._model = model
        self._pooling = pooling
        self._waiting = WaitingPrompts()
        self._ended: list[Completion] = []
        self._steps = self._step_rows = self._computed = 0
        self._step_times = LatencyHistogram()
        self._arrived: dict[str, float] = {}
        self._whole = [LatencyHistogram() for _ in range(CLASSES)]

    @classmethod
    def load(cls, path: str | Path, config: EngineConfig | None = None) -> EncoderEngine:
        """Load an encoder from a Hugging Face folder with safetensors and pooling settings, or a classifier's head.

        Raises:
            ModelNotFound, CorruptWeights: as `load_encoder`.
            UnsupportedModel, OutOfMemory: likewise; or there are no pooling settings, or the config wants what encoders
                don't do.
        """
        path, config = Path(path), config or EngineConfig()
        check_encoder_config(config)
        pooling = "classify" if is_classifier(path) else required_settings(path).pooling
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = resolve_device(config.device)
        dtype = resolve_model_dtype(path, config.dtype, device)
        return cls(config, load_encoder(path, folder_config(path), dtype, device), pooling)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextLengthExceeded: the prompt is longer than the model's positions.
            RequestRefused: the id is in use, the prompt is empty or leaves the vocabulary, or the request needs more
                than the model's pooling.
        """
        if request.pooling != self._pooling:
            raise RequestRefused(f"an encoder generates nothing; it pools its hidden states ({self._pooling})")
        check_request(request)
        AdapterPlaces().check(request.adapter)
        ids, size = request.prompt_token_ids, self.spec.vocab_size
        if ((ids < 0) | (ids >= size)).any():
            raise RequestRefused(f"the prompt leaves the vocabulary of {size}")
        self._check_types(request)
        if len(ids) > self.max_model_len:
            raise ContextLengthExceeded(len(ids), 0, self.max_model_len)
        if request.request_id in self._waiting:
            raise RequestRefused(f"request {request.request_id!r} is already running; use another request_id")
        self._waiting.add(request)
        self._arrived[request.request_id] = self.clock()

    def _check_types(self, request: Request) -> None:
        most, types = self._model.num_token_types, request.token_type_ids
        if not most or types is None:
            return
        if types.shape != request.prompt_token_ids.shape:
            raise RequestRefused(f"{types.size} token types are given for {len(request.prompt_token_ids)} tokens")
        if ((types < 0) | (types >= most)).any():
            raise RequestRefused(f"token type {types.max()} is given, but the model has {most}")

    def settle(self, *, more_to_come: bool) -> None:
        """Do nothing: the order of batches does not depend on it."""

    def set_drafting(self, *, enabled: bool) -> bool:
        """Return True: an encoder drafts nothing."""
        return True

    def cancel(self, request_id: str, choice: int | None = None) -> bool:
        """End a request, whatever the choice: it has one. Its completion, with reason "cancelled", comes with the next
        `step`. False: unknown id."""
        if request_id not in self._waiting:
            return False
        self._ended.append(self._end(self._waiting.remove(request_id), FinishReason.CANCELLED))
        return True

    def partial(
        self, request: Request, given: Mapping[int, int] | None = None, only: Collection[int] | None = None
    ) -> tuple[PartialChoice, ...]:
        """Return nothing: no request is ever partially computed."""
        return ()

    def growing(self) -> Mapping[str, Collection[int]]:
        """None, for the same reason."""
        return {}

    @property
    def has_work(self) -> bool:
        """Whether another `step` is due."""
        return bool(self._waiting or self._ended)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return 0

    def step(self) -> list[Completion]:
        """Compute one batch; returns the requests that ended with it, failed and cancelled ones included.

        Raises:
            EngineError: it could not be computed. Its requests have ended with reason "error" and the next call
                returns them; the engine is still usable.
        """
        begun, started = time.perf_counter(), self.clock()
        self._ended += [self._end(late, FinishReason.TIMEOUT) for late in self._waiting.take_late(started)]
        schedule = self.config.schedule
        batch = self._waiting.take(schedule.tokens, schedule.rows)
        if not batch:
            return self.take_ended()
        try:
            vectors = self._model.pool(
                [request.prompt_token_ids for request in batch],
                self._pooling,
                [request.pooling_skip for request in batch],
                [request.token_type_ids for request in batch],
            )
        except BaseException as error:
            reason = f"the step failed: {type(error).__name__}: {error}"
            self._ended += [self._end(request, FinishReason.ERROR, started, error=reason) for request in batch]
            if not isinstance(error, Exception):
                raise  # an interrupt of the whole process, not a failure of the step
            raise EngineError(reason) from error
        for request, vector in zip(batch, vectors, strict=True):
            if np.isfinite(vector).all():
                self._ended.append(self._end(request, FinishReason.LENGTH, started, pooled=vector))
            else:
                why = "the model gave numbers that are not finite"
                self._ended.append(self._end(request, FinishReason.ERROR, started, error=why))
        self._steps += 1
        self._computed += sum(len(request.prompt_token_ids) for request in batch)
        self._step_rows += len(batch)
        self._step_times.add(time.perf_counter() - begun)
        return self.take_ended()

    def resumes(self, request: Request) -> bool:
        """Return True: there are no tokens to go on from."""
        return True

    def close(self) -> None:
        """Do nothing: memory is released when the engine is dropped."""

    def take_ended(self) -> list[Completion]:
        """Take the requests that ended outside a successful step."""
        ended, self._ended = self._ended, []
        return ended

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        started: float | None = None,
        *,
        pooled: NDArray[np.float32] | None = None,
        error: str | None = None,
    ) -> Completion:
        now = self.clock()
        arrived = self._arrived.pop(request.request_id)
        if reason is FinishReason.LENGTH:
            self._whole[class_of(request.priority)].add(now - arrived)
        return Completion(
            request_id=request.request_id,
            choices=(Choice(0, _NO_TOKENS, reason),),
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=0,
            generated_tokens=0,
            started_at=now if started is None else started,
            finished_at=now,
            error=error,
            pooled=pooled,
        )

    def stats(self) -> EngineStats:
        """Counters since the engine was made; an encoder has no blocks, and generates nothing."""
        return EngineStats(
            computed=self._computed,
            prompt=self._computed,
            recomputed=0,
            cached=0,
            generated=0,
            steps=self._steps,
            step_rows=self._step_rows,
            step_times=self._step_times.counts,
            preemptions=0,
            running=0,
            waiting=len(self._waiting),
            free_blocks=0,
            total_blocks=0,
        )

    def expert_load(self) -> None:
        """See `StepEngine.expert_load`: experts are not counted."""

    def set_slo_weights(self, weights: SloTerms) -> bool:
        """See `StepEngine.set_slo_weights`: there is no such control."""
        return False

    def classes(self) -> tuple[ClassStats, ...]:
        """Latency statistics of each class, the most urgent first. An encoder has no token latencies, and nothing runs
        between two steps."""
        waiting = self._waiting.by_class()
        return tuple(ClassStats(0, n, whole=whole.counts) for n, whole in zip(waiting, self._whole, strict=True))


def check_encoder_config(config: EngineConfig) -> None:
    """Check that an encoder supports the settings.

    Raises:
        UnsupportedModel: names the one that it does not support.
    """
    if config.num_ranks != 1 or config.micro_batches is not None:
        raise UnsupportedModel(
            "an encoder can't be shared by several devices; leave tensor and pipeline parallelism out"
        )
    if config.expert_parallel or config.expert_counts is not None:
        raise UnsupportedModel("an encoder has no experts to distribute over ranks; leave expert parallelism out")
    if config.quantize not in ("none", "dense"):
        raise UnsupportedModel(f"quantize {config.quantize} is not supported for encoders; leave it out")
    if config.kv_dtype != "auto":
        raise UnsupportedModel(
            f"kv_dtype {config.kv_dtype} means nothing to an encoder, which has no cache; leave it out"
        )
    if config.lora.adapters:
        raise UnsupportedModel("adapters are not supported for encoders; merge the adapter into the model")
    if config.cache.memory_bytes is not None:
        raise UnsupportedModel("an encoder has no KV cache that memory could be set aside for; leave that out")
    if options := config.cache.second_tiers:
        raise UnsupportedModel(f"an encoder has no KV cache that a second tier could hold; leave {options} out")
    if config.speculation.method in ("ngram", "draft", "eagle3"):
        raise UnsupportedModel("an encoder generates nothing, so nothing can be drafted; leave speculate out")
