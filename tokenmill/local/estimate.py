"""The estimate of a job before it runs: tokens by a dry run, and time on measured machines."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.engine import resolve_device, resolve_dtype, resolve_model_dtype
from engine.models.base import ModelSpec
from engine.models.load import describe_shape
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.planner import InputEstimate, ShardSample, measure, open_source
from pipeline.planner.estimates.timing import estimate_worker_seconds
from pipeline.planner.ports import FormerAnswers
from pipeline.ports import World
from schemas.jobs.inputs import InputRef
from schemas.jobs.job import Job, JobSettings
from schemas.models import EngineName, ModelPin
from tokenmill import bench_results
from tokenmill.bench_results import MeasuredSpeed
from tokenmill.config.engine_choice import choose_engine
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.inputs import open_input
from tokenmill.config.job_options import ChosenModel, template_tokens, token_counter
from tokenmill.local.dry_run import dry_run, engine_config
from tokenmill.models.adapters import with_adapters
from workers.model.generation_config import sampling_defaults
from workers.model.loaded_model import dtype_name, model_digest, model_path
from workers.shards.dry_run import DryRunResult


@dataclass(slots=True)
class JobDryRuns:
    """Dry runs of a job, which is read and validated as in planning.

    Attributes:
        planned: the estimate of planning.
        path, spec, pin: of the model.  engine: that would compute.  options: its options.
    """

    planned: InputEstimate
    path: Path
    spec: ModelSpec
    pin: ModelPin
    engine: EngineName
    options: EngineOptions
    _job: Job
    _sample: ShardSample
    _encoder: bool
    _made: dict[tuple[Any, ...], tuple[DryRunResult, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        inputs: InputRef,
        model: ChosenModel,
        wanted: JobSettings,
        options: EngineOptions,
        *,
        exact: bool = False,
        former: FormerAnswers | None = None,
        pinned: ModelPin | None = None,
    ) -> JobDryRuns:
        """Plan the job in a temporary folder.

        Args:
            exact: count the tokens of every prompt, not of a sample.
            former: answers that rows with the same keys take.
            pinned: the model as a run pins it, with the digest that keys need; None: without former answers.
        """
        path = model_path(model.source.path)
        engine = choose_engine(path, options.engine, options.vllm_python).engine
        device = resolve_device("auto")
        computed = (
            resolve_dtype(options.dtype, device)
            if engine == "vllm"
            else resolve_model_dtype(path, options.dtype, device)
        )
        spec, encoder = describe_shape(path, dtype=computed)
        pin = pinned or ModelPin(
            name=model.name, source=str(path), dtype=dtype_name(spec.dtype), quantization=options.quantize,
            kv_dtype=options.kv_dtype,
            sampling_defaults=sampling_defaults(path) if options.generation_config == "auto" else None,
        )  # fmt: skip
        clock, sample = SystemClock(), ShardSample()
        pins = with_adapters((pin,), options.config())
        job = Job(id="estimate", input=inputs, models=pins, settings=wanted, created_at=clock.now())
        with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder, FolderStore(Path(folder)) as store:
            world = World(store, clock, SystemRandomness(), Path(folder))
            source = open_source(open_input(inputs).files(), inputs.format, wanted.limits, pin.name)
            planned = measure(
                source, job, world, counter=token_counter(path), exact=exact, template=template_tokens(path),
                sample=sample, max_model_len=None if encoder else spec.max_position, former=former,
            )  # fmt: skip
        return cls(planned, path, spec, pin, engine, options, job, sample, encoder)

    def speed_here(self, model_cache: Path) -> MeasuredSpeed | None:
        """The speed that the last 'tokenmill bench' measured here with this model and these options; None: none did."""
        options = self.options
        return bench_results.find_result(
            model_cache, model=model_digest(self.path), dtype=self.pin.dtype, threads=options.threads,
            quantization=options.quantize, kv_dtype=options.kv_dtype, engine=self.engine,
            engine_options=bench_results.options_key(options.vllm),
        )  # fmt: skip

    def amount(self, options: EngineOptions | None = None) -> InputEstimate:
        """The estimate of planning, with the tokens of one worker's tokenizer and prefix cache."""
        if self._encoder or not self.planned.unique:
            return self.planned
        made, _ = self.of_worker(options or self.options, workers=1)
        planned = self.planned
        prompts = planned.prompt_tokens
        if self._sample.whole:
            prompts = made.prompt_tokens
        elif not planned.exact:
            prompts = round(prompts * made.prompt_tokens / max(1, self._sample.sampled_prompt_tokens))
        shared = round(prompts * made.cached_tokens / max(1, made.prompt_tokens))
        exact = planned.exact or self._sample.whole
        return replace(planned, prompt_tokens=prompts, shared_prefix_tokens=shared, exact=exact)

    def of_worker(self, options: EngineOptions, workers: int) -> tuple[DryRunResult, float]:
        """The dry run of one of these workers on its part of the job, or of the sample; and the factor from that to
        its whole part."""
        key = workers, options.kv_cache_bytes, options.max_num_seqs, options.max_num_batched_tokens
        if key not in self._made:
            tables, whole = self._sample.shards(workers)
            config = engine_config(self.planned, options, alone=workers == 1)
            self._made[key] = dry_run(self._job, tables, self.path, config), whole
        return self._made[key]

    def seconds(self, options: EngineOptions, speed: MeasuredSpeed, workers: int = 1) -> float:
        """The time on a measured machine, in seconds; each worker computes its part."""
        made, whole = self.of_worker(options, workers)
        return estimate_worker_seconds(made.steps, made.waiting, made.progress, speed.times, whole)
