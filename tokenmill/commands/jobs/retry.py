"""`tokenmill jobs retry`: a new job of the rows that got no answer, in a folder and run here, or in the first job's
root for its workers."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from tokenmill import output
from tokenmill.config import cli_options
from tokenmill.config.cli_options import (
    ChatTemplate,
    ContentPolicies,
    Deadline,
    Debug,
    DeviceOption,
    DType,
    ExpertParallel,
    GatewayUrl,
    JobGiven,
    Json,
    KvCacheDir,
    KvCacheDirSize,
    KvCacheMemory,
    KvDType,
    KvOffloadingSize,
    MaxCost,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MaxOutputTokens,
    MicroBatches,
    PipelineParallel,
    PricePerHour,
    Quantize,
    ReasoningParser,
    Replicas,
    RootUrl,
    ScoreTokens,
    SpeculateOption,
    TensorParallel,
    ThinkingTokenBudget,
    Threads,
    Tier,
)
from tokenmill.errors import InputUnusable, ModelError, UserError
from tokenmill.jobs.backend import RetryRequest
from tokenmill.jobs.job_location import open_jobs
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.jobs.retry import Retry, RetryOverrides
    from schemas.jobs.inputs import InputFile, InputRef
    from schemas.jobs.job import Job
    from schemas.jobs.results import RowStatus
    from schemas.models import ModelPin
    from tokenmill.config.engine_options import EngineOptions
    from tokenmill.config.job_options import ChosenModel
    from tokenmill.local.run_plan import RunPlan
    from workers.text.chat_options import ChatOptions


class EndedRow(StrEnum):
    """The status of a row without an answer."""

    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ONLY_HERE: Final = {
    "new": "--output", "input_": "--input", "model": "--model", "dtype": "--dtype", "quantize": "--quantize",
    "kv_dtype": "--kv-dtype", "speculate": "--speculate", "content_policy": "--content-policy", "device": "--device",
    "threads": "--threads", "tensor_parallel": "--tensor-parallel",
    "pipeline_parallel": "--pipeline-parallel", "micro_batches": "--micro-batches",
    "expert_parallel": "--expert-parallel",
    "replicas": "--replicas", "fresh": "--fresh",
    "price_per_hour": "--price-per-hour", "chat_template": "--chat-template", "reasoning_parser": "--reasoning-parser",
    "thinking_token_budget": "--thinking-token-budget", "score_tokens": "--score-tokens",
    "max_num_seqs": "--max-num-seqs", "max_num_batched_tokens": "--max-num-batched-tokens",
    "kv_cache_memory": "--kv-cache-memory", "kv_offloading_size": "--kv-offloading-size",
    "kv_cache_dir": "--kv-cache-dir", "kv_cache_dir_size": "--kv-cache-dir-size",
}  # fmt: skip
"""Options of a retry in a folder; in a root the workers' settings apply."""


