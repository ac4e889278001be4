"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.inference.responses import InferenceResponses
from pipeline.gateway.inference.sse import STREAM_ID
from pipeline.gateway.openapi.document import BODY, document_body, document_responses
from pipeline.gateway.routes.dependencies import authenticated_caller, json_body
from pipeline.gateway.routes.inference import document_events, document_json, reply
from schemas.requests.dialects.anthropic.body import MESSAGES_URL

InferenceCaller = Annotated[Caller, authenticated_caller(Scope.INFERENCE, anthropic=True)]
Body = Annotated[dict[str, Any], json_body()]


def messages_router(answers: InferenceResponses) -> APIRouter:
    """Build the routes under `/v1/messages`."""
    router = APIRouter(prefix=MESSAGES_URL, tags=["messages"])

    @router.post(
        "", openapi_extra=document_body("MessagesBody", _MESSAGES), response_class=Response, responses=_RESPONSES
    )
    async def create(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Create a message, as with Anthropic's API."""
        return await reply(answers, request, caller, MESSAGES_URL, body)

    return router


_MESSAGES = {"model": "demo", "max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]}
_RESPONSES = document_responses(
    *BODY,
    404,
    content=document_json("AnthropicMessage")
    | document_events("AnthropicEvent", "AnthropicError", last="the last is message_stop or an error"),
    headers=(STREAM_ID,),
    anthropic=True,
)
