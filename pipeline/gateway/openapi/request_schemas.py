"""Schemas of request bodies for the OpenAPI document: the models that parse them, and the fields that only HTTP has."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pipeline.gateway.batches.messages import MessageBatchBody
from pipeline.gateway.batches.requests import EXTENSION, OWN, BatchBody
from pipeline.gateway.batches.service import RetryBody
from pipeline.gateway.inference.request_builder import Extension, StreamOptions
from pipeline.gateway.inference.service_tier import SERVICE_TIERS
from pipeline.gateway.openapi.anthropic_schemas import AnthropicError, AnthropicEvent, AnthropicMessage
from pipeline.gateway.openapi.completion_schemas import ChatCompletion, ChatCompletionChunk, Embeddings, TextCompletion
from pipeline.gateway.openapi.responses_schemas import RESPONSE_EVENTS, ResponseObject
from pipeline.gateway.openapi.scoring_schemas import Classification, Ranking, Scores
from pipeline.gateway.openapi.tokenizer_schemas import Detokenized, Tokenized
from pipeline.gateway.response_models import Error
from schemas.jobs.job import Tier
from schemas.jobs.job_options import JobOptions
from schemas.requests.dialects.anthropic.body import COUNTED, MESSAGES_URL
from schemas.requests.dialects.registry import DIALECTS
from schemas.requests.fields import GUIDED, NULL, one_of, record
from schemas.requests.parsing import BODIES, NO_CHANGE, GenerationBody
from schemas.requests.tokenizing import TOKENIZER_BODIES

Json = dict[str, Any]

TIERS: Final = [tier.value for tier in Tier if tier is not Tier.INTERACTIVE]
"""The tiers of batch jobs."""

_STREAMED: Final[Json] = {
    "stream": {"type": ["boolean", "null"], "description": "Stream the response as server-sent events."},
    "stream_options": one_of({"$ref": "#/components/schemas/StreamOptions"}, NULL),
}
_DIALECT_STREAMED: Final[Json] = _STREAMED | {
    # The end of a dialect's stream always has the usage.
    "stream_options": one_of(
        record(include_obfuscation={"enum": [False, None]}, include_usage={"enum": [False, None]}), NULL
    ),
}
_SERVICE_TIER: Final[Json] = {
    "service_tier": {
        "enum": [*SERVICE_TIERS, None],
        "description": "priority: the tier interactive; default: standard; flex: bulk; auto: that of `tokenmill`.",
    }
}
_WHOLE: Final[Json] = {"stream": {"enum": [False, None]}, "stream_options": NULL}


def build_schemas(default_model: str | None) -> dict[str, Json]:
    """Build the JSON schemas that routes refer to, by name: bodies, errors, and model responses.

    Args:
        default_model: the model of bodies without one; None: `model` is required.
    """
    models: list[type[BaseModel]] = [
        *BODIES.values(),
        StreamOptions,
        Extension,
        BatchBody,
        MessageBatchBody,
        JobOptions,
        RetryBody,
    ]
    answered: list[type[BaseModel]] = [
        Error, ChatCompletion, ChatCompletionChunk, TextCompletion, Embeddings, Scores, Ranking,
        Classification, ResponseObject, *RESPONSE_EVENTS,
    ]  # fmt: skip
    models += TOKENIZER_BODIES.values()
    answered += [Tokenized, Detokenized]
    answered += [AnthropicMessage, AnthropicEvent, AnthropicError]
    _, made = models_json_schema(
        [(model, "validation") for model in [*models, *answered]], ref_template="#/components/schemas/{model}"
    )
    found: dict[str, Json] = made["$defs"]
    for url, body in BODIES.items():
        schema = found[body.__name__]
        no_change = DIALECTS[url].no_change if url in DIALECTS else NO_CHANGE
        schema["properties"] |= {
            name: {"enum": [None, *values]} for name, values in no_change.items() if name not in body.model_fields
        }
        schema["properties"] |= _fields_of_http(url)
        schema["properties"][EXTENSION] = one_of({"$ref": "#/components/schemas/Extension"}, NULL)
        _default_model_of(schema, default_model)
    for tokenizing in TOKENIZER_BODIES.values():
        _default_model_of(found[tokenizing.__name__], default_model)
    messages_body = found["MessagesBody"]
    found["CountTokensBody"] = {
        **messages_body,
        "title": "CountTokensBody",
        "description": "Body of /v1/messages/count_tokens.",
        "properties": {name: messages_body["properties"][name] for name in COUNTED},
        "required": [name for name in messages_body["required"] if name in COUNTED],
    }
    for name in ("BatchBody", "MessageBatchBody"):
        found[name]["properties"][EXTENSION] = one_of({"$ref": "#/components/schemas/JobOptions"}, NULL)
    for name in OWN:
        del found["JobOptions"]["properties"][name]
    for name in ("JobOptions", "RetryBody"):
        found[name]["properties"]["tier"] = {"enum": [*TIERS, None]}
    message = found["ChatMessage"]["properties"]
    message |= {name: {"enum": [None, *NO_CHANGE[name]]} for name in ("refusal", "audio", "function_call")}
    return found


def _default_model_of(schema: Json, default_model: str | None) -> None:
    """Make `model` optional in a body's schema, where there is a default one."""
    if default_model is not None:
        schema["required"].remove("model")
        schema["properties"]["model"] = {"anyOf": [schema["properties"]["model"], NULL], "default": default_model}


def _fields_of_http(url: str) -> Json:
    """The fields of bodies to `url` that only HTTP has."""
    if url == MESSAGES_URL:
        return {"stream": _STREAMED["stream"]}
    if url in DIALECTS:
        return _DIALECT_STREAMED | _SERVICE_TIER
    return (_STREAMED | GUIDED if issubclass(BODIES[url], GenerationBody) else _WHOLE) | _SERVICE_TIER
