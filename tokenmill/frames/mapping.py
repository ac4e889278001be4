"""`tokenmill.map` and `tokenmill.preview`: a prompt over the rows of a table."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

import pyarrow as pa
from rich.text import Text

from tokenmill.errors import InvalidCall
from tokenmill.frames.arguments import checks_arguments
from tokenmill.frames.calls import TableCall, run_call
from tokenmill.frames.clusters.blocks import runs_where_data_lies
from tokenmill.frames.data.kinds import open_frame
from tokenmill.frames.interrupts import interrupts_plainly
from tokenmill.frames.options import MapKeywords, MapOptions, PreviewKeywords, split_options
from tokenmill.frames.resident import Model
from tokenmill.frames.tasks.chat import chat_task
from tokenmill.frames.tasks.validation import Validate

if TYPE_CHECKING:
    from tokenmill.frames.jobs.estimate import TableEstimate

DataT = TypeVar("DataT")
Files = str | os.PathLike[str]
Dicts = list[dict[str, Any]]


@overload
def map_rows(data: Any, prompt: str, *, dry_run: Literal[True], **given: Unpack[MapKeywords]) -> TableEstimate: ...
@overload
def map_rows(data: Files, prompt: str, *, dry_run: Literal[False] = ..., **given: Unpack[MapKeywords]) -> pa.Table: ...
@overload
def map_rows(
    data: list[dict[str, DataT]], prompt: str, *, dry_run: Literal[False] = ..., **given: Unpack[MapKeywords]
) -> Dicts: ...
@overload
def map_rows(data: DataT, prompt: str, *, dry_run: Literal[False] = ..., **given: Unpack[MapKeywords]) -> DataT: ...
@runs_where_data_lies
def map_rows(
    data: Any,
    prompt: str,
    *,
    model: Model,
    output: Any = str,
    system: str | None = None,
    output_column: str = "answer",
    output_dir: str | os.PathLike[str] | None = None,
    reuse: Any = None,
    validate: Validate | None = None,
    max_tries: int | None = None,
    adapter_column: str | None = None,
    dry_run: bool = False,
    **options: Unpack[MapOptions],
) -> Any:
    """Answer a prompt for each row of a table, with a model in this process or on an installation.

    `preview` answers the first rows only and prints them; `classify`, `score` and `embed` add labels, scores and
    vectors; `pipeline` with `step` and `filter` makes several columns from each other; `write_dataset` saves a table.

    Args:
        data: a pandas or polars DataFrame, an Arrow table, a DuckDB relation, a `datasets.Dataset`, a list of dicts, or
            the path or glob of Parquet, CSV or JSONL files, also on s3://, which are read whole.
        prompt: the user's message, a Jinja template over the columns: `"Is this positive? {{ review }}"`. A null is
            rendered as empty text, and a line on stderr counts them.
            `{% fields a, b %}` writes columns as lines `NAME: VALUE`, in each row in the order that lets the prompts
            share the longest prefixes.
        model: a folder, a GGUF file, a hub name or `"demo"`, as `tokenmill run --model` takes it, which is loaded for
            this call; one that stays loaded (`load_model`); or the name that an installation has for its own. It needs
            a chat template.
        output: the form of the answers: `str`, `Literal["yes", "no"]`, an `Enum`, `bool`, `int`, `float`, `list[str]`,
            a pydantic model, a dataclass, a `TypedDict`, another type that pydantic has a JSON schema for, or such a
            schema as a dict. It is enforced while the model writes.
        system: the system message, a template likewise.
        output_column: the answers' column, and the beginning of the other new columns' names.
        output_dir: the job's folder. The same call after a kill goes on there, and computes no committed row again; on
            an installation it waits for the same job. None: a temporary one.
        reuse: the `output_dir` of a former call, a Parquet file of its results, or the table that it returned, of any
            kind, with its `output_column`. Rows of which it has an answer to an equal request (the same key) take that,
            and are not computed.
        validate: judges an answer before its row ends: `validate(answer)`, or `validate(answer, row)` with the row's
            cells by column. True or None: it is accepted. False, a text that says why, or a raised `ValueError`: the
            row is asked again, with its answer and the reason behind the same messages. Another exception is the
            row's error.
        max_tries: how often a row is asked, at most; 3 with `validate`. Without `validate` the output's own checks
            judge: those of a pydantic model's validators, or of a schema, and whether the answer was cut off.
        adapter_column: with `adapters`, the column that names the adapter that answers each row. Null: the model alone
            does. A name that there is not is its row's error.
        dry_run: compute nothing; return an estimate of tokens, time and cost, of the rows that `reuse` doesn't answer.
        **options: sampling parameters (`temperature`, `max_tokens`, `seed` and so on), as OpenAI and vLLM name them.
            Without `max_tokens` an answer may have 4,096 tokens, which a small model may fill where a text or list has
            no bound (`Field(max_length=200)`);
            and the engine's options (`quantize`, `kv_dtype`, `max_num_seqs` and so on), as `tokenmill run` has them.
            `adapters={"legal": "adapters/legal"}` are LoRA adapters of the model, by name; one without
            `adapter_column` answers all rows.
            In place of the engine's, an installation that answers: `root`, s3://BUCKET/PREFIX or the folder of
            `tokenmill serve`, or `url` of its gateway; with options of its job: `tier`, `deadline` ("6h"),
            `refuse_late`, `max_cost`, `cache`. The call waits for the job's end.

    Returns:
        The same kind of table (of a path: an Arrow table), with the rows in their order and these columns added:

        | column | type | |
        |--|--|--|
        | `answer` | string, enum, int64, bool, struct, list, … | null where the row failed |
        | `answer_error` | string | null where it succeeded |
        | `answer_finish_reason` | string | `stop`, or `length` for an answer cut off by `max_tokens` |
        | `answer_prompt_tokens`, `answer_cached_tokens`, `answer_completion_tokens` | int32 | usage; 0 where reused |
        | `answer_key` | string | equal for equal requests to the same model; null where it was refused |
        | `answer_reused` | bool | whether the answer is a former one |
        | `answer_tries` | int32 | how often the row was asked; null where answers are not judged, or reused |

        With `dry_run` a `TableEstimate`, which prints as a table.

    Raises:
        InvalidCall: (a `ValueError`) an argument can't be used; nothing was computed.
        UserError: the model can't be found, or the job can't run.
        KeyboardInterrupt: it was stopped; what is committed stays, and the message says how to go on. The job of an
            installation goes on.

    Example:
        >>> import polars as pl, tokenmill as tm
        >>> from typing import Literal
        >>> frame = pl.DataFrame({"review": ["Broke on day two.", "Better than I hoped."]})
        >>> tm.map(frame, prompt="Is this review good or bad? {{ review }}", model="demo",
        ...        output=Literal["good", "bad"], temperature=0)  # doctest: +SKIP
    """
    sampling, run = split_options(options, MapKeywords)
    task = chat_task(prompt, system, output, sampling, validate, max_tries, adapter_column)
    return run_call(
        data, task, model, output_column=output_column, output_dir=output_dir, reuse=reuse, dry_run=dry_run,
        options=run,
    )  # fmt: skip


@interrupts_plainly
@checks_arguments
def preview(
    data: Any,
    prompt: str,
    *,
    model: Model,
    output: Any = str,
    system: str | None = None,
    output_column: str = "answer",
    validate: Validate | None = None,
    max_tries: int | None = None,
    adapter_column: str | None = None,
    rows: int = 5,
    **options: Unpack[MapOptions],
) -> None:
    """Answer the first rows, and print each one's prompt, and its answer or why it failed. The arguments are those of
    `map`.

    Example:
        >>> tm.preview(frame, prompt="Is this review good? {{ review }}", model="demo", rows=2)  # doctest: +SKIP
    """
    from tokenmill.output import stdout

    if rows < 1:
        raise InvalidCall(f"rows: is {rows}, but must be at least 1")
    sampling, run = split_options(options, PreviewKeywords)
    task = chat_task(prompt, system, output, sampling, validate, max_tries, adapter_column)
    call = TableCall(open_frame(data).slice(0, rows), task, output_column)
    added = call.compute(model, None, run)
    console = stdout()
    for row, (request, answers) in enumerate(zip(call.requests.requests(), added.to_pylist(), strict=True)):
        console.print(Text(f"row {row}", style="bold"))
        for message in request["messages"]:
            console.print(Text(f"  {message['role']}: {message['content']}"))
        error, tries = answers[f"{output_column}_error"], answers[f"{output_column}_tries"] or 1
        is_cut_off = error is None and answers[f"{output_column}_finish_reason"] == "length"
        notes = [*(["cut off by max_tokens"] if is_cut_off else []), *([f"asked {tries} times"] if tries > 1 else [])]
        said = f"{output_column}: {answers[output_column]}" if error is None else f"{output_column}_error: {error}"
        console.print(Text(f"  {said}" + (f" ({', '.join(notes)})" if notes else "")))
