"""The step loop: schedule, compute, update; one model, one process, token ids in and out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from engine.adapters.loader import AdapterLoader, load_adapters
from engine.adapters.merged import AdapterMerger
from engine.attention import (
    AttentionBackend,
    KVLayout,
    choose_attention,
    log_choice,
    make_backend,
    supports_fp8_cache,
)
from engine.block_exchange import BlockExchange
from engine.cache.block_tier import TierStats
from engine.config import EngineConfig, KVDType, SpeculationConfig
from engine.errors import EngineError, RequestRefused
from engine.expert_load import ExpertLoad
from engine.logs import get_logger
from engine.models.base import CausalModel, ModelSpec, RoutedModel, WeighedModel
from engine.models.decoder_builder import DecoderBuilder, TorchBuilder
from engine.models.load import config_kv_dtype, is_encoder, load_model
from engine.models.native import NativeBuilder
from engine.native.choice import native_library
from engine.native.library import NativeLibrary
from engine.native.shapes import ShapeTable
from engine.native.structs import ElementKind
from engine.parallel.leader import LeaderRunner, load_parallel
from engine.parallel.rank_group import RankGroupProcesses
from engine.plan import CacheGroup, RowState
from engine.quant.linear import fast_at_load
from engine.quant.rtn import AT_LOAD
from engine.request import Completion, PartialChoice, Request
from engine.runner.async_loop import StepLoop, make_health_check
from engine.runner.block_transfer import BlockTransfer
from engine.runner.collect import CompletionCollector
from engine.runner.device_memory import cache_budget, choose_for_device, make_memory_release, measure
from engine.runner.graphs import make_graphs, may_capture
from engine.runner.memory import available_bytes, plan_cache
from engine.runner.null_runner import NullRunner
from engine.runner.runner import AheadRunner, ModelRunner, StateReader, StepRunner
from engine.runner.second_tier import SecondTier, block_identity, check_second_tier, open_second_tier
from engine.runner.step_size import LAUNCH_SECONDS, fit_step_size
from engine.runner.warm_up import compile_launches
from engine.sampling.rows import check_params
from engine.scheduler.latency import ClassStats, LatencyCounts
from engine.scheduler.resume import ANSWERED
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import FinishedSequence
from engine.scheduler.slo_control import SloStats, SloTerms
from engine.speculative.base import Proposer
from engine.speculative.draft_lengths import make_draft_lengths, resolve_max_drafts
from engine.speculative.proposers.draft_model import DraftProposerState, load_draft
from engine.speculative.proposers.eagle import HeadProposerState, load_eagle
from engine.speculative.proposers.ngram import NgramProposer
from engine.speculative.stats import SpeculationStats
from engine.speculative.trial_budget import TrialBudget
from engine.states import StateStorage

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was made. Tokens unless said otherwise.

    Attributes:
        computed: positions computed.  prompt: of them, those of prompts.  recomputed: of them, those computed before,
            ahead of a preemption.
        cached: known positions taken from the prefix cache instead.  queried: all positions looked up there.
        generated: sampled tokens, end tokens included.
        steps: steps run.  step_rows: sum of their rows.  step_times: duration of each of them.
        preemptions: preempted sequences.  running, waiting: sequences now.
        free_blocks, total_blocks: of all pools.
        speculation: counts of drafts and accepted drafts.
        slo: SLO statistics of class 0; None: it has no SLO.
        steps_ahead: steps planned before the results of the step before.  steps_awaited: steps whose results were
            needed before the next one could be planned, where steps are planned ahead.
        steps_recorded: steps that replayed a graph.
        steps_out_of_memory: steps that ran out of device memory; their sequences were computed again.
        tier, host_tier, imported: of the second tiers of the prefix cache on a disk, in host memory, and of blocks that
            were imported from other engines; None: there is none.
        adapter_loads: adapters read from their files, repeated ones included.
    """

    computed: int
    recomputed: int
    cached: int
    generated: int
    steps: int
    step_times: LatencyCounts
    preemptions: int
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    queried: int = 0
    prompt: int = 0
    step_rows: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    slo: SloStats | None = None
    steps_ahead: int = 0
    steps_not_ahead: int = 0
    steps_recorded: int = 0
    steps_out_of_memory: int = 0
    tier: TierStats | None = None
    host_tier: TierStats | None = None
    imported: TierStats | None = None
    adapter_loads: int = 0

    @property
    def step_seconds(self) -> float:
        """Sum of the steps' durations."""
        return self.step_times.seconds


