"""`tokenmill bench`: throughput of this machine, as a table and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Self

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug, DType, EngineOption, EngineOptionValues, Json, KvDType, Quantize
from tokenmill.errors import Interrupted
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from tokenmill.config.engine_options import EngineOptions
    from tokenmill.config.job_options import ChosenModel
    from tokenmill.local.bench import Case, Measurement


def bench(
    model: Annotated[
        list[str], typer.Option("--model", "-m", metavar="MODEL", help="As in 'tokenmill run'. One only.")
    ] = ["demo"],  # noqa: B006 - typer only reads it
    engine_name: EngineOption = None,
    engine_option: EngineOptionValues = None,
    dtype: Annotated[DType, typer.Option(help="As in 'tokenmill run'.")] = "auto",
    quantize: Annotated[Quantize, typer.Option(help="As in 'tokenmill run'.")] = "none",
    kv_dtype: Annotated[KvDType, typer.Option(help="As in 'tokenmill run'.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute. Default: one a core.")] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Batch sizes for decode. Repeat for several. [default: 1, 16, 64, 128]"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times each thing is measured, fewer where that takes long.")] = 3,
    rows: Annotated[int, typer.Option(min=1, help="Requests for the pipeline without a model.")] = 2000,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Measure this machine: the scheduler and the pipeline with nothing to compute, then prefill and decode. Of vLLM,
    prefill and decode only.

    It takes about a minute and a half for the demo model on two cores. Each thing is measured at least once, so larger
    models take longer. The result is stored when all of it is measured, and 'tokenmill estimate' and dry runs use it.
    For a workload file of your own, time 'tokenmill run'.
    """
    output.announce_imports()
    from engine.engine import Engine, resolve_device, resolve_dtype
    from engine.models.load import describe_shape
    from tokenmill import bench_results
    from tokenmill.config import job_options
    from tokenmill.config.engine_choice import choose_engines
    from tokenmill.config.engine_options import engine_options
    from tokenmill.local import bench as measure
    from tokenmill.local.dry_run import cache_bytes, sized
    from tokenmill.processes.logging import log_to_stderr
    from workers.model.loaded_model import dtype_name, model_digest, model_path

    log_to_stderr()
    settings = read_settings()
    cache = settings.model_cache
    chosen = job_options.choose_model(job_options.only_model(model), cache)
    path = model_path(chosen.source.path)
    batches = sorted(set(batch or (1, 16, 64, 128)))
    options = engine_options(
        settings, dtype=dtype, threads=threads, max_num_seqs=max(*batches, measure.PREFILL_ROWS), quantize=quantize,
        kv_dtype=kv_dtype, speculate="off", engine=engine_name, engine_option=engine_option,
    )  # fmt: skip
    (chosen,) = choose_engines([chosen], options)
    config = options.config(measure.PREFILL_TOKENS + measure.DECODE_TOKENS)
    if chosen.engine == "vllm":
        _bench_vllm(chosen, options, config, batches, repeats, as_json=as_json)
        return
    spec, _ = describe_shape(path, dtype=resolve_dtype(dtype, resolve_device("auto")))
    cases = measure.cases(spec, config.schedule.rows, batches, repeats)
    with _Stages(2 + len(cases)) as stages:
        stages.begin("scheduler and pipeline, without the model")
        results = [measure.scheduler()]
        rows_per_second = measure.pipeline(chosen, rows)
        unsized = replace(config, schedule=replace(config.schedule, max_num_seqs=None))
        schedule = sized(unsized, spec, path).schedule  # before the engine takes the memory
        stages.begin(f"loading {chosen.name}")
        engine = Engine.load(path, replace(config, own_models=chosen.engine != "transformers"))
        works = measure.timed_cases(engine, stages.of(cases, repeats), repeats)
    times = measure.step_times(works)
    results += [work.measurement for work in works]
    best = max(results[2 : 2 + len(batches)], key=lambda result: result.tokens_per_second)
    speed = bench_results.MeasuredSpeed(
        model=model_digest(path),
        dtype=dtype_name(engine.spec.dtype),
        threads=threads,
        machine=bench_results.this_machine(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        prefill=results[1].tokens_per_second,
        decode=best.tokens_per_second,
        batch=best.rows,
        quantization=quantize,
        kv_dtype=kv_dtype,
        cache_bytes=cache_bytes(engine),
        step_rows=schedule.max_num_seqs,
        step_tokens=schedule.max_num_batched_tokens,
        step_sizes=tuple(sorted(times.by_tokens.items())),
        logit=times.logit,
        read=times.read,
        pair=times.pair,
        engine=chosen.engine or "tokenmill",
    )
    stored_in = bench_results.store_result(speed, cache)
    if as_json:
        output.print_json(
            {
                **asdict(speed),
                "attention": engine.attention_name,
                "pipeline_rows_per_second": rows_per_second,
                "results": [asdict(r) for r in results],
            }
        )
        return
    _show(results)
    output.stdout().print(f"pipeline with a model that answers at once: {output.count(rows_per_second)} rows/s")
    output.say(
        f"{chosen.name}, {output.arithmetic(speed)}, {engine.attention_name}, {speed.machine}; kept in {stored_in}"
    )


class _Stages:
    """Announces the numbered stages of a measurement, each with the time left as far as it is known; Ctrl-C within its
    `with` block says what it costs.

    Args:
        total: number of the stages.
    """

    def __init__(self, total: int) -> None:
        self._total, self._number = total, 0
        self._began = time.monotonic()
        self._left: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            return
        spent = time.monotonic() - self._began
        left = "" if self._left is None else f" of about {output.duration(spent + self._left)}"
        raise Interrupted(
            f"interrupted in stage {self._number} of {self._total}, after {output.duration(spent)}{left}: nothing was "
            "stored, because an estimate needs all stages"
        )

    def begin(self, name: str) -> None:
        """Begin the next stage."""
        self._number += 1
        left = "" if self._left is None else f" (about {output.duration(self._left)} left)"
        output.say(f"{self._number} of {self._total}: {name}{left}")

    def of(self, cases: Sequence[Case], repeats: int) -> Iterator[Case]:
        """The cases, each one a stage."""
        from tokenmill.local.bench import seconds_left

        done: list[tuple[Case, float]] = []
        for index, case in enumerate(cases):
            self._left = seconds_left(done, cases[index:], repeats)
            self.begin(case.name)
            began = time.monotonic()
            yield case
            done.append((case, time.monotonic() - began))


def _bench_vllm(
    chosen: ChosenModel,
    options: EngineOptions,
    config: EngineConfig,
    batches: list[int],
    repeats: int,
    *,
    as_json: bool,
) -> None:
    """Measure vLLM, whose steps are its own: two rates, from which an estimate is rough."""
    from tokenmill import bench_results
    from tokenmill.local import bench as measure
    from workers.model.loaded_model import LoadedModel

    cases = measure.rate_cases(batches, repeats)
    with _Stages(1 + len(cases)) as stages:
        stages.begin(f"loading {chosen.name}")
        model = LoadedModel.load(
            chosen.source.path, name=chosen.name, config=config, engine_name="vllm", vllm_options=options.vllm
        )
        results = [
            measure.rate(model.engine, model.limits.vocab_size, case, repeats) for case in stages.of(cases, repeats)
        ]
    best = max(results[1:], key=lambda result: result.tokens_per_second)
    speed = bench_results.MeasuredSpeed(
        model=str(model.digest),
        dtype=model.dtype,
        threads=options.threads,
        machine=bench_results.this_machine(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        prefill=results[0].tokens_per_second,
        decode=best.tokens_per_second,
        batch=best.rows,
        kv_dtype=options.kv_dtype,
        engine="vllm",
        engine_options=bench_results.options_key(options.vllm),
    )
    stored_in = bench_results.store_result(speed, read_settings().model_cache)
    if as_json:
        output.print_json({**asdict(speed), "results": [asdict(result) for result in results]})
        return
    _show(results)
    output.say(f"{chosen.name}, {output.arithmetic(speed)}, vLLM {model.engine_version}; kept in {stored_in}")


def _show(results: list[Measurement]) -> None:
    cells = [
        (
            result.name,
            output.count(result.tokens_per_second),
            f"{output.count(result.slowest)} - {output.count(result.fastest)}",
            f"{result.step_ms:.2f}",
        )
        for result in results
    ]
    columns = ("", "tokens/s", "range", "ms a step")
    output.stdout().print(output.table(None, columns, cells, right=columns[1:]))
