"""The leader rank: the model and attention of an engine with several ranks.

Both have the interface of a single process. The runner's prepared batch is sent with each forward pass, so the layers
above are independent of ranks: one scheduler decides, and one sampler draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.adapter import Adapter
from engine.adapters.loader import AdapterLoader, load_adapters
from engine.adapters.targets import Product
from engine.adapters.tiles import TokenTiles
from engine.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionStep,
    KVLayout,
    default_block_size,
    make_backend,
)
from engine.attention.native import NativeAttention
from engine.config import CacheConfig, EngineConfig
from engine.errors import EngineError, EngineLost, OutOfMemory
from engine.expert_load import ExpertLoad
from engine.logs import get_logger
from engine.models.base import Attend, LayerCache, ModelSpec, PackedAdapter
from engine.models.decoder import DecoderSpec
from engine.parallel.adapters import SharedAdapter
from engine.parallel.decoder import RankDecoder
from engine.parallel.expert_placement import read_expert_counts
from engine.parallel.loading import load_share, resident_bytes
from engine.parallel.messages import (
    AddPlaces,
    Answer,
    CopyBlocks,
    DropGraphs,
    Failed,
    Forward,
    Loaded,
    LoadShare,
    Logits,
    MakeCache,
    MakeGraphs,
    Measure,
    MeasuredMemory,
    PlaceAdapter,
    RecordGraph,
    ZeroBlocks,
)
from engine.parallel.pipeline import divide_step, held_groups, plan_stages
from engine.parallel.rank_group import RankGroupProcesses
from engine.plan import BlockCopy, CacheGroup, RowState, StepOutput, StepPlan
from engine.runner.buckets import GraphBuckets, GraphShape
from engine.runner.device_memory import MemoryUse, cache_budget, choose_for_device, measure
from engine.runner.graphs import Graphs, Recorder, make_graphs
from engine.runner.memory import available_bytes
from engine.runner.runner import ModelRunner, SubmittedStep
from engine.runner.step_size import fit_step_size

logger = get_logger(__name__)


class LeaderAttention:
    """The leader's attention over its shard of the cache; the other ranks do the same.

    `inner` prepares and attends micro-batches (`RankDecoder.forward_step`), so nothing is prepared for a whole step.
    """

    def __init__(self, inner: AttentionBackend, rank_group: RankGroupProcesses) -> None:
        self.name = inner.name
        self.inner = inner
        self._rank_group = rank_group

    def prepare(self, batch: AttentionBatch) -> None:
        """Prepare nothing: a step's batch is divided first."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, step: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend.attend`; of the leader's heads, and of a micro-batch that `inner` has prepared."""
        return self.inner.attend(layer, q, k, v, scale, step, sinks)

    def block_tensors(self, group: int) -> list[Tensor]:
        """See `AttentionBackend.block_tensors`; of the leader's shard."""
        return self.inner.block_tensors(group)

    def layer_cache(self, layer: int, step: Any) -> LayerCache | None:
        """See `AttentionBackend.layer_cache`; as `attend`."""
        return self.inner.layer_cache(layer, step)

    def zero(self, group: int, blocks: list[int]) -> None:
        """See `AttentionBackend.zero`."""
        with self._rank_group.collective():
            self._rank_group.send(ZeroBlocks(group, blocks))
            self.inner.zero(group, blocks)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        """See `AttentionBackend.copy`."""
        with self._rank_group.collective():
            self._rank_group.send(CopyBlocks(group, list(copies)))
            self.inner.copy(group, copies)


