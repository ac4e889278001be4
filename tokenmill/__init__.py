"""The command line, and the wiring of services by the settings. No other package imports it.

In Python it offers functions over the rows of a table: `map` and `preview` (a prompt), `embed`, `classify` and `score`.
They are imported at their first use, so that `import tokenmill` takes no time.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.frames.mapping import map_rows as map  # noqa: A004  # `tokenmill.map`, as users write it
    from tokenmill.frames.mapping import preview
    from tokenmill.frames.pooled import classify, embed, score

__all__ = ["classify", "embed", "map", "preview", "score"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tokenmill.frames import mapping, pooled

    return mapping.map_rows if name == "map" else getattr(mapping, name, None) or getattr(pooled, name)
