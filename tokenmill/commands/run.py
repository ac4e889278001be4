"""`tokenmill run`: it answers a file of requests on this machine, into a folder of Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.config.cli_options import (
    Accept,
    Agreement,
    ChatTemplate,
    ContentPolicies,
    Deadline,
    Debug,
    DeviceOption,
    DTypeOption,
    EngineOption,
    EngineOptionValues,
    ExpertParallel,
    Fresh,
    GenerationConfigOption,
    Input,
    Json,
    KvCacheDir,
    KvCacheDirSize,
    KvCacheMemory,
    KvDTypeOption,
    KvOffloadingSize,
    MaxCost,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MaxOutputTokens,
    MicroBatches,
    Models,
    OnInvalid,
    OutputTo,
    PipelineParallel,
    PricePerHour,
    PromptSide,
    QuantizeOption,
    ReasoningParser,
    Replicas,
    SampleRows,
    ScoreTokens,
    SpeculateOption,
    TensorParallel,
    Then,
    ThinkingTokenBudget,
    Threads,
    Tier,
    TruncatePrompt,
)
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from datetime import timedelta

    from tokenmill.config.engine_options import EngineOptions
    from tokenmill.local.cascade import CascadePlan
    from tokenmill.local.run_plan import RunPlan
    from workers.text.chat_options import ChatOptions


def run(
    input_: Input,
    model: Models,
    out: OutputTo,
    tier: Annotated[Tier, typer.Option(help="How urgent the job is.")] = "standard",
    deadline: Deadline = None,
    max_cost: MaxCost = None,
    engine_name: EngineOption = None,
    engine_option: EngineOptionValues = None,
    dtype: DTypeOption = "auto",
    quantize: QuantizeOption = "none",
    kv_dtype: KvDTypeOption = "auto",
    speculate: SpeculateOption = None,
    generation_config: GenerationConfigOption = None,
    content_policy: ContentPolicies = None,
    device: DeviceOption = "auto",
    threads: Threads = None,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    micro_batches: MicroBatches = None,
    expert_parallel: ExpertParallel = False,
    replicas: Replicas = 1,
    max_output_tokens: MaxOutputTokens = None,
    truncate_prompt: TruncatePrompt = None,
    on_invalid: Annotated[
        OnInvalid, typer.Option(help="An invalid line fails by itself (row), or stops the job at once (job).")
    ] = "row",
    fresh: Fresh = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows of the input.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of sampled requests that bring none.")] = 0,
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
    then: Then = None,
    accept: Accept = None,
    agreement: Agreement = None,
    sample_rows: SampleRows = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Answer every request of INPUT, and write the answers to OUT/results as Parquet.

    The same command again goes on where the last one stopped; what was committed is never computed again. Every line
    gets a row, an invalid one too, with the reason. OUT/results can be read at any moment.

    With --then it is a cascade: rows whose answers --accept doesn't accept are answered by the next model, in
    OUT/cascade. OUT/cascade/merged.parquet has the final answers.
    """
    from tokenmill.config import job_options
    from tokenmill.config.engine_options import engine_options
    from tokenmill.local.execute import execute, execute_cascade
    from tokenmill.local.pricing import check_limit, price_of_worker

    settings = read_settings()
    engine = engine_options(
        settings, dtype=dtype, device=device, threads=threads, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, kv_cache_memory=kv_cache_memory,
        kv_offloading_size=kv_offloading_size, kv_cache_dir=kv_cache_dir, kv_cache_dir_size=kv_cache_dir_size,
        quantize=quantize,
        kv_dtype=kv_dtype, speculate=speculate, tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel, micro_batches=micro_batches,
        expert_parallel=expert_parallel, replicas=replicas, engine=engine_name,
        engine_option=engine_option, generation_config=generation_config,
    )  # fmt: skip
    chat = job_options.chat_options(chat_template, reasoning_parser, thinking_token_budget, score_tokens)
    plan = _plan(
        input_, model, out, tier, engine, chat,
        on_invalid=on_invalid, fresh=fresh, limit=limit, seed=seed, max_output_tokens=max_output_tokens,
        price_per_hour=price_of_worker(settings, price_per_hour), deadline=deadline, max_cost=max_cost,
        content_policy=content_policy, truncate_prompt=truncate_prompt,
    )  # fmt: skip
    check_limit(plan)
    if then is None:
        if accept is not None or agreement is not None or sample_rows is not None:
            raise typer.BadParameter("needs --then, the model of the next step", param_hint="--accept")
        execute(plan, as_json=as_json)
        return
    execute_cascade(_cascade(plan, then, accept, agreement, sample_rows, engine), as_json=as_json)


