"""The keywords of calls over tables: those of each call, sampling parameters, and options of the engine."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Required, TypedDict, get_type_hints

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from schemas.jobs.job_options import parse_amount
from schemas.settings.settings import GenerationConfig, check_speculate
from tokenmill.config.cli_options import Device, DType, KvDType, Quantize
from tokenmill.errors import InvalidCall
from tokenmill.frames.resident import Model
from tokenmill.frames.tasks.validation import Validate

Positive = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=0)]


def check_amount(given: str) -> str:
    """An amount of time, which counts from the job's acceptance. Raises `ValueError`."""
    parse_amount(given)
    return given


class Sampling(TypedDict, total=False):
    """Sampling parameters, as OpenAI's and vLLM's clients name them; see docs/parameters.md."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    max_completion_tokens: int
    seed: int
    stop: str | list[str]
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    reasoning_effort: str


class EngineKeywords(TypedDict, total=False):
    """Options of the engine, as `tokenmill run` has them; see docs/cli.md. Sizes are in bytes. Those that are not given
    are `run`'s defaults."""

    engine: Literal["auto", "tokenmill", "transformers"]  # vLLM's would replace this process
    dtype: DType
    device: Device
    threads: Positive
    quantize: Quantize
    kv_dtype: KvDType
    speculate: Annotated[str, AfterValidator(check_speculate)]
    generation_config: GenerationConfig
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    kv_cache_memory: Bytes
    kv_offloading_size: Bytes
    kv_cache_dir: str | os.PathLike[str]
    kv_cache_dir_size: Bytes
    tensor_parallel: Positive
    pipeline_parallel: Positive
    micro_batches: Positive
    expert_parallel: bool
    replicas: Positive
    adapters: Mapping[str, str | os.PathLike[str]]  # LoRA adapters by name: folders, s3://BUCKET/PREFIX or hub names
    max_loras: Positive
    merge_adapter: bool
    concurrency: Positive  # actors that compute a Ray dataset, each with an engine


class InstallationKeywords(TypedDict, total=False):
    """A running installation that answers the rows in place of this process, by its root or its gateway; and options
    of its job, see docs/dropping-files.md."""

    root: str | os.PathLike[str] | None
    url: str | None
    tier: Literal["standard", "bulk"] | None
    deadline: Annotated[str, AfterValidator(check_amount)] | None
    refuse_late: bool
    max_cost: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    cache: bool | None


class RunKeywords(EngineKeywords, InstallationKeywords, total=False):
    """How the rows are computed: in this process, or by an installation."""


class TableKeywords(RunKeywords, total=False):
    """Those that every call has."""

    model: Required[Model]
    output_column: str
    output_dir: str | os.PathLike[str] | None
    reuse: Any


class MapKeywords(TableKeywords, Sampling, total=False):
    """Those of `tokenmill.map`, but for the prompt."""

    output: Any
    system: str | None
    validate: Validate | None
    max_tries: int | None
    adapter_column: str | None


class TextKeywords(TableKeywords, total=False):
    """Those of calls that take one text of each row."""

    text: str | None
    column: str | None


class EmbedKeywords(TextKeywords, total=False):
    """Those of `tokenmill.embed`."""

    dimensions: int | None
    prompt_name: str | None


class ClassifyKeywords(TextKeywords, total=False):
    """Those of `tokenmill.classify`."""

    labels: Sequence[str] | None
    text_pair: str | None
    system: str | None
    normalize: Literal["sum", "mean"] | None
    truncate_prompt_tokens: int | None
    adapter_column: str | None


class ScoreKeywords(TableKeywords, total=False):
    """Those of `tokenmill.score`."""

    query: Required[str]
    document: Required[str]
    instruction: str | None
    truncate_prompt_tokens: int | None
    score_tokens: tuple[str, str] | None
    chat_template: str | os.PathLike[str] | None


class MapOptions(Sampling, RunKeywords, total=False):
    """The keywords that `tokenmill.map` passes on."""


class PreviewKeywords(Sampling, RunKeywords, total=False):
    """Those of `tokenmill.preview`, but for the prompt."""

    model: Required[Model]
    output: Any
    system: str | None
    output_column: str
    validate: Validate | None
    max_tries: int | None
    adapter_column: str | None
    rows: int


GROUPS: Final[Mapping[str, type]] = {
    "sampling parameters": Sampling,
    "options of the engine": EngineKeywords,
    "an installation and its jobs": InstallationKeywords,
}
"""The keywords that calls pass on."""

ELSEWHERE: Final[Mapping[str, str]] = {
    "response_format": "output", "response_model": "output", "schema": "output", "guided_json": "output",
    "guided_choice": "output", "messages": "prompt", "system_prompt": "system", "max_new_tokens": "max_tokens",
    "prompt": "text",
}  # fmt: skip
"""Names that other calls and libraries have for keywords of these."""


def split_options(given: Mapping[str, Any], call: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sampling parameters, whose values the job checks, and the others, checked. `call`: the keywords that the call
    has. Raises `InvalidCall`."""
    checked = check_options(given, call)
    sampling = get_type_hints(Sampling)
    return (
        {name: value for name, value in checked.items() if name in sampling},
        {name: value for name, value in checked.items() if name not in sampling},
    )


def engine_names() -> frozenset[str]:
    """The names of the engine's options."""
    return frozenset(get_type_hints(EngineKeywords))


def check_options(given: Mapping[str, Any], call: type) -> dict[str, Any]:
    """The options, checked, but for the values of sampling parameters. `call`: the keywords that the call has. Raises
    `InvalidCall`."""
    known = get_type_hints(call)
    options = get_type_hints(RunKeywords, include_extras=True)
    for name, value in given.items():
        if name not in known:
            raise InvalidCall(_refusal(name, call))
        if name in options:
            _check(name, value, options[name])
    return dict(given)


def _refusal(name: str, call: type) -> str:
    """The message about a keyword that the call doesn't have."""
    known = get_type_hints(call)
    meant = ELSEWHERE.get(name)
    near = [meant] if meant in known else difflib.get_close_matches(name, known, n=1)
    if near:
        return f"{name}: is no parameter; did you mean {near[0]}?"
    parts = {group: [one for one in get_type_hints(kind) if one in known] for group, kind in GROUPS.items()}
    passed_on = {one for names in parts.values() for one in names}
    groups = {"of the call": [one for one in known if one not in passed_on], **parts}
    listed = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items() if names)
    return f"{name}: is no parameter; known are {listed}"


def _check(name: str, value: Any, kind: Any) -> None:
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InvalidCall(f"{name}: {message}, not {value!r}") from error
