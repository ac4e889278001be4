"""Models: the pin of a job, and the catalog entry of a served one."""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from schemas.requests.sampling_defaults import SamplingDefaults
from schemas.stored import StoredModel

EngineName = Literal["tokenmill", "transformers", "vllm"]
"""What computes a model: this project's own kernels, transformers' code in this project's engine, or vLLM."""


class ModelPin(StoredModel):
    """The exact weights that a job runs on. A worker without them refuses the shard.

    Attributes:
        name: the model's name in requests (`body.model`).
        source: folder, GGUF file or hub name of its weights.
        digest: of the weight files, "sha256:…"; with an adapter of its files, too.
        adapter: folder of the adapter that is computed with the weights; None: they are alone.
        base, base_digest: name of the model without the adapter, and digest of its weight files; None: there is none.
        revision: of a hub repository.
        quantization: of the weights at load; "none": as they are stored, "int8" quantizes activations too.
        kv_dtype: of the KV cache; "auto" is the dtype's.
        engine: that computes it.  engine_version: of an engine that is not ours; None: ours, whose answers are the same
            from version to version.
        engine_options: that may change answers, as NAME=VALUE, sorted.
        sampling_defaults: of requests that don't set them; None: the API's. Not part of `key`: planned requests hold
            the values themselves.
    """

    name: str
    source: str
    digest: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: Literal["none", "dense", "int8", "int8-weight-only", "int4", "fp8"] = "none"
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    engine: EngineName = "tokenmill"
    engine_version: str | None = None
    engine_options: tuple[str, ...] = ()
    sampling_defaults: SamplingDefaults | None = None
    adapter: str | None = None
    base: str | None = None
    base_digest: str | None = None

    def with_adapter(self, name: str, folder: str, digest: str) -> ModelPin:
        """The pin of one of the model's adapters, by its name in requests; `digest`: of its files."""
        both = sha256(f"{self.digest}\0adapter {digest}".encode()).hexdigest()
        named = {"name": name, "adapter": folder, "digest": f"sha256:{both}"}
        return self.model_copy(update=named | {"base": self.name, "base_digest": self.digest})

    @property
    def loaded_name(self) -> str:
        """The name of the model that workers load to answer: that of an adapter's model, else its own."""
        return self.base or self.name

    @property
    def base_key(self) -> str:
        """The key of the model without an adapter: one that is loaded serves all pins that have the same."""
        return self.key if self.adapter is None else self.model_copy(update={"digest": self.base_digest}).key

    @property
    def key(self) -> str:
        """A short id of letters and digits, equal for equal weights and arithmetic."""
        weights = self.digest or f"{self.name}\0{self.source}\0{self.revision}"
        facts = [weights, self.dtype, self.quantization, self.kv_dtype]
        if self.engine != "tokenmill":
            facts += [self.engine, self.engine_version or "", *self.engine_options]
        return sha256("\0".join(facts).encode()).hexdigest()[:16]


class CatalogEntry(StoredModel):
    """A model for which jobs can be submitted.

    Attributes:
        pin: of its jobs.
        max_model_len: tokens of prompt and answer together.
        policies: the fingerprint of the content policies for its prompts and answers; None: there are none. It isn't
            part of the pin, so that open jobs can go on under another policy.
        published_at: since when it is served like this; None: the entry was written before this field existed.
    """

    version: Literal[1] = 1
    pin: ModelPin
    max_model_len: Annotated[int, Field(ge=1)]
    policies: Annotated[str, Field(max_length=64)] | None = None
    published_at: AwareDatetime | None = None

    def is_same_as(self, other: CatalogEntry) -> bool:
        """Whether both are equal but for their time of publication."""
        return self == other.model_copy(update={"published_at": self.published_at})
