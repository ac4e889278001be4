"""Models: the pin of a job, and the catalog entry of a served one."""

from __future__ import annotations

from collections.abc import Iterable
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
        merged: the adapter was added to the weights at load: who computes this computes nothing else with them.
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
    merged: bool = False

    def with_adapter(self, name: str, folder: str, digest: str, *, merged: bool = False) -> ModelPin:
        """The pin of one of the model's adapters, by its name in requests; `digest`: of its files."""
        # In float32 sums of weights and sums of products differ by rounding, as two sets of instructions do: the same
        # key. In fewer digits a merged weight loses some of its change, in every answer: another model.
        kind = "merged adapter" if merged and self.dtype != "float32" else "adapter"
        both = sha256(f"{self.digest}\0{kind} {digest}".encode()).hexdigest()
        named = {"name": name, "adapter": folder, "digest": f"sha256:{both}", "merged": merged}
        return self.model_copy(update=named | {"base": self.name, "base_digest": self.digest})

    @property
    def without_adapter(self) -> ModelPin:
        """The pin of the weights alone."""
        if self.adapter is None:
            return self
        alone = {"name": self.base, "digest": self.base_digest, "merged": False}
        return self.model_copy(update=alone | dict.fromkeys(("adapter", "base", "base_digest")))

    @property
    def loaded_name(self) -> str:
        """The name of the model that workers load to answer: that of an adapter's model, unless it is merged into it,
        else its own."""
        return self.name if self.merged else self.without_adapter.name

    @property
    def base_key(self) -> str:
        """The key of the loaded model: one that is loaded serves all pins that have the same."""
        return self.key if self.merged else self.without_adapter.key

    @property
    def key(self) -> str:
        """A short id of letters and digits, equal for equal weights and arithmetic."""
        weights = self.digest or f"{self.name}\0{self.source}\0{self.revision}"
        facts = [weights, self.dtype, self.quantization, self.kv_dtype]
        if self.engine != "tokenmill":
            facts += [self.engine, self.engine_version or "", *self.engine_options]
        return sha256("\0".join(facts).encode()).hexdigest()[:16]


def merged_hint(pins: Iterable[ModelPin], name: str) -> str:
    """The end of a message that there is no model of this name: what to do if an adapter was merged into it, else
    nothing."""
    merged = next((pin.name for pin in pins if pin.merged and pin.base == name), None)
    return "" if merged is None else f"; {merged} was merged into it: name {merged}, or leave out --merge-adapter"


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
