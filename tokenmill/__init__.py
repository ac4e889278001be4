"""Answers for the rows of tables, computed by a model in this process or on an installation.

map            a prompt over the rows; typed columns of answers
preview        the same for the first rows, printed
embed          a vector of a text of each row
classify       the most probable label of a text of each row
score          how well a document fits a query, in each row
pipeline       several columns at once, made from columns of the table and of each other
step, filter   a column of a pipeline; which rows go on to the steps behind it
watch          how far a pipeline is, from another process
load_model     a model that stays loaded for several calls
write_dataset  such a table as a dataset of the Hugging Face hub

Each has its arguments and an example in its help, such as `help(tokenmill.map)`. All of them take a pandas or polars
DataFrame, an Arrow table, a DuckDB relation, a `datasets.Dataset`, a list of dicts, or the path of files.

The package is also the command line (`tokenmill --help`), and the wiring of services by the settings; no other package
imports it. Functions are imported at their first use, so that `import tokenmill` takes no time.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.frames.data.dataset_folder import write_dataset
    from tokenmill.frames.mapping import map_rows as map  # noqa: A004  # `tokenmill.map`, as users write it
    from tokenmill.frames.mapping import preview
    from tokenmill.frames.pipelines.pipeline import pipeline
    from tokenmill.frames.pipelines.steps import filter_rows as filter  # noqa: A004  # likewise
    from tokenmill.frames.pipelines.steps import step
    from tokenmill.frames.pipelines.watching import watch
    from tokenmill.frames.pooled import classify, embed, score
    from tokenmill.frames.resident import load_model

_HOMES = {
    "classify": "pooled:classify", "embed": "pooled:embed", "filter": "pipelines.steps:filter_rows",
    "load_model": "resident:load_model", "map": "mapping:map_rows", "pipeline": "pipelines.pipeline:pipeline",
    "preview": "mapping:preview", "score": "pooled:score", "step": "pipelines.steps:step",
    "watch": "pipelines.watching:watch", "write_dataset": "data.dataset_folder:write_dataset",
}  # fmt: skip
"""The modules of the functions, and their names there."""

__all__ = [
    "classify", "embed", "filter", "load_model", "map", "pipeline", "preview", "score", "step", "watch",
    "write_dataset",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, function = _HOMES[name].partition(":")
    return getattr(import_module(f"tokenmill.frames.{module}"), function)
