"""The command line, and the wiring of services by the settings. No other package imports it.

In Python it offers functions over the rows of a table: `map` and `preview` (a prompt), `embed`, `classify` and `score`.
`pipeline` runs several of them (`step`) and `filter`s at once, and `watch` shows how far it is. `load_model` keeps a
model loaded for several calls, and `write_dataset` writes such a table as a dataset. They are imported at their first
use, so that `import tokenmill` takes no time.
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, function = _HOMES[name].partition(":")
    return getattr(import_module(f"tokenmill.frames.{module}"), function)
