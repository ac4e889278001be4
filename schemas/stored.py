"""Base classes of models that are stored as JSON: each is an object in the store, written once.

All have a `version`; a reader must refuse a later one. Within a version fields may be added: an older reader refuses
unknown fields of a `StoredModel`, and ignores those of a `StoredReport`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredModel(BaseModel):
    """Base of stored models. An unknown field is refused, since it may change the meaning of the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2, exclude_none=True).encode() + b"\n"


class StoredReport(StoredModel):
    """Base of stored reports, which order no work. An unknown field is ignored, and the known fields keep their
    meaning."""

    model_config = ConfigDict(extra="ignore")