def retry(
    context: typer.Context,
    job_given: JobGiven,
    new: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=cli_options.folder,
            metavar="NEW",
            help="The new job's folder; not for one in a root.",
        ),
    ] = None,
    root_url: RootUrl = None,
    url: GatewayUrl = None,
    only: Annotated[
        list[EndedRow] | None, typer.Option(help="Only rows that ended so. Repeat for several. Default: all three.")
    ] = None,
    include_invalid: Annotated[
        bool, typer.Option("--include-invalid", help="Also rows that were refused for what their lines say.")
    ] = False,
    input_: Annotated[
        str | None, typer.Option("--input", metavar="INPUT", help="Where the input lies now, if it was moved.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Another model than answered in JOB; NAME=MODEL says in place of which, where JOB has several. May be "
            "repeated.",
        ),
    ] = None,
    tier: Annotated[Tier | None, typer.Option(help="How urgent the job is. Default: as in JOB.")] = None,
    deadline: Deadline = None,
    max_cost: MaxCost = None,
    dtype: Annotated[DType | None, typer.Option(help="Of weights and arithmetic. Default: as in JOB.")] = None,
    quantize: Annotated[Quantize | None, typer.Option(help="Weights at load. Default: as in JOB.")] = None,
    kv_dtype: Annotated[KvDType | None, typer.Option(help="Of the KV cache. Default: as in JOB.")] = None,
    speculate: SpeculateOption = None,
    content_policy: ContentPolicies = None,
    device: DeviceOption = "auto",
    threads: Threads = None,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    micro_batches: MicroBatches = None,
    expert_parallel: ExpertParallel = False,
    replicas: Replicas = 1,
    max_output_tokens: MaxOutputTokens = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the job in NEW, and start anew.")] = False,
    price_per_hour: PricePerHour = None,
    chat_template: ChatTemplate = None,
    reasoning_parser: ReasoningParser = None,
    thinking_token_budget: ThinkingTokenBudget = None,
    score_tokens: ScoreTokens = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    kv_cache_memory: KvCacheMemory = None,
    kv_offloading_size: KvOffloadingSize = None,
    kv_cache_dir: KvCacheDir = None,
    kv_cache_dir_size: KvCacheDirSize = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="In a root: report the new job's progress until it has ended.")
    ] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Answer the rows of an ended job that failed, expired or were cancelled, as a new job.

    It reads the same input with the same model and settings, and its rows keep their index and custom_id; 'jobs export
    JOB NEW --merged' joins the two. Rows that would be refused again (invalid lines, too long for the model) are left
    out.

    For a job's folder it is run here, in NEW; the same command again goes on where the last one stopped. For a job in a
    root it is a job of that root, whose id is printed at once; engine options are those of the root's workers. The same
    command again finds the retry that it has made, and makes no second one.
    """
    from tokenmill.jobs.watch import print_new_job

    jobs, folder = open_jobs(job_given, root_url, url), Path(job_given).expanduser()
    if url is not None or new is None or not folder.is_dir():
        request = RetryRequest(
            only, include_invalid, tier, deadline, max_output_tokens, max_cost, _local_option(context)
        )
        print_new_job(jobs.retry(request), watch=watch, as_json=as_json)
        return
    if watch:
        raise typer.BadParameter("is for jobs in a root; this one is run here", param_hint="--watch")
    from pipeline.jobs.retry import RETRIED, RetryOverrides
    from schemas.jobs.job import Tier as JobTier
    from schemas.jobs.results import RowStatus
    from tokenmill.config.engine_options import engine_options  # needs torch, which isn't there where no model runs
    from tokenmill.config.job_options import chat_options
    from tokenmill.jobs.ledger_backend import retry_notes
    from tokenmill.local.execute import execute
    from tokenmill.local.pricing import check_limit, price_of_worker
    from tokenmill.models.adapters import adapters_of

    settings = read_settings()
    statuses = RETRIED if only is None else frozenset(RowStatus(status) for status in only)
    overrides = RetryOverrides(None if tier is None else JobTier(tier), deadline, max_output_tokens, max_cost)
    first = _first(folder, new, statuses, include_invalid=include_invalid, other_model=bool(model))
    pin, dtypes = first.job.models[0], {pin.dtype for pin in first.job.models}
    own = pin.dtype if len(dtypes) == 1 else "auto"  # as the job was begun: each model has the dtype that suits it
    engines = {one.engine for one in first.job.models}
    as_begun = pin.engine if engines in ({"vllm"}, {"transformers"}) else "auto"
    engine = engine_options(
        settings, dtype=dtype or own, device=device, threads=threads, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, kv_cache_memory=kv_cache_memory,
        kv_offloading_size=kv_offloading_size, kv_cache_dir=kv_cache_dir, kv_cache_dir_size=kv_cache_dir_size,
        quantize=quantize or pin.quantization, kv_dtype=kv_dtype or pin.kv_dtype, speculate=speculate,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel, micro_batches=micro_batches,
        expert_parallel=expert_parallel, replicas=replicas, engine=None if model else as_begun,
        engine_option=list(pin.engine_options) if as_begun == "vllm" and not model else None,
        generation_config=None if model else _generation_config(first.job.models),
        adapter=adapters_of(first.job.models),
        merge_adapter=any(one.merged for one in first.job.models),
    )  # fmt: skip
    chat = chat_options(chat_template, reasoning_parser, thinking_token_budget, score_tokens)
    plan = _plan(
        first, new, overrides, engine, input_, model, chat,
        fresh=fresh, price_per_hour=price_of_worker(settings, price_per_hour),
        content_policy=content_policy,
    )  # fmt: skip
    check_limit(plan)
    for note in retry_notes(first):
        output.say(note)
    execute(plan, as_json=as_json)


def _plan(
    first: Retry,
    new: Path,
    overrides: RetryOverrides,
    engine: EngineOptions,
    input_: str | None,
    model: list[str] | None,
    chat: ChatOptions,
    *,
    fresh: bool,
    price_per_hour: float | None,
    content_policy: list[str] | None,
) -> RunPlan:
    """Validate the options of a retry in a folder, and build its plan."""
    from pipeline.jobs.retry import retried_settings, retry_spending_limit
    from tokenmill.config import job_options
    from tokenmill.config.engine_choice import choose_engines
    from tokenmill.local.run_plan import RunPlan, worker_settings
    from workers.text.chat_options import OWN_CHAT

    settings, job = read_settings(), first.job
    tier = overrides.tier or job.tier
    if overrides.max_output_tokens is not None:
        job_options.check_cap(overrides.max_output_tokens, settings.max_output_tokens.of(tier), tier)
    policies = job_options.content_policies(content_policy, settings)
    wanted = retried_settings(first, overrides.max_output_tokens)
    return RunPlan(
        inputs=_same_input(job, input_),
        models=choose_engines(_models(job, model or [], settings.model_cache, same_template=chat == OWN_CHAT), engine),
        output=new.expanduser(),
        tier=tier,
        settings=wanted.model_copy(update={"content_policies": policies.fingerprint}),
        engine=engine,
        chat=chat,
        fresh=fresh,
        price_per_hour=price_per_hour,
        worker=worker_settings(settings, policies),
        deadline=overrides.deadline,
        max_cost=retry_spending_limit(job, overrides),
        retry_of=job.id,
    )


def _generation_config(models: Collection[ModelPin]) -> Literal["auto", "ignore"]:
    """As the first job was begun."""
    return "auto" if any(pin.sampling_defaults is not None for pin in models) else "ignore"


def _local_option(context: typer.Context) -> str | None:
    """A given option that only a retry in a folder has."""
    for name, option in ONLY_HERE.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            return option
    return None


def _first(out: Path, new: Path, statuses: Collection[RowStatus], *, include_invalid: bool, other_model: bool) -> Retry:
    """The first job, and its rows to retry. Raises `UserError` or the pipeline's own errors."""
    from pipeline.adapters.folder.store import FolderStore
    from pipeline.jobs.retry import choose_rows
    from pipeline.jobs.summaries import find_ledger

    if new.expanduser().resolve() == out.resolve():
        raise UserError(f"--output {new}: is the first job, whose results are never changed; name another folder")
    with FolderStore(out, read_only=True) as store:
        return choose_rows(find_ledger(store), statuses, include_invalid=include_invalid, other_model=other_model)


