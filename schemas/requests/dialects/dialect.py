"""A dialect is another spelling of a chat request and of its response, such as OpenAI's Responses API.

A dialect's request becomes a `ChatBody` where it is parsed; shards and the lane hold that. So planner, worker and
engine compute a chat, and only its response (and the events of its stream) are written in the dialect again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from schemas.requests.bodies import ChatBody
from schemas.requests.errors import RowError


class DialectBody(BaseModel):
    """A request's body in a dialect, under the dialect's own field names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=1024)]

    def to_chat(self) -> ChatBody:
        """The same request as a chat. Raises pydantic's ValidationError, which may name the chat's fields."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Dialect:
    """The parts of a dialect.

    Attributes:
        body: parses a request.
        response: rewrites a complete chat response (one choice), given the request's chat body. A pure function.
        no_change: known but unsupported parameters, with the values (besides null) that mean the same as absence.
        hints: what to do instead of such a parameter.
        names: parameters of the chat, and their names in the dialect; `.a` is a field of a list's item.
        repeated: fields of the chat that no answer depends on, but that the response repeats.
    """

    body: type[DialectBody]
    response: Callable[[Mapping[str, Any], ChatBody], dict[str, Any]]
    no_change: Mapping[str, tuple[Any, ...]]
    hints: Mapping[str, str]
    names: Mapping[str, str]
    repeated: frozenset[str] = frozenset()

    def translate(self, error: RowError) -> RowError:
        """The error of a chat, with the dialect's names for its parameters."""
        param = None if error.param is None else self.rename(error.param)
        message = self.rename_in(error.message, error.fields)
        fields = [self.rename(name) for name in error.fields]
        return RowError(error.code, message, param=param, fields=fields, line=error.line)

    def rename(self, param: str) -> str:
        """The dialect's name of a chat's parameter, or of a path that begins with it."""
        if not self.names:
            return param
        words = "|".join(map(re.escape, sorted(self.names, key=len, reverse=True)))
        return re.sub(
            rf"^(\w+\[\d+\])?({words})(?!\w)", lambda found: (found[1] or "") + self.names[found[2]], param, count=1
        )

    def rename_in(self, message: str, fields: Sequence[str]) -> str:
        """The message with the dialect's names of the fields that it names (`RowError.fields`), and of nothing else: it
        may quote the caller, who may have named a tool `stop`."""
        made, rest = "", message
        for name in fields:
            before, found, behind = rest.partition(name)
            if found:
                made, rest = f"{made}{before}{self.rename(name)}", behind
        return made + rest
