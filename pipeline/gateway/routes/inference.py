"""The routes of interactive inference, and of the resumption of streams."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Header, Request, Response

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import disconnected
from pipeline.gateway.inference.request_builder import DEGRADED
from pipeline.gateway.inference.responses import InferenceResponses
from pipeline.gateway.inference.sse import STREAM_ID, EventStream, wait_for_disconnect
from pipeline.gateway.openapi.document import BODY, document_body, document_responses
from pipeline.gateway.openapi.responses_schemas import RESPONSE_EVENTS
from pipeline.gateway.routes.dependencies import add_headers, authenticated_caller, json_body
from schemas.requests.dialects.openai_responses import RESPONSES_URL
from schemas.requests.parsing import (
    CHAT_URL,
    CLASSIFY_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    RERANK_URL,
    SCORE_URL,
)

MODEL: Final = "x-tokenmill-model"
_IN_HEADERS: Final = "/:@!#$&'()*+,;=?[] "
InferenceCaller = Annotated[Caller, authenticated_caller(Scope.INFERENCE)]
Body = Annotated[dict[str, Any], json_body()]
LastEvent = Annotated[
    str, Header(pattern="^(-1|[0-9]{1,15})$", description="The id of the last event that was received; -1: none.")
]


def inference_router(answers: InferenceResponses) -> APIRouter:
    """Build the routes of interactive inference."""
    router = APIRouter(tags=["inference"])

    @router.post(CHAT_URL, openapi_extra=document_body("ChatBody", _CHAT), response_class=Response, responses=_CHATS)
    async def chat(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Create a chat completion."""
        return await reply(answers, request, caller, CHAT_URL, body)

    @router.post(
        COMPLETIONS_URL,
        openapi_extra=document_body("CompletionBody", _COMPLETION),
        response_class=Response,
        responses=_TEXTS,
    )
    async def complete(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Create a text completion."""
        return await reply(answers, request, caller, COMPLETIONS_URL, body)

    @router.post(
        EMBEDDINGS_URL,
        openapi_extra=document_body("EmbeddingBody", _EMBEDDING),
        response_class=Response,
        responses=_VECTORS,
    )
    async def embed(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Create embeddings of texts."""
        return await reply(answers, request, caller, EMBEDDINGS_URL, body)

    @router.post(
        RESPONSES_URL,
        openapi_extra=document_body("ResponsesBody", _RESPONSE),
        response_class=Response,
        responses=_RESPONSES,
    )
    async def respond(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Create a response. It isn't stored."""
        return await reply(answers, request, caller, RESPONSES_URL, body)

    @router.post(
        SCORE_URL, openapi_extra=document_body("ScoreBody", _SCORE), response_class=Response, responses=_SCORES
    )
    async def score(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Score pairs of texts."""
        return await reply(answers, request, caller, SCORE_URL, body)

    @router.post(
        RERANK_URL, openapi_extra=document_body("RerankBody", _RERANK), response_class=Response, responses=_RANKING
    )
    async def rerank(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Order documents by their relevance to a query."""
        return await reply(answers, request, caller, RERANK_URL, body)

    @router.post(
        CLASSIFY_URL, openapi_extra=document_body("ClassifyBody", _CLASSIFY), response_class=Response, responses=_LABELS
    )
    async def classify(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Find the labels of texts."""
        return await reply(answers, request, caller, CLASSIFY_URL, body)

    @router.get("/v1/streams/{stream_id}", response_class=Response, responses=_REST)
    async def go_on(
        request: Request, stream_id: str, caller: InferenceCaller, last_event_id: LastEvent = "-1"
    ) -> Response:
        """Resume an interrupted stream after the event that the header `Last-Event-ID` names."""
        stream = answers.find(caller.tenant, stream_id)
        add_headers(request, model_header(stream.served_by))
        return EventStream(stream, answers.detach, int(last_event_id))

    return router


async def reply(
    answers: InferenceResponses, request: Request, caller: Caller, url: str, body: dict[str, Any]
) -> Response:
    """The response to a request to this url: complete, or a stream."""
    inference = await answers.read(caller, url, body)
    add_headers(request, inference.headers)
    if inference.stream:
        stream = await answers.stream(inference)
        add_headers(request, model_header(stream.served_by))
        return EventStream(stream, answers.detach)
    answer = await _while_connected(request, answers.complete(inference))
    add_headers(request, model_header(answer.served_by))
    # `json` needs 0.2 s for a million token ids, ten times as long, and holds the GIL in any thread.
    return Response(orjson.dumps(answer.body), headers={STREAM_ID: inference.request.id}, media_type="application/json")


def model_header(served_by: str) -> dict[str, str]:
    """The header that names the model which answers. Characters that a header can't hold are percent-encoded."""
    return {MODEL: quote(served_by, safe=_IN_HEADERS)}


async def _while_connected(request: Request, answer: Any) -> Any:
    """The result of the coroutine, which is cancelled when the client disconnects."""
    working = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise disconnected()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


_MESSAGES = [{"role": "user", "content": "Hello"}]
_CHAT = {"model": "demo", "messages": _MESSAGES, "max_tokens": 32}
_COMPLETION = {"model": "demo", "prompt": "Once", "max_tokens": 32}
_EMBEDDING = {"model": "demo", "input": "Hello"}
_RESPONSE = {"model": "demo", "input": "Hello", "max_output_tokens": 32}
_SCORE = {"model": "reranker", "queries": "What is a river?", "documents": ["A stream.", "A tree."]}
_RERANK = {"model": "reranker", "query": "What is a river?", "documents": ["A stream.", "A tree."], "top_n": 1}
_CLASSIFY = {"model": "classifier", "input": "Hello"}


def document_json(shape: str) -> dict[str, Any]:
    """The content of a JSON response."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}


def document_events(*shapes: str, last: str = "that of the last is `[DONE]`") -> dict[str, Any]:
    """The content of a stream of server-sent events. OpenAPI 3.1 can't describe the events' data, so the document uses
    the extension `x-item-schema`, which is like `itemSchema` of OpenAPI 3.2."""
    items = [{"$ref": f"#/components/schemas/{shape}"} for shape in shapes]
    text = f"Server-sent events with ids. The data of each event is JSON; {last}."
    return {"text/event-stream": {"schema": {"description": text}, "x-item-schema": {"anyOf": items}}}


_ID = (STREAM_ID, MODEL, f"{DEGRADED}?")
_ASKED = (*BODY, 404)
_CHATS = document_responses(
    *_ASKED, content=document_json("ChatCompletion") | document_events("ChatCompletionChunk", "Error"), headers=_ID
)
_TEXTS = document_responses(
    *_ASKED, content=document_json("TextCompletion") | document_events("TextCompletion", "Error"), headers=_ID
)
_VECTORS = document_responses(*_ASKED, content=document_json("Embeddings"), headers=_ID)
_EVENTS_OF_RESPONSES = tuple(event.__name__ for event in RESPONSE_EVENTS)
_LAST = "the last has the whole response"
_RESPONSES = document_responses(
    *_ASKED,
    content=document_json("ResponseObject") | document_events(*_EVENTS_OF_RESPONSES, "Error", last=_LAST),
    headers=_ID,
)
_REST = document_responses(
    404,
    content=document_events(
        "ChatCompletionChunk", "TextCompletion", *_EVENTS_OF_RESPONSES, "AnthropicEvent", "AnthropicError", "Error",
        last="the last is the format's own",
    ),
    headers=_ID,
)  # fmt: skip
_SCORES = document_responses(*_ASKED, content=document_json("Scores"), headers=_ID)
_RANKING = document_responses(*_ASKED, content=document_json("Ranking"), headers=_ID)
_LABELS = document_responses(*_ASKED, content=document_json("Classification"), headers=_ID)
