"""`tokenmill.map` and `tokenmill.preview`: a prompt over the rows of a table."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Unpack, overload

import pyarrow as pa
from rich.text import Text

from tokenmill.errors import InvalidCall
from tokenmill.frames.answers import AnswerForm, answer_form
from tokenmill.frames.data import Frame, open_frame
from tokenmill.frames.options import Options, split_options
from tokenmill.frames.prompts import PromptTemplate

if TYPE_CHECKING:
    from tokenmill.frames.job import TableEstimate
    from tokenmill.frames.requests import TableRequests

DataT = TypeVar("DataT")

SUFFIXES = ("", "_error", "_finish_reason", "_prompt_tokens", "_cached_tokens", "_completion_tokens", "_key", "_reused")
"""Of the new columns' names."""


@overload
def map_rows(
    data: Any, *, prompt: str, model: str, output: Any = ..., system: str | None = ..., output_column: str = ...,
    output_dir: str | os.PathLike[str] | None = ..., reuse: Any = ...,
    dry_run: Literal[True], **options: Unpack[Options],
) -> TableEstimate: ...  # fmt: skip
@overload
def map_rows(
    data: str | os.PathLike[str], *, prompt: str, model: str, output: Any = ..., system: str | None = ...,
    output_column: str = ..., output_dir: str | os.PathLike[str] | None = ...,
    reuse: Any = ..., dry_run: Literal[False] = ..., **options: Unpack[Options],
) -> pa.Table: ...  # fmt: skip
@overload
def map_rows(
    data: list[dict[str, DataT]], *, prompt: str, model: str, output: Any = ..., system: str | None = ...,
    output_column: str = ..., output_dir: str | os.PathLike[str] | None = ...,
    reuse: Any = ..., dry_run: Literal[False] = ..., **options: Unpack[Options],
) -> list[dict[str, Any]]: ...  # fmt: skip
@overload
def map_rows(
    data: DataT, *, prompt: str, model: str, output: Any = ..., system: str | None = ..., output_column: str = ...,
    output_dir: str | os.PathLike[str] | None = ..., reuse: Any = ...,
    dry_run: Literal[False] = ..., **options: Unpack[Options],
) -> DataT: ...  # fmt: skip
def map_rows(
    data: Any,
    *,
    prompt: str,
    model: str,
    output: Any = str,
    system: str | None = None,
    output_column: str = "answer",
    output_dir: str | os.PathLike[str] | None = None,
    reuse: Any = None,
    dry_run: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Answer a prompt for each row of a table, with a model in this process.

    Args:
        data: a pandas or polars DataFrame, an Arrow table, a DuckDB relation, a list of dicts, or the path or glob of
            Parquet, CSV or JSONL files, which are read whole.
        prompt: the user's message, a Jinja template over the columns: `"Is this positive? {{ review }}"`.
            `{% fields a, b %}` writes columns as lines `NAME: VALUE`, in each row in the order that lets the prompts
            share the longest prefixes.
        model: a folder, a GGUF file, a hub name or `"demo"`, as `tokenmill run --model` takes it. It needs a chat
            template.
        output: the form of the answers: `str`, `Literal["yes", "no"]`, a pydantic model, or a JSON schema as a dict.
            It is enforced while the model writes.
        system: the system message, a template likewise.
        output_column: the answers' column, and the beginning of the other new columns' names.
        output_dir: the job's folder. The same call after a kill goes on there, and computes no committed row again.
            None: a temporary one.
        reuse: the `output_dir` of a former call, a Parquet file of its results, or the table that it returned, of any
            kind, with its `output_column`. Rows of which it has an answer to an equal request (the same key) take that,
            and are not computed.
        dry_run: compute nothing; return an estimate of tokens, time and cost.
        **options: sampling parameters (`temperature`, `max_tokens`, `seed` and so on), as OpenAI and vLLM name them;
            and the engine's options (`quantize`, `kv_dtype`, `max_num_seqs` and so on), as `tokenmill run` has them.

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

        With `dry_run` a `TableEstimate`, which prints as a table.

    Raises:
        InvalidCall: (a `ValueError`) an argument can't be used; nothing was computed.
        UserError: the model can't be found, or the job can't run.
        KeyboardInterrupt: it was stopped; with an `output_dir` the same call goes on.

    Example:
        >>> import polars as pl, tokenmill as tm
        >>> from typing import Literal
        >>> frame = pl.DataFrame({"review": ["Broke on day two.", "Better than I hoped."]})
        >>> tm.map(frame, prompt="Is this review good or bad? {{ review }}", model="demo",
        ...        output=Literal["good", "bad"], temperature=0)  # doctest: +SKIP
    """
    frame = open_frame(data)
    sampling, engine = split_options(options)
    call = check_call(frame, prompt, system, output, output_column, sampling)
    if dry_run:
        if reuse is not None:
            raise InvalidCall("reuse: an estimate is of all rows; leave out reuse or dry_run")
        from tokenmill.frames.job import TableJob, engine_of

        return TableJob(call.requests, model, call.body, engine=engine_of(engine)).estimate()
    return frame.with_columns(_answer(call, frame, model, output_dir, engine, reuse))


def preview(
    data: Any,
    *,
    prompt: str,
    model: str,
    output: Any = str,
    system: str | None = None,
    output_column: str = "answer",
    rows: int = 5,
    **options: Unpack[Options],
) -> None:
    """Answer the first rows, and print each one's prompt, answer and new columns. The arguments are those of `map`.

    Example:
        >>> tm.preview(frame, prompt="Is this review good? {{ review }}", model="demo", rows=2)  # doctest: +SKIP
    """
    from tokenmill.output import stdout

    if rows < 1:
        raise InvalidCall(f"rows: is {rows}, but must be at least 1")
    frame = open_frame(data).head(rows)
    sampling, engine = split_options(options)
    call = check_call(frame, prompt, system, output, output_column, sampling)
    added = _answer(call, frame, model, None, engine)
    console = stdout()
    for row, (messages, answers) in enumerate(zip(call.requests.messages(), added.to_pylist(), strict=True)):
        console.print(Text(f"row {row}", style="bold"))
        for message in messages:
            console.print(Text(f"  {message['role']}: {message['content']}"))
        for name, value in answers.items():
            console.print(Text(f"  {name}: {value}"))


class TableCall(NamedTuple):
    """A checked call."""

    requests: TableRequests
    form: AnswerForm
    body: dict[str, Any]
    names: tuple[str, ...]  # of the new columns


def check_call(
    frame: Frame, prompt: str, system: str | None, output: Any, output_column: str, sampling: Mapping[str, Any],
    parts: tuple[str, str] = ("prompt", "system"),
) -> TableCall:  # fmt: skip
    """Check everything that needs no model. `parts`: the templates' names in messages. Raises `InvalidCall`."""
    from tokenmill.frames.requests import TableRequests

    names = tuple(output_column + suffix for suffix in SUFFIXES)
    for name in names:
        if name in frame.columns:
            raise InvalidCall(
                f"output_column: the data has a column {name!r} already; give another one, such as {_free(frame)!r}"
            )
    form = answer_form(output)
    templates = PromptTemplate(prompt, parts[0]), None if system is None else PromptTemplate(system, parts[1])
    return TableCall(TableRequests(frame, *templates), form, {**form.body, **sampling}, names)


def _free(frame: Frame) -> str:
    """An output column without a clash."""
    number = 2
    while any(f"answer_{number}{suffix}" in frame.columns for suffix in SUFFIXES):
        number += 1
    return f"answer_{number}"


def _answer(
    call: TableCall, frame: Frame, model: str, output_dir: str | os.PathLike[str] | None, engine: Mapping[str, Any],
    reuse: Any = None,
) -> pa.Table:  # fmt: skip
    """The new columns. A table without rows loads nothing."""
    from tokenmill.frames.former import former_results
    from tokenmill.frames.job import COLUMNS, TableJob, engine_of, job_folder

    job = TableJob(call.requests, model, call.body, engine=engine_of(engine))
    if not len(frame):
        return answer_columns(call, dict.fromkeys(COLUMNS, ()))
    with job_folder(None if output_dir is None else Path(output_dir)) as folder, tempfile.TemporaryDirectory() as other:
        former = None if reuse is None else former_results(reuse, call.form, call.names[0], Path(other))
        results = job.run(folder, former)
    if results.num_rows != len(frame):
        raise InvalidCall(f"the job has {results.num_rows} results for {len(frame)} rows; give another output_dir")
    return answer_columns(call, results.to_pydict())


def answer_columns(call: TableCall, results: Mapping[str, Sequence[Any]]) -> pa.Table:
    """The new columns from the results' columns."""
    values: list[Any] = []
    errors: list[str | None] = []
    for text, reason, code, message in zip(
        results["text"], results["finish_reason"], results["error_code"], results["error_message"], strict=True
    ):
        value, error = None, f"{code}: {message}" if code is not None or text is None else None
        if error is None and reason == "length" and not call.form.is_text:
            error = "incomplete_answer: it reached max_tokens; raise max_tokens"
        if error is None:
            try:
                value = call.form.parse(text)
            except ValueError as wrong:
                error = f"invalid_answer: {wrong}"
        values.append(value)
        errors.append(error)
    columns = [call.form.column(values), pa.array(errors, pa.string())]
    columns.append(pa.array(results["finish_reason"], pa.string()))
    columns += [pa.array(results[name], pa.int32()) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")]
    columns.append(pa.array(results["request_key"], pa.string()))
    columns.append(pa.array([origin is not None for origin in results["reused_from"]], pa.bool_()))
    return pa.table(columns, names=list(call.names))
