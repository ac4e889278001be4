"""A checkpoint's `quantization_config`, validated as untrusted input.

Modules are selected by lists of names and by regular expressions. An expression may be crafted to run very long, so all
share a time budget, and a config that exceeds it is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, TypeVar

import regex
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import UnsupportedModel

_SECONDS = 1.0
"""For all matches of one list of patterns."""
_REPEATS = regex.compile(r"(\d+),?\}")
_MOST_REPEATS = 10_000
"""The product of all counts ("{2,30}") in an expression: nested ones take so long to compile, or to match."""

Text = Annotated[str, Field(max_length=2000)]
Names = Annotated[list[Text], Field(max_length=100_000)]
GroupSize = Annotated[int, Field(strict=True, ge=-1, le=1 << 20)]


class FormatSettings(BaseModel):
    """Base of what a method's settings are read into; keys that say nothing about the numbers are passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


S = TypeVar("S", bound=FormatSettings)


def read_settings(kind: type[S], values: Mapping[str, Any]) -> S:
    """The settings of one method.

    Raises:
        UnsupportedModel: in one line that names the key.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, ("quantization_config", *first["loc"])))
        given = repr(first["input"])
        given = given if len(given) <= 80 else f"{given[:77]}..."
        raise UnsupportedModel(f"{key} is {given}: {first['msg'][:200]}") from error
    except RecursionError as error:
        raise UnsupportedModel("quantization_config nests too deep") from error


class Patterns:
    """Names of modules, exact ones and regular expressions, in order."""

    def __init__(self, key: str, exact: Sequence[str], expressions: Sequence[str] = ()) -> None:
        """`key`: where they come from, for messages.

        Raises:
            UnsupportedModel: one is no regular expression.
        """
        self._key = key
        self._exact = frozenset(exact)
        self._left = _SECONDS
        self._expressions = []
        for expression in expressions:
            if prod(int(most) for most in _REPEATS.findall(expression)) > _MOST_REPEATS:
                raise UnsupportedModel(f"{key} holds {expression[:80]!r}, which repeats parts too often")
            try:
                self._expressions.append(regex.compile(expression))
            except (regex.error, RecursionError, OverflowError, MemoryError) as error:
                raise UnsupportedModel(f"{key} holds {expression[:80]!r}, no regular expression: {error}") from error

    @classmethod
    def prefixed(cls, key: str, names: Sequence[str]) -> Patterns:
        """Of names among which regular expressions start with "re:"."""
        expressions = [name.removeprefix("re:") for name in names if name.startswith("re:")]
        return cls(key, [name for name in names if not name.startswith("re:")], expressions)

    def match(self, name: str) -> bool:
        """Whether the name is one of them, or an expression matches from its start.

        Raises:
            UnsupportedModel: the expressions took too long.
        """
        return name in self._exact or any(self._matches(expression, name) for expression in self._expressions)

    def _matches(self, expression: Any, name: str) -> bool:
        begun = time.monotonic()
        try:
            return expression.match(name, timeout=max(self._left, 1e-3)) is not None
        except TimeoutError as error:
            raise UnsupportedModel(
                f"{self._key} holds {expression.pattern[:80]!r}, which takes too long to match"
            ) from error
        finally:
            self._left -= time.monotonic() - begun