def resolve_device(name: str) -> torch.device:
    """Return the device to run on; "auto" is a CUDA device where there is one, else the CPU.

    Raises:
        EngineError: the device is not there, or not supported.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise EngineError("device 'cuda' is not there: torch sees no CUDA device (or was built without CUDA); use cpu")
    if name not in ("auto", "cpu", "cuda"):
        raise EngineError(f"device {name!r} is not supported; use cpu or cuda")
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda and name != "cpu" else torch.device("cpu")


def gpu_uuids(config: EngineConfig) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs, or MIG instances, that a loaded engine with this configuration computes on, in the
    order of its ranks; on a CPU there are none. CUDA reports them, without a prefix, whatever made which devices
    visible in which order.

    Raises:
        EngineError: the device is not there, or not supported.
    """
    device = resolve_device(config.device)
    if device.type != "cuda":
        return ()
    ranks = range(config.num_ranks) if config.num_ranks > 1 else (device.index,)
    return tuple(str(torch.cuda.get_device_properties(rank).uuid) for rank in ranks)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in; "auto" is bfloat16 where the device multiplies it natively, else float32 on a CPU
    and float16 on a CUDA device."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    features = torch.cpu.get_capabilities()
    native = features.get("amx_bf16") or features.get("avx512_bf16")
    return torch.bfloat16 if native else torch.float32


def resolve_model_dtype(path: str | Path, name: str, device: torch.device) -> torch.dtype:
    """Return the dtype to compute the model at `path` in; "auto" is float32 for an encoder, else as `resolve_dtype`.
    Vectors are compared with others, perhaps with those of other programs, and encoders are small.

    Raises:
        ModelNotFound, UnsupportedModel: as `is_encoder`.
    """
    return resolve_dtype("float32" if name == "auto" and is_encoder(path) else name, device)


def decoder_builder(
    config: EngineConfig, native: NativeLibrary | None, dtype: torch.dtype, device: torch.device
) -> DecoderBuilder:
    """Return the builder of the decoder's parts: for the native kernels where they are used, else of torch's
    operators."""
    if native is None:
        if config.quantize in AT_LOAD and not fast_at_load(config.quantize, device):
            logger.warning("weights are dequantized at each product, which is slow", quantize=config.quantize)
        return TorchBuilder(config.quantize, dtype)
    return NativeBuilder(native, config.quantize, ShapeTable(native, dtype) if config.quantize == "int8" else None)


def plan_groups(
    config: EngineConfig,
    model: CausalModel,
    limit: int,
    device: torch.device,
    kv_dtype: KVDType,
    drafts: ModelSpec | None,
    *,
    native: bool,
    reserved_bytes: int = 0,
) -> tuple[EngineConfig, tuple[CacheGroup, ...]]:
    """Return the groups of the cache, and the settings with the size of a step that fits beside it.

    Args:
        limit: maximum tokens of a sequence.  drafts: of the model that drafts.  native: by the CPU's kernels.
        reserved_bytes: of host memory that something else will take.

    Raises:
        OutOfMemory: the cache does not fit.
    """

    def plan(config: EngineConfig) -> tuple[CacheGroup, ...]:
        cache = config.cache
        if device.type == "cuda" and cache.memory_bytes is None and cache.num_blocks is None:
            use = measure(model, config.schedule, device)
            cache = replace(cache, memory_bytes=cache_budget(use, cache.gpu_memory_utilization))
        elif reserved_bytes and cache.memory_bytes is None and cache.num_blocks is None:
            free = max(0, available_bytes(device) - reserved_bytes)
            cache = replace(cache, memory_bytes=int(free * cache.memory_fraction))
        return plan_cache(model.spec, cache, config.schedule, limit, device, kv_dtype, drafts, native=native)

    if device.type != "cuda":
        return config, plan(config)
    make_memory_release(device)()
    return fit_step_size(config, choose_for_device(config, model.spec, device, kv_dtype=kv_dtype), plan)