def _same_input(job: Job, given: str | None) -> InputRef:
    """Pin the input of the first job, which must have the same bytes, since rows are identified by their index."""
    from tokenmill.config.inputs import pin

    found = pin(given or job.input.uri, job.input)
    if [_bytes_of(file) for file in found.files] != [_bytes_of(file) for file in job.input.files]:
        raise InputUnusable(f"{found.uri}: is not what {job.id} read; put the old input back, or name it with --input")
    return found


def _bytes_of(file: InputFile) -> tuple[int, str | None, str | None]:
    """The identity of a file's bytes; an object in S3 isn't hashed."""
    return file.size, file.sha256, None if file.sha256 is not None else file.etag


def _models(job: Job, given: list[str], cache: Path, *, same_template: bool) -> tuple[ChosenModel, ...]:
    """The job's pinned models, or the given replacements, under the names of the requests."""
    from tokenmill.config import job_options
    from tokenmill.models.sources import ModelSource

    chosen = job_options.choose_models(given, cache)
    pins = [pin.without_adapter for pin in job.models if pin.adapter is None or pin.merged]
    if len(pins) == 1 and len(chosen) == 1:
        (pin,), (one,) = pins, chosen
        return (job_options.ChosenModel(pin.name, one.source) if one.name == given[0] else one,)
    names = [pin.name for pin in pins]
    for one in chosen:
        if one.name not in names:
            raise UserError(f"--model {one.name}: {job.id} has the models {', '.join(names)}; give NAME=MODEL of those")
    others = {one.name: one for one in chosen}

    def pinned(pin: ModelPin) -> ChosenModel:
        path = Path(pin.source)
        if not path.exists():
            raise ModelError(f"{path}: {pin.name}, which answered in {job.id}, is not there any more; give --model")
        digest = pin.digest if same_template else None
        return job_options.ChosenModel(pin.name, ModelSource(pin.name, path, pin.revision, 0), digest)

    return tuple(others.get(pin.name) or pinned(pin) for pin in pins)
