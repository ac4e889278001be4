"""The command line, and the wiring of services by the settings. No other package imports it.

In Python it offers functions over the rows of a table: `map` and `preview` (a prompt), `embed`, `classify` and `score`.
`load_model` keeps a model loaded for several of them, and `write_dataset` writes such a table as a dataset. They are
imported at their first use, so that `import tokenmill` takes no time.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.frames.data.dataset_folder import write_dataset
    from tokenmill.frames.mapping import map_rows as map  # noqa: A004  # `tokenmill.map`, as users write it
    from tokenmill.frames.mapping import preview
    from tokenmill.frames.pooled import classify, embed, score
    from tokenmill.frames.resident import load_model

_HOMES = {
    "classify": "pooled", "embed": "pooled", "load_model": "resident", "map": "mapping", "preview": "mapping",
    "score": "pooled", "write_dataset": "data.dataset_folder",
}  # fmt: skip
"""The modules of the functions."""

__all__ = ["classify", "embed", "load_model", "map", "preview", "score", "write_dataset"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"tokenmill.frames.{_HOMES[name]}"), "map_rows" if name == "map" else name)