class LeaderModel:
    """A `CausalModel` that all ranks compute.

    Args:
        divide: divides a step into micro-batches, as `divide_step`.

    Attributes:
        own: the leader's part.
        resident: bytes of memory that loading took on each rank, without mapped files.
    """

    def __init__(
        self,
        model: RankDecoder,
        rank_group: RankGroupProcesses,
        spec: ModelSpec,
        resident: list[int],
        divide: Callable[[AttentionBatch], NDArray[np.int32]],
    ) -> None:
        self.resident = resident
        self.own = model
        self._rank_group = rank_group
        self._spec = spec
        self._divide = divide

    @property
    def spec(self) -> ModelSpec:
        """The whole model's."""
        return self._spec

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rope_lengths: Tensor | None) -> Tensor:
        """See `CausalModel.forward`."""
        assert isinstance(attend, AttentionStep), "ranks attend by steps"
        assert isinstance(attend.backend, LeaderAttention), "the other ranks have a part of the cache"
        assert attend.batch is not None, "the other ranks prepare it, too"
        assert not isinstance(attend.adapters, TokenTiles), "a step that is recorded is each rank's own"
        batch, ends = attend.batch, self._divide(attend.batch)
        inputs = (input_ids, positions) if rope_lengths is None else (input_ids, positions, rope_lengths)
        with self._rank_group.collective():
            self._rank_group.send(Forward(batch, rope_lengths is not None, ends, adapters=attend.adapters))
            self._rank_group.groups.whole.broadcast(torch.stack(inputs))
            return self.own.forward_step(
                input_ids, positions, rope_lengths, batch, ends, attend.backend.inner, attend.adapters
            )

    @property
    def decoder_spec(self) -> DecoderSpec:
        """See `AdaptedModel.decoder_spec`."""
        return self.own.decoder_spec

    @property
    def num_places(self) -> int:
        """See `AdaptedModel.num_places`."""
        return self.own.num_places

    def add_places(self, max_loras: int, max_ranks: Mapping[Product, int]) -> None:
        """See `AdaptedModel.add_places`; on all ranks."""
        with self._rank_group.collective():
            self._rank_group.send(AddPlaces(max_loras, max_ranks))
            self.own.add_places(max_loras, max_ranks)

    def pack_adapter(self, adapter: Adapter) -> SharedAdapter:
        """See `AdaptedModel.pack_adapter`; of the leader's shard. Raises as `shard_adapter`, too."""
        return SharedAdapter(adapter, self.own.pack_adapter(adapter))

    def place_adapter(self, place: int, adapter: PackedAdapter | None) -> None:
        """See `AdaptedModel.place_adapter`; the other ranks read their shards."""
        assert adapter is None or isinstance(adapter, SharedAdapter)
        with self._rank_group.collective():
            if adapter is None:
                self._rank_group.send(PlaceAdapter(place, None, b""))
            else:
                of = adapter.adapter
                self._rank_group.send(PlaceAdapter(place, of.folder.absolute(), of.digest))
            self.own.place_adapter(place, None if adapter is None else adapter.own)

    def expert_load(self) -> ExpertLoad | None:
        """See `RoutedModel.expert_load`."""
        return self.own.expert_load()

    def reset_expert_load(self) -> None:
        """See `RoutedModel.reset_expert_load`: the leader's counts are of all ranks' experts."""
        self.own.reset_expert_load()

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalModel.logits`."""
        if not len(hidden):
            return torch.empty(0, self._spec.vocab_size, device=hidden.device)
        hidden = hidden.contiguous()
        with self._rank_group.collective():
            self._rank_group.send(Logits(len(hidden)), to_own_stage=True)
            return self.own.logits(self._rank_group.groups.stage.broadcast(hidden))


class LeaderGraphs(Graphs):
    """Graphs that all ranks have: each of its own part of the model, with the sums over the ranks.

    The leader chooses the graph of each step, so that all ranks pad it to the same size. Where one rank has no graphs,
    none has.

    Raises:
        EngineError: a rank has no graphs; the others have released theirs.
        EngineLost: a rank failed while the others computed with it.
    """

    def __init__(
        self,
        rank_group: RankGroupProcesses,
        model: RankDecoder,
        attention: AttentionBackend,
        buckets: GraphBuckets,
        table_width: int,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self._rank_group = rank_group
        rank_group.send(MakeGraphs(buckets, table_width))
        with self._all_or_none():
            try:
                super().__init__(model, attention, buckets, table_width, recorder, device)
            finally:
                answers = rank_group.receive_all()
            _check(answers)
        self._numbers = {shape: number for number, shape in enumerate(self.shapes)}

    def record(self, shape: GraphShape) -> None:
        """See `Graphs.record`."""
        failure: EngineError | None = None
        with self._all_or_none():
            with self._rank_group.collective():
                self._rank_group.send(RecordGraph(self._numbers[shape]))
                try:
                    super().record(shape)
                except EngineError as error:
                    if not self.has_computed:  # so the other ranks wait for the leader's part
                        raise
                    failure = error
            answers = self._rank_group.receive_all()
            if failure is not None:
                raise failure
            _check(answers)

    def replay(
        self, shape: GraphShape, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, shared: Any | None,
        adapters: NDArray[np.int32] | None = None,
    ) -> Tensor:  # fmt: skip
        """See `Graphs.replay`."""
        with self._rank_group.collective():
            ends = np.array([len(batch.starts)], dtype=np.int32)
            number = self._numbers[shape]
            self._rank_group.send(Forward(batch, lengths=False, ends=ends, graph=number, adapters=adapters))
            self._rank_group.groups.whole.broadcast(torch.stack((input_ids, positions)))
            return super().replay(shape, input_ids, positions, batch, shared, adapters)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Context that makes all ranks release their graphs when one has failed."""
        try:
            yield
        except EngineLost:
            raise
        except EngineError:
            self._rank_group.send(DropGraphs())
            raise


class LeaderRunner:
    """A runner whose results are valid only if all ranks completed the step."""

    def __init__(self, inner: ModelRunner, rank_group: RankGroupProcesses) -> None:
        self._inner = inner
        self._rank_group = rank_group

    @property
    def graph_steps(self) -> int:
        """Steps that replayed a graph."""
        return self._inner.graph_steps

    def execute(self, plan: StepPlan) -> StepOutput:
        """See `StepRunner.execute`. Raises `EngineLost` when a rank ended meanwhile."""
        output = self._inner.execute(plan)
        self._rank_group.check()
        return output

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """See `AheadRunner.submit`. The other ranks read sampled tokens from the leader's device, as it does itself."""
        return self._inner.submit(plan)

    def result(self, submitted: SubmittedStep) -> StepOutput:
        """See `AheadRunner.result`. Raises `EngineLost` when a rank ended meanwhile."""
        output = self._inner.result(submitted)
        self._rank_group.check()
        return output

    def close(self) -> None:
        """End the other ranks."""
        self._rank_group.close()


@dataclass(frozen=True, slots=True, eq=False)
class ParallelModel:
    """A model that is loaded on all ranks.

    Attributes:
        config: the settings, with the size of a step.  groups: of the allocated cache.
        limit: maximum tokens of a sequence.  device: the leader's.  rank_group: of the ranks.
        adapters: of the model; None: there are none.
    """

    model: LeaderModel
    attention: LeaderAttention
    config: EngineConfig
    groups: tuple[CacheGroup, ...]
    limit: int
    device: torch.device
    rank_group: RankGroupProcesses
    adapters: AdapterLoader | None

    def make_runner(self, rows: RowState) -> LeaderRunner:
        """Make the runner of its steps, with graphs where the settings say so.

        Raises:
            EngineError, OutOfMemory: as `make_graphs`.
        """
        graphs = None
        if self.rank_group.groups.num_stages == 1:
            make = partial(LeaderGraphs, self.rank_group)
            width = rows.block_tables[0].shape[1]
            graphs = make_graphs(self.config, self.model.own, self.attention.inner, width, self.device, make)
        runner = ModelRunner(
            self.model, self.attention, rows, max_num_seqs=self.config.schedule.rows, device=self.device,
            graphs=graphs, adapters=self.adapters,
        )  # fmt: skip
        return LeaderRunner(runner, self.rank_group)


def check_parallel(config: EngineConfig) -> None:
    """Check that several ranks support the settings.

    Raises:
        EngineError: names the one that they do not support.
    """
    several = f"tensor parallelism ({config.tensor_parallel} devices)"
    for name in ("tensor_parallel", "pipeline_parallel", "micro_batches"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise EngineError(f"{name} is {value}, but must be 1 or more")
    if config.pipeline_parallel > 1:
        several = f"pipeline parallelism ({config.pipeline_parallel} stages)"
        if config.expert_parallel:
            raise EngineError(f"expert_parallel doesn't run under {several}; leave --expert-parallel out")
        if config.cuda_graphs:
            raise EngineError(f"cuda_graphs doesn't run under {several}; leave TOKENMILL_GPU__CUDA_GRAPHS out")
        if config.max_graph_tokens is not None:
            raise EngineError(
                f"max_graph_tokens is set, but graphs don't run under {several}; leave TOKENMILL_GPU__MAX_GRAPH_TOKENS "
                "out"
            )
    elif config.micro_batches is not None:
        raise EngineError(
            "micro_batches is set, but pipeline_parallel is 1, so no other stage computes at the same time; give a "
            "--pipeline-parallel of 2 or more, or leave --micro-batches out"
        )
    if config.expert_parallel and config.tensor_parallel == 1:
        raise EngineError(
            "expert_parallel is set, but tensor_parallel is 1, so one rank holds all experts; give a --tensor-parallel "
            "of 2 or more, or leave --expert-parallel out"
        )
    if config.expert_counts is not None and not config.expert_parallel:
        raise EngineError("expert_counts is set, but expert_parallel is not, so no expert is placed; leave it out")
    for name, value in (("instruction_set", config.instruction_set), ("kv_dtype", config.kv_dtype)):
        if value != "auto":
            raise EngineError(
                f"{name} {value!r} is of the native kernels, which don't run under {several}; leave it out"
            )
    if options := config.cache.second_tiers:
        raise EngineError(f"a second tier of the prefix cache ({options}) doesn't run under {several}; leave it out")
    if not config.own_models:
        raise EngineError(f"transformers' code doesn't run under {several}; leave --engine transformers out")
    if config.attention == NativeAttention.name:
        raise EngineError(f"attention 'native' doesn't run under {several}; leave it out")
    if config.lora.adapters and (config.pipeline_parallel > 1 or config.expert_parallel):
        raise EngineError("adapters run on one device, or under tensor parallelism alone; leave other parallelism out")
    if config.lora.merge:
        raise EngineError(f"a merged adapter doesn't run under {several}; leave --merge-adapter out")
    if config.speculation.method in ("draft", "eagle3"):
        raise EngineError(
            f"speculate {config.speculation.method!r} doesn't run under {several}; use ngram, auto or off"
        )


def load_parallel(
    path: str | Path,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    rank_group: RankGroupProcesses | None = None,
) -> ParallelModel:
    """Load a model on as many ranks as the settings say, with its cache.

    Args:
        rank_group: running ranks; None: new ranks are started, and end with the model.

    Raises:
        EngineError: what `Engine.load` raises; and `EngineLost` when a rank ends meanwhile.
    """
    check_parallel(config)
    if device.type == "cpu":
        logger.warning(
            "several ranks compute with torch's operators, slower than the native kernels of one process",
            tensor_parallel=config.tensor_parallel, pipeline_parallel=config.pipeline_parallel,
        )  # fmt: skip
    path = Path(path).absolute()
    own = rank_group is None
    rank_group = rank_group or RankGroupProcesses(
        config.num_ranks, device, config.threads, config.rank_timeout_seconds, config.pipeline_parallel
    )
    stages = rank_group.groups.num_stages
    assert (rank_group.size, stages) == (config.num_ranks, config.pipeline_parallel), "the ranks were started for these"
    try:
        return _load(path, config, dtype, rank_group)
    except BaseException:
        if own:
            rank_group.close()
        raise


def _load(path: Path, config: EngineConfig, dtype: torch.dtype, rank_group: RankGroupProcesses) -> ParallelModel:
    own, loaded = _load_shares(path, config, dtype, rank_group)
    specs = own.stage_specs
    block_size = config.cache.block_size or default_block_size(config.attention)
    config = replace(config, cache=replace(config.cache, block_size=block_size))
    limit, device = own.whole.context(config.max_model_len), rank_group.groups.device
    stages = rank_group.groups.num_stages
    divide = partial(
        divide_step, count=config.micro_batches, num_stages=stages, block_size=block_size, device=device.type
    )
    model = LeaderModel(own, rank_group, own.whole, [one.resident for one in loaded], divide)
    adapters = load_adapters(config.lora, model)
    taken = 0 if adapters is None else adapters.resident_bytes
    available = [one.available - taken for one in loaded]

    def plan(config: EngineConfig) -> tuple[CacheGroup, ...]:
        cache = config.cache
        if device.type == "cuda" and cache.memory_bytes is None and cache.num_blocks is None:
            uses, shards = _measured(own, config, rank_group), rank_group.groups.stage.size
            caches = [_left_by(uses[first : first + shards], cache) for first in range(0, len(uses), shards)]
        else:
            caches = _of_each(cache, available, specs, rank_group)
        return plan_stages(own.whole, specs, caches, config.schedule, limit, device)

    if device.type == "cuda":
        largest = max(specs, key=lambda spec: spec.kv_elements)
        size = choose_for_device(
            config, largest, device, min(available), ranks=rank_group.size, num_stages=rank_group.groups.num_stages
        )
        config, groups = fit_step_size(config, size, plan)
    else:
        groups = plan(config)
    rank_group.send(MakeCache(groups, block_size, config.attention))
    try:
        layout = KVLayout.of(own.spec, held_groups(own.spec, groups), block_size)
        attention = make_backend(config.attention, layout, dtype, device)
    finally:
        answers = rank_group.receive_all()
    _check(answers)
    logger.info("ranks are loaded", ranks=rank_group.size, resident_mib=[size >> 20 for size in model.resident])
    leader = LeaderAttention(attention, rank_group)
    return ParallelModel(model, leader, config, groups, limit, device, rank_group, adapters)


def _load_shares(
    path: Path, config: EngineConfig, dtype: torch.dtype, rank_group: RankGroupProcesses
) -> tuple[RankDecoder, list[Loaded]]:
    """Load the leader's shard, and collect each rank's report of its own."""
    # Read once: ranks that read different counts would hold some experts twice, and others nowhere.
    counts = None if config.expert_counts is None else np.array(read_expert_counts(config.expert_counts))
    rank_group.send(LoadShare(path, dtype, config.quantize, config.max_model_len, config.expert_parallel, counts))
    before = resident_bytes()
    try:
        model = load_share(
            path, dtype, rank_group.groups, quantize=config.quantize, max_positions=config.max_model_len,
            expert_parallel=config.expert_parallel, expert_counts=counts,
        )  # fmt: skip
    finally:
        answers = rank_group.receive_all()  # ranks answer in any case: the next message must not read an old answer
    mine = Loaded(available_bytes(rank_group.groups.device), resident_bytes() - before)
    _check(answers)
    return model, [mine, *(answer for answer in answers if isinstance(answer, Loaded))]


def _measured(own: RankDecoder, config: EngineConfig, rank_group: RankGroupProcesses) -> list[MemoryUse]:
    """Measure the memory of the largest step on each rank's device; all ranks compute it collectively.

    Raises:
        EngineLost: a rank ran out of memory, and has ended with that.
    """
    with rank_group.collective():
        rank_group.send(Measure(config.schedule))
        mine = measure(own, config.schedule, rank_group.groups.device)
    answers = rank_group.receive_all()
    try:
        _check(answers)
    except OutOfMemory as error:
        raise EngineLost(str(error)) from error
    return [mine, *(answer.use for answer in answers if isinstance(answer, MeasuredMemory))]


def _left_by(uses: list[MemoryUse], cache: CacheConfig) -> CacheConfig:
    """Return the cache's settings for one rank of a stage on GPUs: all use the free memory of the rank with the least.

    Raises:
        OutOfMemory: it has none.
    """
    return replace(cache, memory_bytes=min(cache_budget(use, cache.gpu_memory_utilization) for use in uses))


def _of_each(
    cache: CacheConfig, available: list[int], specs: Sequence[ModelSpec], rank_group: RankGroupProcesses
) -> list[CacheConfig]:
    """Return the cache's settings for one rank of each stage. Configured bytes are the total of all ranks; else, on a
    CPU, they share the free memory of the rank with the least. Stages share it by what they store of a token."""
    total = int(min(available) * cache.memory_fraction) if cache.memory_bytes is None else cache.memory_bytes
    elements = rank_group.groups.stage.size * sum(spec.kv_elements for spec in specs)
    return [replace(cache, memory_bytes=total * spec.kv_elements // elements) for spec in specs]


def _check(answers: list[Answer]) -> None:
    for number, answer in enumerate(answers, start=1):
        if isinstance(answer, Failed):
            kind = OutOfMemory if "OutOfMemory" in answer.reason or "MemoryError" in answer.reason else EngineError
            raise kind(f"rank {number}: {answer.reason}")
