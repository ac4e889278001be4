"""The converter of each stream, by the url of its request. Every dialect has one of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pipeline.gateway.inference.anthropic_events import AnthropicEvents
from pipeline.gateway.inference.chunks import Chunks, EventConverter
from pipeline.gateway.inference.request_builder import InferenceRequest
from pipeline.gateway.inference.responses_events import ResponsesEvents
from schemas.requests.dialects.anthropic.body import MESSAGES_URL
from schemas.requests.dialects.openai_responses import RESPONSES_URL

CONVERTERS: Final[Mapping[str, Callable[[InferenceRequest, int], EventConverter]]] = {
    RESPONSES_URL: ResponsesEvents,
    MESSAGES_URL: AnthropicEvents,
}
"""Takes the request, and its time in seconds since 1970."""


def converter_of(inference: InferenceRequest, created: int) -> EventConverter:
    """The converter of a request's stream."""
    return CONVERTERS.get(inference.url, Chunks)(inference, created)
