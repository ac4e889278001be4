"""`tokenmill.embed`, `tokenmill.classify` and `tokenmill.score`: numbers and labels for the rows of a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.calls import run_call
from tokenmill.frames.clusters.blocks import runs_where_data_lies
from tokenmill.frames.mapping import DataT, Dicts, Files
from tokenmill.frames.options import ClassifyKeywords, EmbedKeywords, RunKeywords, ScoreKeywords, check_options
from tokenmill.frames.prompts import ColumnText, PromptTemplate, RowText
from tokenmill.frames.resident import Model
from tokenmill.frames.tasks.labels import label_task
from tokenmill.frames.tasks.scores import score_task
from tokenmill.frames.tasks.vectors import vector_task

if TYPE_CHECKING:
    from tokenmill.frames.jobs.estimate import TableEstimate


@overload
def embed(data: Any, *, dry_run: Literal[True], **given: Unpack[EmbedKeywords]) -> TableEstimate: ...
@overload
def embed(data: Files, *, dry_run: Literal[False] = ..., **given: Unpack[EmbedKeywords]) -> pa.Table: ...
@overload
def embed(data: list[dict[str, DataT]], *, dry_run: Literal[False] = ..., **given: Unpack[EmbedKeywords]) -> Dicts: ...
@overload
def embed(data: DataT, *, dry_run: Literal[False] = ..., **given: Unpack[EmbedKeywords]) -> DataT: ...
@runs_where_data_lies
def embed(
    data: Any,
    *,
    model: Model,
    text: str | None = None,
    column: str | None = None,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    output_column: str = "embedding",
    output_dir: str | os.PathLike[str] | None = None,
    reuse: Any = None,
    dry_run: bool = False,
    **options: Unpack[RunKeywords],
) -> Any:
    """Embed a text of each row of a table, with a model in this process or on an installation.

    Args:
        data: as `tokenmill.map` takes it.
        model: a folder in the layout of sentence-transformers, or a hub name; or a loaded one (`load_model`).
        text: a Jinja template over the columns: `"{{ title }} {{ body }}"`.
        column: in place of `text`, the name of a column that is embedded as it stands.
        dimensions: keep the first numbers of each vector, scaled to length 1 again if the model's vectors are.
        prompt_name: which of the model's prompts precedes each text, such as `"query"`. None: the model's default.
        output_column: the vectors' column, and the beginning of the other new columns' names.
        output_dir, reuse, dry_run: as `tokenmill.map` has them.
        **options: the engine's options, as `tokenmill run` has them; or an installation, as `tokenmill.map` has it.

    Returns:
        The same kind of table (of a path: an Arrow table), with the rows in their order and these columns added:

        | column | type | |
        |--|--|--|
        | `embedding` | fixed-size list of float32 | polars `Array`, DuckDB `FLOAT[n]`, numpy arrays in pandas; null where the row failed |
        | `embedding_error` | string | null where it succeeded |
        | `embedding_prompt_tokens`, `embedding_cached_tokens` | int32 | usage; 0 where reused |
        | `embedding_key` | string | equal for equal requests to the same model; null where it was refused |
        | `embedding_reused` | bool | whether the vector is a former one |

        With `dry_run` a `TableEstimate`, which prints as a table.

    Raises:
        As `tokenmill.map`; `InvalidCall` also if the model makes no embeddings.

    Example:
        >>> tm.embed(frame, column="body", model="./all-MiniLM-L6-v2")  # doctest: +SKIP
    """  # noqa: E501  # a row of the table
    run = check_options(options, EmbedKeywords)
    task = vector_task(_one_text(text, column), dimensions, prompt_name)
    return run_call(
        data, task, model, output_column=output_column, output_dir=output_dir, reuse=reuse, dry_run=dry_run,
        options=run,
    )  # fmt: skip


@overload
def classify(data: Any, *, dry_run: Literal[True], **given: Unpack[ClassifyKeywords]) -> TableEstimate: ...
@overload
def classify(data: Files, *, dry_run: Literal[False] = ..., **given: Unpack[ClassifyKeywords]) -> pa.Table: ...
@overload
def classify(
    data: list[dict[str, DataT]], *, dry_run: Literal[False] = ..., **given: Unpack[ClassifyKeywords]
) -> Dicts: ...
@overload
def classify(data: DataT, *, dry_run: Literal[False] = ..., **given: Unpack[ClassifyKeywords]) -> DataT: ...
@runs_where_data_lies
def classify(
    data: Any,
    *,
    model: Model,
    text: str | None = None,
    column: str | None = None,
    labels: Sequence[str] | None = None,
    text_pair: str | None = None,
    system: str | None = None,
    normalize: Literal["sum", "mean"] | None = None,
    truncate_prompt_tokens: int | None = None,
    adapter_column: str | None = None,
    output_column: str = "label",
    output_dir: str | os.PathLike[str] | None = None,
    reuse: Any = None,
    dry_run: bool = False,
    **options: Unpack[RunKeywords],
) -> Any:
    """Label a text of each row of a table, with a model in this process or on an installation.

    A classifier (`…ForSequenceClassification`) has labels of its own. With `labels`, a model that generates takes them
    as choices: the text is the user's message, which should ask the question, and each label is scored as the answer.

    Args:
        data: as `tokenmill.map` takes it.
        model: a folder or a hub name; with `labels` also a GGUF file or `"demo"`.
        text: a Jinja template over the columns; with `labels` it may have `{% fields %}`.
        column: in place of `text`, the name of a column that is classified as it stands.
        labels: the labels of a model that generates.
        text_pair: a template of the second text, for classifiers of pairs: `text` is the premise, this the hypothesis.
        system: with `labels`, a template of the system message.
        normalize: with `labels`, compare them by the sum of their tokens' log-probabilities (the default), or by the
            mean, with which long ones don't lose for their length.
        truncate_prompt_tokens: tokens of a text beyond which its end is cut off; -1: those that the model takes. None:
            the row of a longer one fails. Not with `labels`.
        adapter_column: with `labels` and `adapters`, the column that names each row's adapter, as of `tokenmill.map`.
        output_column: the labels' column, and the beginning of the other new columns' names.
        output_dir, reuse, dry_run: as `tokenmill.map` has them.
        **options: the engine's options, as `tokenmill run` has them; or an installation, as `tokenmill.map` has it.

    Returns:
        The same kind of table (of a path: an Arrow table), with the rows in their order and these columns added:

        | column | type | |
        |--|--|--|
        | `label` | enum of the labels | the most probable one; null where the row failed |
        | `label_probability` | float64 | of this label |
        | `label_probabilities` | struct of float64 | of each label |
        | `label_error`, `label_prompt_tokens`, `label_cached_tokens`, `label_key`, `label_reused` | | as of `tokenmill.embed` |

        With `dry_run` a `TableEstimate`, which prints as a table.

    Raises:
        As `tokenmill.map`; `InvalidCall` also if the model has no labels.

    Example:
        >>> tm.classify(frame, text="Is this spam? {{ body }}", labels=["yes", "no"], model="demo")  # doctest: +SKIP
    """  # noqa: E501  # a row of the table
    run = check_options(options, ClassifyKeywords)
    body = {"normalize": normalize, "truncate_prompt_tokens": truncate_prompt_tokens}
    pair = None if text_pair is None else PromptTemplate(text_pair, "text_pair")
    message = None if system is None else PromptTemplate(system, "system")
    task = label_task(_one_text(text, column), pair, message, labels, _given(body), adapter_column)
    return run_call(
        data, task, model, output_column=output_column, output_dir=output_dir, reuse=reuse, dry_run=dry_run,
        options=run,
    )  # fmt: skip


@overload
def score(data: Any, *, dry_run: Literal[True], **given: Unpack[ScoreKeywords]) -> TableEstimate: ...
@overload
def score(data: Files, *, dry_run: Literal[False] = ..., **given: Unpack[ScoreKeywords]) -> pa.Table: ...
@overload
def score(data: list[dict[str, DataT]], *, dry_run: Literal[False] = ..., **given: Unpack[ScoreKeywords]) -> Dicts: ...
@overload
def score(data: DataT, *, dry_run: Literal[False] = ..., **given: Unpack[ScoreKeywords]) -> DataT: ...
@runs_where_data_lies
def score(
    data: Any,
    *,
    query: str,
    document: str,
    model: Model,
    instruction: str | None = None,
    truncate_prompt_tokens: int | None = None,
    score_tokens: tuple[str, str] | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    output_column: str = "score",
    output_dir: str | os.PathLike[str] | None = None,
    reuse: Any = None,
    dry_run: bool = False,
    **options: Unpack[RunKeywords],
) -> Any:
    """Score how well a document fits a query, in each row of a table, with a reranker in this process
    or on an installation.

    Args:
        data: as `tokenmill.map` takes it.
        query: a Jinja template over the columns: `"{{ question }}"`, or one text for all rows.
        document: a template likewise: `"{{ passage }}"`.
        model: a folder or a hub name of a CrossEncoder, or of a reranker that generates.
        instruction: what makes a document relevant, for rerankers that read one.
        truncate_prompt_tokens: tokens of a pair beyond which its longer text is cut; -1: those that the model takes.
            None: the row of a longer one fails.
        score_tokens: the tokens that mean no and yes to a reranker that generates: `("no", "yes")`. None: those that
            its files name.
        chat_template: the template of such a reranker's pairs: the path of one, or `"qwen3_reranker"`, which comes with
            this package. None: the model's own.
        output_column: the scores' column, and the beginning of the other new columns' names.
        output_dir, reuse, dry_run: as `tokenmill.map` has them. `dry_run` takes no `score_tokens` or `chat_template`.
        **options: the engine's options, as `tokenmill run` has them; or an installation, as `tokenmill.map` has it.

    Returns:
        The same kind of table (of a path: an Arrow table), with the rows in their order and these columns added:

        | column | type | |
        |--|--|--|
        | `score` | float64 | null where the row failed |
        | `score_error`, `score_prompt_tokens`, `score_cached_tokens`, `score_key`, `score_reused` | | as of `tokenmill.embed` |

        With `dry_run` a `TableEstimate`, which prints as a table.

    Raises:
        As `tokenmill.map`; `InvalidCall` also if the model gives no scores.

    Example:
        >>> tm.score(frame, query="what is a river?", document="{{ passage }}", model="./bge-reranker-base")  # doctest: +SKIP
    """  # noqa: E501  # a row of the table
    from workers.text.chat_options import ChatOptions

    run = check_options(options, ScoreKeywords)
    if dry_run and (score_tokens is not None or chat_template is not None):
        raise InvalidCall("dry_run: takes no score_tokens, and no chat_template; leave them out")
    chat = ChatOptions(template=_template(chat_template), score_tokens=_tokens(score_tokens))
    body = {"instruction": instruction, "truncate_prompt_tokens": truncate_prompt_tokens}
    task = score_task(PromptTemplate(query, "query"), PromptTemplate(document, "document"), _given(body), chat)
    return run_call(
        data, task, model, output_column=output_column, output_dir=output_dir, reuse=reuse, dry_run=dry_run,
        options=run,
    )  # fmt: skip


def _one_text(text: str | None, column: str | None) -> RowText:
    if (text is None) == (column is None):
        raise InvalidCall('text: give either text, such as "{{ title }} {{ body }}", or column, such as "body"')
    return PromptTemplate(text, "text") if text is not None else ColumnText(str(column))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _tokens(given: Any) -> tuple[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, tuple | list) or [type(token) for token in given] != [str, str] or not all(given):
        raise InvalidCall(f'score_tokens: must be two tokens, such as ("no", "yes"), not {given!r}')
    return given[0], given[1]


def _template(path: str | os.PathLike[str] | None) -> str | None:
    from workers.text.chat_options import read_template

    try:
        return None if path is None else read_template(Path(path))
    except ValueError as error:
        raise InvalidCall(f"chat_template: {path}: {error}") from error
