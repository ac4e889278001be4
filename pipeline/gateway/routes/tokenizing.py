"""The routes of a model's tokenizer, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from pipeline.gateway.inference.responses import InferenceResponses
from pipeline.gateway.inference.sse import STREAM_ID
from pipeline.gateway.openapi.document import BODY, document_body, document_responses
from pipeline.gateway.routes.inference import Body, InferenceCaller, document_json, reply
from schemas.requests.tokenizing import DETOKENIZE_URL, TOKENIZE_URL


def tokenizer_router(answers: InferenceResponses) -> APIRouter:
    """Build the routes; a worker of the model answers."""
    router = APIRouter(tags=["inference"])

    @router.post(
        TOKENIZE_URL,
        openapi_extra=document_body("TokenizeBody", {"model": "demo", "prompt": "Hello"}),
        response_class=Response,
        responses=_TOKENIZED,
    )
    async def tokenize(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Tokenize a prompt or a conversation."""
        return await reply(answers, request, caller, TOKENIZE_URL, body)

    @router.post(
        DETOKENIZE_URL,
        openapi_extra=document_body("DetokenizeBody", {"model": "demo", "tokens": [1, 2, 3]}),
        response_class=Response,
        responses=_DETOKENIZED,
    )
    async def detokenize(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Find the text of token ids."""
        return await reply(answers, request, caller, DETOKENIZE_URL, body)

    return router


_TOKENIZED = document_responses(*BODY, 404, content=document_json("Tokenized"), headers=(STREAM_ID,))
_DETOKENIZED = document_responses(*BODY, 404, content=document_json("Detokenized"), headers=(STREAM_ID,))
