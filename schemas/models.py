"""Which model answers: pinned by a job, and listed by those who serve it."""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from schemas.stored import StoredModel


class ModelPin(StoredModel):
    """The very weights a job runs on. A worker that can't give exactly this refuses the shard.

    Attributes:
        name: what requests call it (`body.model`).
        source: folder, GGUF file or hub name it is loaded from.
        digest: of the weight files, "sha256:…".
        revision: of a hub repository.
        quantization: of the weights at load; "none": as they are stored, "int8" quantizes activations too.
        kv_dtype: of the KV cache; "auto" is the dtype's.
    """

    name: str
    source: str
    digest: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: Literal["none", "dense", "int8", "int8-weight-only", "int4", "fp8"] = "none"
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"

    @property
    def key(self) -> str:
        """The same for all who compute the same: short, of letters and digits."""
        weights = self.digest or f"{self.name}\0{self.source}\0{self.revision}"
        facts = "\0".join((weights, self.dtype, self.quantization, self.kv_dtype))
        return sha256(facts.encode()).hexdigest()[:16]


class CatalogEntry(StoredModel):
    """A model that jobs can be submitted for.

    Attributes:
        pin: what they are pinned to.
        max_model_len: tokens of prompt and answer together.
        policies: the fingerprint of the content policies that judge its prompts and answers; None: there are none. No
            part of the pin: another policy doesn't strand the jobs that are open.
        published_at: since when it is served like this; None: it was written down before this was.
    """

    version: Literal[1] = 1
    pin: ModelPin
    max_model_len: Annotated[int, Field(ge=1)]
    policies: Annotated[str, Field(max_length=64)] | None = None
    published_at: AwareDatetime | None = None

    def same(self, other: CatalogEntry) -> bool:
        """Whether both describe the same, whenever they were published."""
        return self == other.model_copy(update={"published_at": self.published_at})