def _cache_dtype(config: EngineConfig, wanted: KVDType | None, native: bool, device: torch.device) -> KVDType:
    """Return the KV cache's dtype: the settings' one, else the checkpoint's (`wanted`), where a kernel supports it."""
    if config.kv_dtype != "auto" or wanted is None:
        return config.kv_dtype
    fp8 = not native and config.attention in ("auto", "triton") and device.type == "cuda" and supports_fp8_cache(device)
    if (wanted == "int8" and native) or (wanted == "fp8" and fp8):
        logger.info(f"the KV cache is {wanted}, as in the model's config", option="kv_dtype")
        return wanted
    logger.warning("the KV cache is not quantized as in the model's config: no kernel here supports it", wanted=wanted)
    return "auto"


class Engine:
    """Continuous batching over one model.

    Feed it with `add` and call `step` until `has_work` is false, or give `run` an iterable of requests.

    Attributes:
        adapters: names of the adapters that requests may name -> 16 bytes that identify them.
        merged_adapter: what identifies the adapter that was added to the weights; None: there is none.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        groups: tuple[CacheGroup, ...],
        max_model_len: int,
        make_runner: Callable[[Scheduler], StepRunner],
        clock: Callable[[], float] = time.monotonic,
        attention_name: str = "none",
        make_proposer: Callable[[RowState], Proposer] | None = None,
        weight_bytes: Mapping[str, int] | None = None,
        device: torch.device | None = None,
        routed: RoutedModel | None = None,
        second_tier: SecondTier | None = None,
        identity: str | None = None,
        adapters: AdapterLoader | None = None,
        merged_adapter: bytes | None = None,
    ) -> None:
        """`attention_name`: of the backend in use, with the instruction set of native kernels. `make_proposer`: creates
        the proposer, where the settings enable one other than n-grams. `weight_bytes`: of the weights, by their form,
        where the model reports them. `device`: that computes the steps; None: the CPU. `routed`: the model, where it
        may count the rows of its experts. `second_tier`: of the prefix cache. `identity`: of its blocks, where other
        engines may use them (`engine.runner.second_tier.block_identity`). `adapters`: of the model.
        `merged_adapter`: see above."""
        self.config = config
        self.spec = spec
        self.max_model_len = max_model_len
        self.clock = clock
        self.attention_name = attention_name
        self.weight_bytes = dict(weight_bytes or {})
        self._routed = routed
        self._adapters = adapters
        self.merged_adapter = merged_adapter
        places = None if adapters is None else adapters.make_places()
        self.scheduler = Scheduler(
            config.schedule,
            groups,
            config.cache.block_tokens,
            max_model_len,
            prefix_caching=config.cache.prefix_caching,
            eos_token_ids=spec.eos_token_ids,
            rope_original_max=spec.rope_original_max,
            places=places,
        )
        self.adapters = {} if places is None else places.digests
        self._second_tier = second_tier
        if second_tier is not None:
            self.scheduler.use_tiers(second_tier.host, second_tier.imported, second_tier.disk, second_tier.max_loads)
        self.block_exchange: BlockExchange | None = None
        if second_tier is not None and second_tier.imported is not None and identity is not None:
            self.block_exchange = BlockExchange(
                self.scheduler, second_tier, identity, config.cache.block_tokens, spec.rope_original_max
            )
        self._runner = make_runner(self.scheduler)
        if config.speculation.method != "off":
            lengths = make_draft_lengths(config.speculation, config.schedule.rows)
            proposer = (make_proposer or NgramProposer)(self.scheduler.rows)
            budget = TrialBudget() if config.speculation.method == "auto" else None
            self.scheduler.speculate(proposer, lengths, budget)
            if isinstance(proposer, StateReader):
                assert isinstance(self._runner, ModelRunner), "only a model's runner has states to show"
                self._runner.set_reader(proposer)
        self._collector = CompletionCollector()
        self._ready: list[Completion] = []
        device = device or torch.device("cpu")
        overlapped = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        if overlapped and not isinstance(self._runner, AheadRunner):
            if config.async_scheduling:
                raise EngineError(
                    "async_scheduling is not available: this engine's runner does not accept steps ahead; leave it out"
                )
            overlapped = False
        self._loop = StepLoop(
            self.scheduler, self._collector, clock, overlapped=overlapped, recover=make_memory_release(device),
            check_health=make_health_check(device), after_step=self._store_blocks,
        )  # fmt: skip

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        rank_group: RankGroupProcesses | None = None,
        model_digest: Callable[[], str] | None = None,
    ) -> Engine:
        """Load a model (a Hugging Face folder with safetensors, or a GGUF file) and make an engine for it.

        Args:
            rank_group: running ranks, for a model that several share; None: they are started where they are needed.
            model_digest: called after loading for a digest of all files that the model's keys and values depend on, if
                the prefix cache has a second tier.

        Raises:
            ModelNotFound, UnsupportedModel, CorruptWeights: the model can't be used; the message names why.
            OutOfMemory: the cache does not fit.  EngineLost: a rank has ended.
        """
        config = config or EngineConfig()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        of_ranks = config.expert_parallel, config.expert_counts is not None, config.micro_batches is not None
        if rank_group is not None or config.tensor_parallel != 1 or config.pipeline_parallel != 1 or any(of_ranks):
            return cls._load_shared(path, config, dtype, device, rank_group)
        check_second_tier(config, model_digest)
        native = native_library(config, dtype, device)
        builder = decoder_builder(config, native, dtype, device)
        load = partial(load_model, dtype=dtype, device=device, builder=builder, own_models=config.own_models)
        merger = AdapterMerger(config.lora, config.quantize) if config.lora.merge else None
        model = load(path, max_positions=config.max_model_len, change=merger)
        spec = model.spec
        adapters = None if merger is not None else load_adapters(config.lora, model)
        limit = spec.context(config.max_model_len)
        kv_dtype = _cache_dtype(config, config_kv_dtype(path), native is not None, device)
        draft = load_draft(config.speculation, spec, limit, load)
        head = load_eagle(config.speculation, model, limit, device)
        drafter = draft or head

        chosen = choose_attention(
            config.attention, spec, dtype, device, config.cache.block_size, fp8=kv_dtype == "fp8",
            requires_graphs=config.cuda_graphs is True,
            launch_seconds=LAUNCH_SECONDS if may_capture(config, model, device) else 0.0,
        )  # fmt: skip
        config = replace(config, cache=replace(config.cache, block_size=chosen.block_size))

        drafts = None if drafter is None else drafter.spec
        reserved = 0 if adapters is None else adapters.reserved_bytes
        config, groups = plan_groups(
            config, model, limit, device, kv_dtype, drafts, native=native is not None, reserved_bytes=reserved
        )
        kv_kind = ElementKind.I8 if kv_dtype == "int8" else None

        def attend(layout: KVLayout) -> AttentionBackend:
            return make_backend(config.attention, layout, dtype, device, native, kv_kind, fp8=kv_dtype == "fp8")

        def compute(model: CausalModel, attention: AttentionBackend, rows: RowState) -> StepRunner:
            compile_launches(model, attention, device)
            return ModelRunner(model, attention, rows, max_num_seqs=config.schedule.rows, device=device)

        states = StateStorage(groups, spec.states, device) if spec.state_layers else None
        second_tier: SecondTier | None = None

        def compute_recorded(rows: RowState) -> StepRunner:
            compile_launches(model, attention, device)
            graphs = make_graphs(config, model, attention, rows.block_tables[0].shape[1], device)
            return ModelRunner(
                model, attention, rows, max_num_seqs=config.schedule.rows, device=device, graphs=graphs,
                states=states, second_tier=second_tier, adapters=adapters,
            )  # fmt: skip

        block_size = config.cache.block_tokens
        attending = tuple(group for group in groups if group.snapshot_blocks is None)
        attention = make_backend(
            chosen.name, KVLayout.of(spec, attending, block_size), dtype, device, native, kv_kind,
            fp8=kv_dtype == "fp8", found=chosen.found,
        )  # fmt: skip
        log_choice(attention, device)
        make_proposer: Callable[[RowState], Proposer] | None = None
        if draft is not None:
            draft_state = DraftProposerState(draft, groups, block_size, config.schedule.tokens)
            make_proposer = partial(draft_state.proposer, attend=attend, compute=compute)
        elif head is not None:
            eagle = HeadProposerState(head, groups, block_size, spec.vocab_size, resolve_max_drafts(config.speculation))
            make_proposer = partial(eagle.proposer, attend=attend)
        name = attention.name if native is None else f"{attention.name} ({native.name})"
        identity: str | None = None
        if config.cache.second_tiers:
            tensors = [attention.block_tensors(group) for group in range(len(attending))]
            tensors += [] if states is None else [states.block_tensors()]
            blocks = BlockTransfer(tensors)
            if model_digest is not None:
                merged = "" if merger is None else merger.digest.hex()
                computed = str(spec.dtype), device.type, name, limit, merged
                identity = block_identity(config, model_digest(), computed, blocks.layout)
            second_tier = open_second_tier(config, groups, blocks, identity)
        return cls(
            config, spec, groups, limit, lambda scheduler: compute_recorded(scheduler.rows),
            attention_name=name, make_proposer=make_proposer,
            weight_bytes=model.weight_bytes() if isinstance(model, WeighedModel) else None, device=device,
            routed=model if isinstance(model, RoutedModel) else None, second_tier=second_tier,
            identity=identity, adapters=adapters,
            merged_adapter=None if merger is None else merger.digest,
        )  # fmt: skip

    @classmethod
    def _load_shared(
        cls,
        path: str | Path,
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        rank_group: RankGroupProcesses | None,
    ) -> Engine:
        """Load a model that several devices share, as `load`."""
        loaded = load_parallel(path, config, dtype, device, rank_group)
        # As on a CPU without native kernels: shared caches have the dtype of the model.
        _cache_dtype(config, config_kv_dtype(path), native=False, device=torch.device("cpu"))
        model = loaded.model
        try:
            return cls(
                loaded.config, model.spec, loaded.groups, loaded.limit,
                lambda scheduler: loaded.make_runner(scheduler.rows), attention_name=loaded.attention.name,
                device=loaded.device, routed=model, adapters=loaded.adapters,
            )  # fmt: skip
        except BaseException:
            if rank_group is None:
                loaded.rank_group.close()
            raise

    @classmethod
    def without_model(
        cls,
        spec: ModelSpec,
        config: EngineConfig,
        num_blocks: int,
        clock: Callable[[], float] = time.monotonic,
        make_runner: Callable[[RowState, int], StepRunner] = NullRunner,
    ) -> Engine:
        """Make an engine whose steps cost nothing, to measure and simulate everything around a model. `make_runner`
        gets the rows' state and the size of the vocabulary. Speculation is off, and the prefix cache has no second
        tier: where steps cost nothing, neither saves anything."""
        config = replace(config, speculation=SpeculationConfig())
        groups = (CacheGroup(tuple(range(spec.num_layers)), None, num_blocks),)
        limit = min(config.max_model_len or spec.max_position, (num_blocks - 1) * config.cache.block_tokens)
        return cls(config, spec, groups, limit, lambda s: make_runner(s.rows, spec.vocab_size), clock)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextLengthExceeded: prompt + max_tokens never fit.
            RequestRefused: the id is in use, the prompt is empty, or a token of it or of logit_bias is outside the
                vocabulary.
        """
        vocab_size = self.spec.vocab_size
        ids = request.prompt_token_ids
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.size:
            raise RequestRefused(f"prompt token {outside[0]} is outside the vocabulary of {vocab_size}")
        for begun in request.partial:
            if ((begun.token_ids < 0) | (begun.token_ids >= vocab_size)).any():
                raise RequestRefused(f"partial choice {begun.index} leaves the vocabulary of {vocab_size}")
        check_params(request.params, vocab_size)
        self._ready = self._end([])  # frees the ids of cancelled requests
        self.scheduler.add(request, self.clock())
        self._collector.resume(request)

    def settle(self, *, more_to_come: bool) -> None:
        """Set whether more requests may be added. If none will, the engine predicts the end of the run, and starts
        answers that would outlast it early."""
        self.scheduler.settle(more_to_come=more_to_come)

    def set_slo_weights(self, weights: SloTerms) -> bool:
        """See `StepEngine.set_slo_weights`."""
        return self.scheduler.set_slo_weights(weights)

    def set_drafting(self, *, enabled: bool) -> bool:
        """See `StepEngine.set_drafting`."""
        self.scheduler.set_drafting(enabled=enabled)
        return True

    def cancel(self, request_id: str, choice: int | None = None) -> bool:
        """End a request, or one choice of it, with reason "cancelled". The next `step` returns its completion, or a
        later one, when its other choices have ended. False: there is no such unfinished request or choice."""
        return self.scheduler.cancel(request_id, choice)

    def partial(
        self, request: Request, given: Mapping[int, int] | None = None, only: Collection[int] | None = None
    ) -> tuple[PartialChoice, ...]:
        """Return the choices of an unfinished request so far, to log them or to resume from them (`Request.partial`).

        Args:
            given: choice -> number of its tokens that the caller has already; only later ones are returned (and their
                log-probabilities). Unfinished choices without new tokens are left out.
            only: these choices; None: all.
        """
        given = given or {}
        found = []
        for choice, ids in self.scheduler.sampled(request.request_id, only):
            start = given.get(choice, 0)
            if len(ids) > start:
                logprobs = self._collector.logprobs(request, choice, start, len(ids))
                found.append(PartialChoice(choice, ids[start:].copy(), logprobs))
        for end in self._collector.ended(request.request_id):
            if end.finish_reason in ANSWERED and (only is None or end.choice in only):
                start = given.get(end.choice, 0)
                logprobs = self._collector.logprobs(request, end.choice, start, len(end.token_ids))
                ids, reason = end.token_ids[start:], end.finish_reason
                found.append(PartialChoice(end.choice, ids, logprobs, reason, end.stop_token_id))
        return tuple(found)

    def growing(self) -> Mapping[str, Collection[int]]:
        """See `StepEngine.growing`."""
        return self.scheduler.growing()

    @property
    def has_work(self) -> bool:
        """Whether another `step` is due."""
        return self.scheduler.has_work or bool(self._ready) or self._loop.busy

    @property
    def max_num_seqs(self) -> int:
        """Rows of the running batch."""
        return self.config.schedule.rows

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    def step(self) -> list[Completion]:
        """Compute one step and return the requests that ended with it, failed and cancelled ones included.

        Raises:
            EngineError: the step could not be computed. The rows of the step have ended with reason "error" and the
                next call returns them; the engine is still usable.
            EngineLost: the engine is not usable any more.
        """
        return self._end(self._loop.step(self._runner))

    def take_ended(self) -> list[Completion]:
        """Take the requests that ended outside a successful step: with a failed one, or cancelled. Otherwise the next
        `step` returns them."""
        return self._end([])

    def _end(self, finished: list[FinishedSequence]) -> list[Completion]:
        """Collect the completions of these sequences and of those that ended outside steps."""
        ready, self._ready = self._ready, []
        ended = [*self._loop.take_pending(), *self.scheduler.take_finished(), *finished]
        return ready + self._collector.finish(ended, self.clock())

    def _store_blocks(self) -> None:
        """Pass blocks to the second tier on a disk."""
        if self._second_tier is not None:
            self._second_tier.store(self.scheduler)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Complete all requests, in the order in which they end."""
        for request in requests:
            self.add(request)
        self.settle(more_to_come=False)
        while self.has_work:
            yield from self.step()
        self.settle(more_to_come=True)

    def resumes(self, request: Request) -> bool:
        """Return True: every request can go on from its tokens."""
        return True

    def close(self) -> None:
        """End the ranks that share the model, and store what the second tier of the prefix cache is to have. Memory is
        released when the engine is dropped."""
        if self._second_tier is not None:
            self._second_tier.close()
        if isinstance(self._runner, LeaderRunner):
            self._runner.close()

    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        stats, tiers = self.scheduler.stats, self._second_tier
        return EngineStats(
            computed=stats.computed_tokens,
            prompt=stats.prompt_tokens,
            recomputed=stats.recomputed_tokens,
            cached=stats.prefix_hit_tokens,
            queried=stats.prefix_queried_tokens,
            generated=stats.generated_tokens,
            steps=stats.steps,
            step_rows=stats.step_rows,
            step_times=self._loop.step_times.counts,
            preemptions=stats.preemptions,
            running=stats.running,
            waiting=stats.waiting,
            free_blocks=sum(stats.free_blocks),
            total_blocks=sum(stats.total_blocks),
            speculation=stats.speculation,
            slo=stats.slo,
            steps_ahead=self._loop.stats.ahead,
            steps_not_ahead=self._loop.stats.awaited,
            steps_recorded=getattr(self._runner, "graph_steps", 0),
            steps_out_of_memory=self._loop.stats.out_of_memory,
            tier=None if tiers is None or tiers.disk is None else tiers.disk.stats(),
            host_tier=None if tiers is None or tiers.host is None else tiers.host.stats(),
            imported=None if tiers is None or tiers.imported is None else tiers.imported.stats(),
            adapter_loads=0 if self._adapters is None else self._adapters.loads.total(),
        )

    def expert_load(self) -> ExpertLoad | None:
        """See `StepEngine.expert_load`: the native CPU kernels count, and expert parallelism does."""
        return None if self._routed is None else self._routed.expert_load()

    def classes(self) -> tuple[ClassStats, ...]:
        """Latency statistics of each class of requests, the most urgent first."""
        return self.scheduler.classes
