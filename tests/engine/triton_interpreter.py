"""Triton's interpreter, without most of what it does beside a kernel's own work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def language_patched_once() -> Iterator[None]:
    """The interpreter patches Triton's language anew for each call of each function, which can take half its time.
    Within this context it does so once for each module of kernels."""
    from triton.runtime import interpreter  # noqa: PLC0415 - only where it is installed

    patch, scopes = interpreter._patch_lang, dict[int, Any]()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in scopes:
            scopes[id(function.__globals__)] = patch(function)
        return interpreter._LangPatchScope()  # restores nothing

    with mock.patch.object(interpreter, "_patch_lang", patch_once):
        try:
            yield
        finally:
            for scope in reversed(scopes.values()):
                scope.restore()
