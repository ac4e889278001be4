"""`tokenmill jobs retry`: the rows of a job that got no answer, as a new job."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill import options, output
from tokenmill.errors import InputError, ModelError, UserError
from tokenmill.options import (
    ChatTemplate,
    Deadline,
    Debug,
    DeviceOption,
    DType,
    Json,
    KvCacheMemory,
    KvDType,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MaxOutputTokens,
    Output,
    PricePerHour,
    Quantize,
    Threads,
    Tier,
)
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.retry import Retry
    from schemas.job import InputFile, InputRef, Job, JobSettings
    from tokenmill.job_options import ChosenModel


class Ended(StrEnum):
    """How a row ended that got no answer."""

    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


def retry(
    out: Output,
    new: Annotated[
        Path,
        typer.Option("--output", "-o", parser=options.folder, metavar="NEW", help="The new job's folder."),
    ],
    only: Annotated[
        list[Ended] | None, typer.Option(help="Only rows that ended so. Repeat for several. Default: all three.")
    ] = None,
    include_invalid: Annotated[
        bool, typer.Option("--include-invalid", help="Also rows that were refused for what their lines say.")
    ] = False,
    input_: Annotated[
        str | None, typer.Option("--input", metavar="INPUT", help="Where the input lies now, if it was moved.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="Another model than answered in OUT.")
    ] = None,
    tier: Annotated[Tier | None, typer.Option(help="How urgent the job is. Default: as in OUT.")] = None,
    deadline: Deadline = None,
    dtype: Annotated[DType | None, typer.Option(help="Of weights and arithmetic. Default: as in OUT.")] = None,
    quantize: Annotated[Quantize | None, typer.Option(help="Weights at load. Default: as in OUT.")] = None,
    kv_dtype: Annotated[KvDType | None, typer.Option(help="Of the KV cache. Default: as in OUT.")] = None,
    device: DeviceOption = "auto",
    threads: Threads = None,
    max_output_tokens: MaxOutputTokens = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the job in NEW, and start anew.")] = False,
    price_per_hour: PricePerHour = None,
    chat_template: ChatTemplate = None,
    max_num_seqs: MaxNumSeqs = 128,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    kv_cache_memory: KvCacheMemory = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Answer the rows of an ended job that failed, expired or were cancelled, as a new job in NEW.

    It reads the same input with the same model and settings, and its rows keep their index and custom_id; 'jobs export
    OUT NEW --merged' joins the two. Rows that would be refused again (invalid lines, too long for the model) are left
    out. The same command again goes on where the last one stopped.
    """
    from schemas.job import Tier as JobTier
    from tokenmill import job_options
    from tokenmill.running import execute
    from tokenmill.wiring import EngineOptions, RunPlan
    from workers.settings import WorkerSettings

    first = _first(out, new, only, include_invalid=include_invalid, other_model=model is not None)
    job, settings = first.job, read_settings()
    pin = job.models[0]
    wanted_tier = job.tier if tier is None else JobTier(tier)
    plan = RunPlan(
        inputs=_same_input(job, input_),
        model=_model(job, model, settings.model_cache),
        output=new.expanduser(),
        tier=wanted_tier,
        settings=_settings(first, max_output_tokens, settings.max_output_tokens.of(wanted_tier)),
        engine=EngineOptions(
            dtype=dtype or pin.dtype,
            device=device,
            threads=threads,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=kv_cache_memory,
            quantize=quantize or pin.quantization,
            kv_dtype=kv_dtype or pin.kv_dtype,
            instruction_set=settings.instruction_set,
        ),
        chat_template=job_options.read_template(chat_template),
        fresh=fresh,
        price_per_hour=settings.price_per_hour if price_per_hour is None else price_per_hour,
        worker=WorkerSettings(request_timeout=settings.request_timeout, checkpoint_seconds=settings.checkpoint_seconds),
        deadline=deadline,
        retry_of=job.id,
        digest=pin.digest if model is None and chat_template is None else None,
    )
    output.say(f"trying {output.count(first.rows.count)} rows of {job.id} again")
    if first.left_out:
        why = ", ".join(f"{output.count(count)} {code}" for code, count in sorted(first.left_out.items()))
        output.say(f"left out, since they would be refused again: {why}; --include-invalid tries them all the same")
    execute(plan, as_json=as_json)


def _first(out: Path, new: Path, only: list[Ended] | None, *, include_invalid: bool, other_model: bool) -> Retry:
    """The job to try again, and its rows. Raises `UserError` or the pipeline's own."""
    from pipeline.adapters.folder import FolderStore
    from pipeline.jobs import find_ledger
    from pipeline.retry import RETRIED, choose_rows
    from schemas.results import RowStatus

    out, new = out.expanduser(), new.expanduser()
    if not out.is_dir():
        raise InputError(f"{out}: no such folder; give the OUT of a run")
    if new.resolve() == out.resolve():
        raise UserError(f"--output {new}: is the first job, whose results are never changed; name another folder")
    statuses = RETRIED if only is None else frozenset(RowStatus(status) for status in only)
    with FolderStore(out, read_only=True) as store:
        ledger = find_ledger(store)
        if len(ledger.job().models) != 1:
            raise UserError(f"{out}: the job has several models; only jobs of one can be tried again here")
        return choose_rows(ledger, statuses, include_invalid=include_invalid, other_model=other_model)


def _same_input(job: Job, given: str | None) -> InputRef:
    """The input of the first job, which must hold the same bytes: rows are told by their index."""
    from tokenmill.inputs import pin

    found = pin(given or job.input.uri, job.input)
    if [_bytes_of(file) for file in found.files] != [_bytes_of(file) for file in job.input.files]:
        raise InputError(f"{found.uri}: is not what {job.id} read; put the old input back, or name it with --input")
    return found


def _bytes_of(file: InputFile) -> tuple[int, str | None, str | None]:
    """What tells the bytes of a file; an object in S3 isn't hashed."""
    return file.size, file.sha256, None if file.sha256 is not None else file.etag


def _model(job: Job, given: str | None, cache: Path) -> ChosenModel:
    """The model given, under the name that the requests use, or the one that the job is pinned to."""
    from tokenmill import job_options
    from tokenmill.models import ModelSource

    pin = job.models[0]
    if given is not None:
        chosen = job_options.choose_model(given, cache)
        return job_options.ChosenModel(pin.name, chosen.source) if chosen.name == given else chosen
    path = Path(pin.source)
    if not path.exists():
        raise ModelError(f"{path}: the model that answered in {job.id} is not there any more; give --model")
    return job_options.ChosenModel(pin.name, ModelSource(pin.name, path, pin.revision, 0))


def _settings(first: Retry, max_output_tokens: int | None, cap: int) -> JobSettings:
    """The first job's settings, for the rows that are tried again."""
    from tokenmill.job_options import check_cap

    settings = first.job.settings.model_copy(update={"rows": first.rows})
    if max_output_tokens is None:
        return settings
    check_cap(max_output_tokens, cap, first.job.tier)
    default = min(settings.default_max_tokens, max_output_tokens)
    return settings.model_copy(update={"default_max_tokens": default, "max_output_tokens": max_output_tokens})
