"""A dialect is another spelling of a chat request and of its response, such as OpenAI's Responses API.

A dialect's request becomes a `ChatBody` where it is parsed; shards and the lane hold that. So planner, worker and
engine compute a chat, and only its response (and the events of its stream) are written in the dialect again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from schemas.requests.bodies import ChatBody
from schemas.requests.errors import RowError

_UNCOMPILED: Final = " can't be compiled: "
"""What stands in a worker's message between the parameter and the path of the schema in it."""


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
    """

    body: type[DialectBody]
    response: Callable[[Mapping[str, Any], ChatBody], dict[str, Any]]
    no_change: Mapping[str, tuple[Any, ...]]
    hints: Mapping[str, str]
    names: Mapping[str, str]

    def translate(self, error: RowError) -> RowError:
        """The error of a chat, with the dialect's names for its parameters."""
        param = None if error.param is None else self.rename(error.param)
        return RowError(error.code, self.rename_in(error.message, error.param), param=param, line=error.line)

    def rename(self, param: str) -> str:
        """The dialect's name of a chat's parameter, or of a path that begins with it."""
        if not self.names:
            return param
        words = "|".join(map(re.escape, sorted(self.names, key=len, reverse=True)))
        return re.sub(
            rf"^(\w+\[\d+\])?({words})(?!\w)", lambda found: (found[1] or "") + self.names[found[2]], param, count=1
        )

    def rename_in(self, message: str, param: str | None) -> str:
        """The message with the dialect's name of the parameter that it begins with, and of the schema that can't be
        compiled. The rest may quote the caller, who may have named a tool `stop`."""
        if not param or not message.startswith(param):
            return message
        rest = message[len(param) :]
        if rest.startswith(_UNCOMPILED):
            rest = _UNCOMPILED + self.rename(rest.removeprefix(_UNCOMPILED))
        return self.rename(param) + rest
