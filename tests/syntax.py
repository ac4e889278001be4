"""Syntax trees of this repository's files, for the tests of its conventions."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def parsed(path: Path) -> ast.Module:
    """The file's syntax tree.

    Without garbage collection meanwhile: before 3.11.8, Python counts the depth of all threads' trees together, so
    that a finalizer that lets another thread go on fails the parse with `SystemError` (github.com/python/cpython,
    issue 106905).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    finally:
        if enabled:
            gc.enable()
