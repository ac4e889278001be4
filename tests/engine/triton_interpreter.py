"""Triton's interpreter for tests: without most of what it does beside a kernel's own work; addresses are checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray


@contextmanager
def patched_interpreter() -> Iterator[None]:
    """Within this context the interpreter patches Triton's language once for each module of kernels, not anew for each
    call of each function, which can take half its time; and a kernel that reads or writes outside its tensors raises,
    where a GPU would end the process or read what lies there."""
    from triton.runtime import interpreter  # noqa: PLC0415 - only where it is installed

    patch, scopes = interpreter._patch_lang, dict[int, Any]()
    executor, builder, tensors = interpreter.GridExecutor, interpreter.InterpreterBuilder, _Tensors()
    take, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in scopes:
            scopes[id(function.__globals__)] = patch(function)
        return interpreter._LangPatchScope()  # restores nothing

    def take_arguments(self: Any, args: Any, kwargs: Any) -> Any:
        found = take(self, args, kwargs)
        tensors.replace(self.fn.__name__, [*found[0], *found[1].values()])
        return found

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        tensors.check(pointers, mask, interpreter._get_np_dtype(pointers.get_element_ty()))
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        tensors.check(pointers, mask, interpreter._get_np_dtype(pointers.get_element_ty()))
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(executor, "_init_args_hst", take_arguments),
        mock.patch.object(builder, "create_masked_load", checked_load),
        mock.patch.object(builder, "create_masked_store", checked_store),
    ):
        try:
            yield
        finally:
            for scope in reversed(scopes.values()):
                scope.restore()


class _Tensors:
    """The tensors of the launch that runs: where they begin in memory, in order, and where those up to each one end."""

    def __init__(self) -> None:
        self._kernel = ""
        self._begins = self._ends = np.zeros(0, np.uint64)

    def replace(self, kernel: str, arguments: list[Any]) -> None:
        """Of a launch with these arguments."""
        tensors = [each for each in arguments if hasattr(each, "data_ptr") and each.numel()]
        ranges = sorted((each.data_ptr(), each.data_ptr() + _bytes(each)) for each in tensors)
        begins, ends = np.array(ranges, np.uint64).reshape(-1, 2).T
        self._kernel, self._begins, self._ends = kernel, begins, np.maximum.accumulate(ends)

    def check(self, pointers: Any, mask: Any, dtype: Any) -> None:
        """Raise AssertionError where the mask lets an address outside all of them through."""
        at: NDArray[np.uint64] = pointers.data.astype(np.uint64)[np.broadcast_to(mask.data, pointers.data.shape) != 0]
        last = np.searchsorted(self._begins, at, side="right")
        inside = (last > 0) & (at + np.uint64(np.dtype(dtype).itemsize) <= self._ends[last - 1]) if at.size else True
        assert np.all(inside), f"{self._kernel} reads or writes outside its tensors"


def _bytes(tensor: torch.Tensor) -> int:
    """From its first element to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
