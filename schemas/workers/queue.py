"""A shard on the queue: the body of a Celery task message (protocol 2). Any client of the broker can write messages, so
only exact matches are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter

from schemas.identifiers import Attempt, Id

COMPUTE_SHARD: Final = "tokenmill.compute_shard"
"""The task's name; its arguments are the job's id, the shard's number and the attempt's."""

ShardNumber = Annotated[int, Field(ge=0, lt=2**31)]
NoKeywords = Annotated[dict[str, Any], Field(max_length=0)]


@dataclass(frozen=True, slots=True)
class ComputeShard:
    """The task's arguments."""

    job: str
    shard: int
    attempt: int


def task_arguments(body: bytes | str) -> ComputeShard:
    """The arguments in a message's body, `[[job, shard, attempt], {}, {…}]`; raises pydantic's ValidationError."""
    adapter: TypeAdapter[tuple[tuple[Id, ShardNumber, Attempt], NoKeywords, Any]] = TypeAdapter(
        tuple[tuple[Id, ShardNumber, Attempt], NoKeywords, Any]
    )
    arguments, _, _ = adapter.validate_json(body, strict=True)
    return ComputeShard(*arguments)