def _cascade(
    first: RunPlan,
    then: list[str],
    accept: Path | None,
    agreement: float | None,
    sample_rows: int | None,
    engine: EngineOptions,
) -> CascadePlan:
    """Validate the options of a cascade, and build its plan."""
    from pydantic import ValidationError

    from schemas.jobs.cascade import CascadeSettings
    from tokenmill.config import job_options
    from tokenmill.config.engine_choice import choose_engines
    from tokenmill.errors import UserError
    from tokenmill.local.acceptance import read_acceptance
    from tokenmill.local.cascade import CascadePlan

    if first.deadline is not None or first.max_cost is not None:
        raise UserError("--deadline and --max-cost are of one job; a cascade has several")
    accepted = read_acceptance(accept, agreement, sample_rows)
    later = choose_engines(job_options.choose_models(then, read_settings().model_cache), engine)
    names = [model.name for model in (*first.models, *later)]
    if len(first.models) > 1 or len(set(names)) < len(names):
        raise UserError(f"--then: the models {', '.join(names)} must be one first model and others with other names")
    try:
        CascadeSettings(models=tuple(model.name for model in later), accept=accepted)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"--then: {reason}") from None
    return CascadePlan(first, later, accepted)


def _plan(
    input_: str,
    model: list[str],
    out: Path,
    tier: Tier,
    engine: EngineOptions,
    chat: ChatOptions,
    *,
    on_invalid: OnInvalid,
    fresh: bool,
    limit: int | None,
    seed: int,
    max_output_tokens: int | None,
    price_per_hour: float | None,
    deadline: timedelta | None,
    max_cost: float | None,
    content_policy: list[str] | None,
    truncate_prompt: PromptSide | None,
) -> RunPlan:
    """Validate the options and build the run's plan, before a job is created. Cheap checks come first."""
    from schemas.jobs.job import Tier as JobTier
    from tokenmill.config import job_options
    from tokenmill.config.engine_choice import choose_engines
    from tokenmill.local.run_plan import RunPlan
    from workers.settings import WorkerSettings

    settings = read_settings()
    wanted = job_options.job_settings(
        settings,
        tier=tier,
        seed=seed,
        on_invalid=on_invalid,
        limit=limit,
        max_output_tokens=max_output_tokens,
        truncate_prompt=truncate_prompt,
    )
    policies = job_options.content_policies(content_policy, settings)
    inputs = job_options.read_input(input_, None if fresh else out.expanduser())
    models = choose_engines(job_options.choose_models(model, settings.model_cache), engine)
    return RunPlan(
        inputs=inputs,
        models=models,
        output=out.expanduser(),
        tier=JobTier(tier),
        settings=wanted.model_copy(update={"content_policies": policies.fingerprint}),
        engine=engine,
        chat=chat,
        fresh=fresh,
        price_per_hour=price_per_hour,
        worker=WorkerSettings(
            request_timeout_seconds=settings.request_timeout_seconds,
            checkpoint_seconds=settings.checkpoint_seconds,
            policies=policies,
        ),
        deadline=deadline,
        max_cost=max_cost,
    )
