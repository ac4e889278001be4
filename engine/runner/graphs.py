"""CUDA graphs: forward passes that are captured once and replayed, so that a launch costs the host one call.

A graph reads and writes fixed addresses. So each shape's tokens, positions and attention ranges have persistent
buffers. A step is padded to its shape on the host, before attention's ranges are built from it, and the buffers are
filled before every replay. All graphs share one memory pool, so the next replay overwrites the output of the last one:
hidden states are read (by kernels queued behind) before another step is launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.tiles import TokenTiles
from engine.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionStep,
    CapturableAttention,
    SharingAttention,
)
from engine.attention.reference import ReferenceAttention
from engine.config import EngineConfig
from engine.errors import EngineError, EngineLost, OutOfMemory
from engine.logs import get_logger
from engine.models.base import AdaptedModel, CausalModel
from engine.runner.buckets import GraphBuckets, GraphShape, padded
from engine.runner.device_memory import make_memory_release

logger = get_logger(__name__)

Replay = Callable[[], Tensor]
"""Computes from the buffers' present contents; always returns the same tensor, valid until another graph's replay."""


class Recorder(Protocol):
    """Captures the work of a device."""

    def record(self, run: Callable[[], Tensor]) -> Replay:
        """Capture `run`, which may not synchronise and reads no memory that is released later. It may be run more than
        once."""
        ...


class CudaRecorder:
    """CUDA graphs in one pool of memory, captured on one stream: cuBLAS keeps a workspace for each stream that it meets
    (32 MiB on Hopper), and the allocator blocks that no other stream can take."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], Tensor]) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and allocates the libraries' workspaces, which a capture may not do
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # CUDA calls of other threads meanwhile (loading another model, NCCL's watchdog) are not part of the capture,
        # and must not end it.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def make_recorder(device: torch.device) -> Recorder:
    """Return the recorder of a device.

    Raises:
        EngineError: the device does not support graphs.
    """
    if device.type != "cuda":
        raise EngineError(f"cuda_graphs needs a CUDA device, not {device.type}; leave it out")
    return CudaRecorder(device)


class Graphs:
    """The graphs of one model over one attention backend. They are recorded by `record`, each of `shapes` once.

    Args:
        model: its `forward` is captured; it may not synchronise with the device.
        attention: with persistent buffers for its ranges.
        buckets: the shapes.
        table_width: entries of a whole block table.
        recorder: of the device.

    Attributes:
        shapes: in the order in which they are recorded.
        has_computed: the forward pass that `record` was last called for was computed once, whether or not it could be
            captured then.

    Raises:
        OutOfMemory: the buffers do not fit in the memory that weights and cache leave.
    """

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        buckets: GraphBuckets,
        table_width: int,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self._sharing = attention if isinstance(attention, SharingAttention) and attention.can_share else None
        assert isinstance(attention, CapturableAttention), f"{attention.name} has no fixed places"
        self.shapes = tuple(buckets.shapes)
        self.has_computed = False
        self._model = model
        self._attention = attention
        self._buckets = buckets
        self._recorder = recorder
        max_tokens = self.shapes[0].tokens
        with _named_failure(self.shapes[0]):
            self._input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
            self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
            self._prepared = {shape: self._reserve(shape, table_width) for shape in self.shapes}
            places = model.num_places if isinstance(model, AdaptedModel) else 0
            reserve = partial(TokenTiles.reserve, max_loras=places, device=device)
            self._tiles = {shape: reserve(shape.tokens) for shape in self.shapes} if places else {}
        self._replays: dict[GraphShape, Replay] = {}

    def __len__(self) -> int:
        return len(self._replays)

    def record(self, shape: GraphShape) -> None:
        """Record the graph of one of `shapes`.

        Raises:
            EngineError: the forward pass can't be captured; the message names the shape.
            OutOfMemory: the graph does not fit in the memory that weights and cache leave.
        """
        prepared, tokens = self._prepared[shape], slice(shape.tokens)
        self.has_computed = False

        def run() -> Tensor:
            attend = AttentionStep(self._attention, prepared, adapters=self._tiles.get(shape))
            hidden = self._model.forward(self._input_ids[tokens], self._positions[tokens], attend, None)
            self.has_computed = True
            return hidden

        with _named_failure(shape):
            self._attention.refill(prepared, padded(_empty_batch(self._attention.num_groups), shape))
            self._replays[shape] = self._recorder.record(run)

    def pick(self, rows: int, num_tokens: int, num_decodes: int) -> GraphShape | None:
        """Return the shape for a step of these sizes (`num_decodes`: single-token rows); None: it uses no graph."""
        return self._buckets.pick(rows, num_tokens, num_decodes)

    def forward(
        self, shape: GraphShape, input_ids: Tensor, positions: Tensor, batch: AttentionBatch,
        adapters: NDArray[np.int32] | None = None,
    ) -> Tensor:  # fmt: skip
        """Run `CausalModel.forward` of a step for which `pick` returned this shape: hidden states [T, hidden_size],
        valid until the next step is launched.

        Args:
            input_ids, positions: int64 [T].
            adapters: int32 [T], as of `Attend`.
        """
        shared = None if self._sharing is None else self._sharing.find_shared(batch)
        if shared is not None:
            shape = self._buckets.sharing(shape)
        return self.replay(shape, input_ids, positions, batch, shared, adapters)

    def replay(
        self, shape: GraphShape, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, shared: Any | None,
        adapters: NDArray[np.int32] | None = None,
    ) -> Tensor:  # fmt: skip
        """Run `forward` by the graph of one of `shapes`.

        Args:
            shared: what `SharingAttention.find_shared` returned, for a shape that shares; else None.
        """
        count = len(input_ids)
        if shape.shared:
            assert self._sharing is not None
            self._sharing.refill_shared(self._prepared[shape], padded(batch, shape), shared)
        else:
            self._attention.refill(self._prepared[shape], padded(batch, shape))
        if (tiles := self._tiles.get(shape)) is not None:
            tiles.refill(adapters)
        self._input_ids[:count].copy_(input_ids)
        self._positions[:count].copy_(positions)
        self._input_ids[count : shape.tokens].zero_()
        self._positions[count : shape.tokens].zero_()
        return self._replays[shape]()[:count]

    def replay_chosen(
        self, number: int, input_ids: Tensor, positions: Tensor, batch: AttentionBatch,
        adapters: NDArray[np.int32] | None = None,
    ) -> Tensor:  # fmt: skip
        """Run `forward` by the graph of `shapes[number]`, which another rank has chosen for the step. Its own attention
        finds what is shared; where that is nothing, the graph reads nothing together."""
        shape = self.shapes[number]
        shared = self._sharing.find_shared(batch) if self._sharing is not None and shape.shared else None
        return self.replay(shape, input_ids, positions, batch, shared, adapters)

    def _reserve(self, shape: GraphShape, table_width: int) -> Any:
        sizes = shape.tokens, shape.sequences, shape.decodes, shape.mixed, table_width
        if shape.shared:
            assert self._sharing is not None
            return self._sharing.reserve_shared(*sizes)
        return self._attention.reserve(*sizes)


