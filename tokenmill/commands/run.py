"""`tokenmill run`: it answers a file of requests on this machine, into a folder of Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.config.cli_options import (
    Accept,
    AdapterColumn,
    Adapters,
    Agreement,
    ChatTemplate,
    ContentPolicies,
    Deadline,
    Debug,
    DeviceOption,
    DryRunOption,
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
    MaxLoras,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MaxOutputTokens,
    MaxTries,
    MergeAdapter,
    MicroBatches,
    Models,
    OnInvalid,
    OutputColumn,
    OutputSchema,
    OutputTo,
    PipelineParallel,
    PricePerHour,
    QuantizeOption,
    ReasoningParser,
    Replicas,
    Reuse,
    SampleRows,
    SamplingValues,
    ScoreTokens,
    SpeculateOption,
    TablePrompt,
    TableSystem,
    TensorParallel,
    Then,
    ThinkingTokenBudget,
    Threads,
    Tier,
    TruncatePrompt,
)
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from tokenmill.config.engine_options import EngineOptions
    from tokenmill.frames.jobs.estimate import TableEstimate
    from tokenmill.local.cascade import CascadePlan
    from tokenmill.local.run_plan import RunPlan


def run(
    input_: Input,
    model: Models,
    out: OutputTo,
    tier: Annotated[Tier, typer.Option(help="How urgent the job is.")] = "standard",
    deadline: Deadline = None,
    max_cost: MaxCost = None,
    adapter: Adapters = None,
    max_loras: MaxLoras = 8,
    merge_adapter: MergeAdapter = False,
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
    reuse: Reuse = None,
    max_tries: MaxTries = None,
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
    prompt: TablePrompt = None,
    system: TableSystem = None,
    output_schema: OutputSchema = None,
    output_column: OutputColumn = None,
    adapter_column: AdapterColumn = None,
    sampling: SamplingValues = None,
    dry_run: DryRunOption = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Answer every request of INPUT, and write the answers to OUT/results as Parquet.

    The same command again goes on where the last one stopped; what was committed is never computed again. Every line
    gets a row, an invalid one too, with the reason. OUT/results can be read at any moment.

    With --then it is a cascade: rows whose answers --accept doesn't accept are answered by the next model, in
    OUT/cascade. OUT/cascade/merged.parquet has the final answers.

    With --prompt INPUT is a table without requests: each row becomes one. OUT/table.parquet is the table, in its order,
    with typed columns of answers.
    """
    from tokenmill.output import announce_imports

    announce_imports()
    from schemas.jobs.job import Tier as JobTier
    from tokenmill.config import job_options
    from tokenmill.config.engine_options import engine_options
    from tokenmill.local.execute import execute, execute_cascade
    from tokenmill.local.pricing import check_limit, price_of_worker
    from tokenmill.local.run_plan import make_plan

    of_tables = system, output_schema, output_column, adapter_column, sampling or None, dry_run or None
    if prompt is None and any(option is not None for option in of_tables):
        raise typer.BadParameter(
            "--system, --output-schema, --output-column, --adapter-column, --sampling and --dry-run are those of "
            "--prompt; give it too ('tokenmill estimate' estimates a file of requests)"
        )
    if prompt is not None and then is not None:
        raise typer.BadParameter("takes no cascade (--then)", param_hint="--prompt")
    if max_tries is not None and then is not None:
        raise typer.BadParameter("is not for cascades: --accept judges their answers", param_hint="--max-tries")
    if dry_run and chat_template is not None:
        raise typer.BadParameter("takes no other --chat-template", param_hint="--dry-run")
    settings, out = read_settings(), out.expanduser()
    engine = engine_options(
        settings, dtype=dtype, device=device, threads=threads, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, kv_cache_memory=kv_cache_memory,
        kv_offloading_size=kv_offloading_size, kv_cache_dir=kv_cache_dir, kv_cache_dir_size=kv_cache_dir_size,
        quantize=quantize,
        kv_dtype=kv_dtype, speculate=speculate, tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel, micro_batches=micro_batches,
        expert_parallel=expert_parallel, replicas=replicas, engine=engine_name,
        engine_option=engine_option, generation_config=generation_config, adapter=adapter, max_loras=max_loras,
        merge_adapter=merge_adapter,
    )  # fmt: skip
    chat = job_options.chat_options(chat_template, reasoning_parser, thinking_token_budget, score_tokens)
    wanted = job_options.job_settings(
        settings, tier=tier, seed=seed, on_invalid=on_invalid, limit=limit if prompt is None else None,
        max_output_tokens=max_output_tokens, truncate_prompt=truncate_prompt,
        max_tries=max_tries,
    )  # fmt: skip
    table = None
    if prompt is not None:
        from tokenmill.frames.table_run import TableOptions, TableRun

        options = TableOptions(prompt, system, output_schema, output_column, sampling or (), adapter_column, limit)
        table = TableRun(input_, job_options.only_model(model), options, wanted, engine)
        if dry_run:
            _show_estimate(table.estimate(price_per_hour, reuse, content_policy, chat), as_json=as_json)
            return
        input_ = str(table.write_requests(out, fresh=fresh))
    plan = make_plan(
        input_, model, out, wanted, engine, chat,
        tier=JobTier(tier), fresh=fresh, price_per_hour=price_of_worker(settings, price_per_hour), deadline=deadline,
        max_cost=max_cost, content_policy=content_policy, reuse=reuse,
    )  # fmt: skip
    check_limit(plan)
    if then is None:
        if accept is not None or agreement is not None or sample_rows is not None:
            raise typer.BadParameter("needs --then, the model of the next step", param_hint="--accept")
        execute(plan, as_json=as_json)
        if table is not None:
            table.write_table(out)
        return
    execute_cascade(_cascade(plan, then, accept, agreement, sample_rows, engine), as_json=as_json)


def _show_estimate(estimate: TableEstimate, *, as_json: bool) -> None:
    from dataclasses import asdict

    from tokenmill import output

    if as_json:
        output.print_json(asdict(estimate))
    else:
        output.stdout().print(str(estimate), markup=False)


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
    if first.reuse is not None:
        raise UserError("--reuse is of one job's answers; a cascade has several jobs. Run its models one by one")
    accepted = read_acceptance(accept, agreement, sample_rows)
    later = choose_engines(job_options.choose_models(then, read_settings().model_cache), engine)
    adapters = [name for name, _ in engine.adapters]
    names = [model.name for model in (*first.models, *later)]
    if len(first.models) > 1 or len({*names, *adapters}) < len(names) + len(adapters):
        named = ", ".join([*names, *adapters])
        raise UserError(f"--then: the models {named} must be one first model and others with other names")
    try:
        CascadeSettings(models=tuple(model.name for model in later), accept=accepted)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"--then: {reason}") from None
    return CascadePlan(first, later, accepted)
