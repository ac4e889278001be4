"""A selection of input rows, small enough to be stored in a job: one bit a row, compressed."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator


class RowSelection(BaseModel):
    """Rows of an input by their index.

    Attributes:
        count: how many.  end: the last one plus 1.
        bitmap: bit i (from the highest of the first byte) is row i; deflated, in base64.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: Annotated[int, Field(ge=1)]
    end: Annotated[int, Field(ge=1)]
    bitmap: str

    @classmethod
    def of(cls, chosen: NDArray[np.bool_]) -> RowSelection | None:
        """The rows at which `chosen` (bool [rows]) is true; None when there are none."""
        rows = np.flatnonzero(chosen)
        if not len(rows):
            return None
        end = int(rows[-1]) + 1
        packed = zlib.compress(np.packbits(chosen[:end]).tobytes(), 9)
        return cls(count=len(rows), end=end, bitmap=base64.b64encode(packed).decode())

    @model_validator(mode="after")
    def _whole(self) -> RowSelection:
        try:
            count = int(self.mask().sum())
        except (binascii.Error, zlib.error) as error:
            raise ValueError("the bitmap of the selected rows is damaged") from error
        if count != self.count:
            raise ValueError(f"the bitmap has {count} rows, but {self.count} are selected")
        return self

    def mask(self) -> NDArray[np.bool_]:
        """bool [end]: whether a row is selected; none is from `end` on."""
        size = -(-self.end // 8)
        bits = zlib.decompressobj().decompress(base64.b64decode(self.bitmap, validate=True), size)
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=self.end).astype(np.bool_)

    def __str__(self) -> str:
        digest = hashlib.sha256(self.bitmap.encode()).hexdigest()
        return f"{self.count} rows below {self.end} ({digest[:12]})"
