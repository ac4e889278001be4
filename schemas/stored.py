"""Bases of what is stored as JSON: each paper is an object in the store, written once.

All carry `version`; a reader that meets a later one must refuse it rather than guess. Within a version fields may be
added: who doesn't know them refuses an order (`StoredModel`), and reads over them in a report (`StoredReport`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredModel(BaseModel):
    """Base of what is stored as JSON. A field that isn't known is refused: it may say how to read the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2, exclude_none=True).encode() + b"\n"


class StoredReport(StoredModel):
    """Base of papers that say what was done, and order nothing. A later version may say more: it is left out by who
    doesn't know it, and what that one knows means what it always did."""

    model_config = ConfigDict(extra="ignore")
