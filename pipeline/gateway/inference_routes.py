"""The routes of requests whose callers wait: chat, completions, embeddings, and streams that were cut off."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from pipeline.gateway.answers import Answers
from pipeline.gateway.auth import Caller
from pipeline.gateway.errors import ApiError, bad_request
from pipeline.gateway.keys import Scope
from pipeline.gateway.parts import add_headers, calling, documented, json_body
from pipeline.gateway.sse import STREAM_ID, EventStream, disconnected
from schemas.requests import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL

InferenceCaller = Annotated[Caller, calling(Scope.INFERENCE)]
Body = Annotated[dict[str, Any], json_body()]


def inference_router(answers: Answers) -> APIRouter:
    """`/v1/chat/completions` and its like."""
    router = APIRouter(tags=["inference"])

    async def reply(request: Request, caller: Caller, url: str, body: dict[str, Any]) -> Response:
        asked = await run_in_threadpool(answers.asker.read, caller, url, body)
        if asked.ticket is not None:
            add_headers(request, asked.ticket.headers)
        if asked.stream:
            return EventStream(await answers.stream(asked), answers.left)
        return JSONResponse(
            await _while_connected(request, answers.whole(asked)), headers={STREAM_ID: asked.request.id}
        )

    @router.post(CHAT_URL, openapi_extra=documented(_CHAT), response_class=Response)
    async def chat(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Answer a conversation."""
        return await reply(request, caller, CHAT_URL, body)

    @router.post(COMPLETIONS_URL, openapi_extra=documented(_COMPLETION), response_class=Response)
    async def complete(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Go on with a text."""
        return await reply(request, caller, COMPLETIONS_URL, body)

    @router.post(EMBEDDINGS_URL, openapi_extra=documented(_EMBEDDING), response_class=Response)
    async def embed(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """The embedding of a text."""
        return await reply(request, caller, EMBEDDINGS_URL, body)

    @router.get("/v1/streams/{stream_id}", response_class=Response)
    async def go_on(stream_id: str, request: Request, caller: InferenceCaller) -> Response:
        """Go on with a stream that was cut off, behind the event that the header `Last-Event-ID` names."""
        last = request.headers.get("last-event-id", "-1")
        if not (last.isascii() and last.isdecimal() and len(last) < 16) and last != "-1":
            raise bad_request("Last-Event-ID must be the id of an event of the stream", "Last-Event-ID")
        return EventStream(answers.find(caller.tenant, stream_id), answers.left, int(last))

    return router


async def _while_connected(request: Request, answer: Any) -> Any:
    """What the coroutine gives; ends it when the client goes."""
    working = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "disconnected", "the client went away")
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


_MESSAGES = [{"role": "user", "content": "Hello"}]
_CHAT = {"model": "demo", "messages": _MESSAGES, "max_tokens": 32}
_COMPLETION = {"model": "demo", "prompt": "Once", "max_tokens": 32}
_EMBEDDING = {"model": "demo", "input": "Hello"}