@contextmanager
def _named_failure(shape: GraphShape) -> Iterator[None]:
    """Context that makes failures those of `Graphs.record`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"no memory is left to record graphs of {shape.tokens} tokens; lower gpu_memory_utilization, "
            f"max_graph_tokens or max_num_seqs, or leave graphs out: {error}"
        ) from error
    except RuntimeError as error:
        raise EngineError(
            f"steps of {shape.tokens} tokens can't be recorded as a graph; leave graphs out with "
            f"cuda_graphs=false: {error}"
        ) from error


def may_capture(config: EngineConfig, model: CausalModel, device: torch.device) -> bool:
    """Whether the settings, the device and the model allow graphs, where attention does."""
    wanted = device.type == "cuda" if config.cuda_graphs is None else config.cuda_graphs
    return wanted and bool(getattr(model, "recordable", False))


def make_graphs(
    config: EngineConfig,
    model: CausalModel,
    attention: AttentionBackend,
    table_width: int,
    device: torch.device,
    make: Callable[..., Graphs] = Graphs,
) -> Graphs | None:
    """Capture the graphs of the settings; None: they are off, or optional and not supported.

    Args:
        make: with the arguments of `Graphs`.

    Raises:
        EngineError: they are required, but device, model or attention do not support them, or a capture failed.
        OutOfMemory: they are required and do not fit.
        ValueError: `max_graph_tokens` is below 1.
    """
    if config.graph_tokens < 1:
        raise ValueError(f"EngineConfig.max_graph_tokens is {config.graph_tokens}, but must be 1 or more")
    if config.cuda_graphs is False or (config.cuda_graphs is None and device.type != "cuda"):
        return None
    recorder, reason = make_recorder(device), None
    if not getattr(model, "recordable", False):
        reason = "the model's forward pass looks at its input on the host"
    elif not isinstance(attention, CapturableAttention):
        reason = f"attention {attention.name!r} has no fixed places for its ranges"
    elif device.type == "cuda" and ReferenceAttention.name in attention.name.split("+"):
        reason = f"attention {attention.name!r} reads its ranges on the host"
    if reason is not None:
        if config.cuda_graphs:
            raise EngineError(f"cuda_graphs is not available: {reason}; leave it out")
        logger.info("steps are launched without graphs", reason=reason)
        return None
    schedule = config.schedule
    can_share = isinstance(attention, SharingAttention) and attention.can_share
    buckets = GraphBuckets(schedule.rows, schedule.tokens, config.graph_tokens, shared=can_share)
    begun = time.perf_counter()
    graphs: Graphs | None = None
    try:
        graphs = make(model, attention, buckets, table_width, recorder, device)
        for shape in graphs.shapes:
            graphs.record(shape)
    except EngineLost:
        raise
    except EngineError as error:
        if config.cuda_graphs:
            raise
        graphs, reason = None, str(error)
    if graphs is None:  # the error, which refers to them, is gone as well
        make_memory_release(device)()
        logger.warning("steps are launched without graphs, which is slower", reason=reason)
        return None
    seconds, max_tokens = round(time.perf_counter() - begun, 2), graphs.shapes[0].tokens
    logger.info("graphs are recorded", graphs=len(graphs), max_tokens=max_tokens, seconds=seconds)
    return graphs


def _empty_batch(groups: int) -> AttentionBatch:
    """Return the batch of a step without sequences."""
    none: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
    table: NDArray[np.int32] = np.zeros((0, 1), dtype=np.int32)
    slots: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    return AttentionBatch(none, none, 0, (table,) * groups, (slots,) * groups)
