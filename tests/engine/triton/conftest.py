"""Triton's kernels run on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def upcast(device: torch.device) -> bool:
    """Whether products of bfloat16 are to be made in float32: the interpreter's are wrong."""
    return device.type == "cpu"


@pytest.fixture(autouse=True)
def language_is_patched_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter patches Triton's language anew for each call of each function, which takes half its time; here it
    does so once a test for each module of kernels."""
    if device.type != "cpu":
        yield
        return
    from triton.runtime import interpreter  # noqa: PLC0415 - without it, no test here runs

    patch, scopes = interpreter._patch_lang, dict[int, Any]()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in scopes:
            scopes[id(function.__globals__)] = patch(function)
        return interpreter._LangPatchScope()  # restores nothing

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    yield
    for scope in reversed(scopes.values()):
        scope.restore()
