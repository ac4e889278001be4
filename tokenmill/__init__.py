"""The command line, and the wiring of services by the settings. No other package imports it.

In Python it offers `tokenmill.map` and `tokenmill.preview`: a prompt over the rows of a table. They are imported at
their first use, so that `import tokenmill` takes no time.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.frames.mapping import map_rows as map  # noqa: A004  # `tokenmill.map`, as users write it
    from tokenmill.frames.mapping import preview

__all__ = ["map", "preview"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tokenmill.frames import mapping

    return mapping.map_rows if name == "map" else mapping.preview
