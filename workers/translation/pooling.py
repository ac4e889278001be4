"""The engine's request for texts whose hidden states are pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.request import Pooling, Request, SamplingParams
from workers.text.tokenizer import EncodedText
from workers.translation.requests import JobRules

_POOLED = SamplingParams(max_tokens=0, temperature=0.0)


def pooling_request(
    request_id: str,
    texts: Sequence[EncodedText],
    rules: JobRules,
    pooling: Pooling | None,
    *,
    skip: int = 0,
    dimensions: int | None = None,
) -> Request:
    """A member for each text. `skip`: positions at the beginning that a mean excludes; `dimensions`: see `Request`."""
    members = [
        Request(
            request_id=request_id,
            prompt_token_ids=text.ids,
            token_type_ids=text.types,
            params=_POOLED,
            priority=rules.priority,
            salt=rules.salt,
            pooling=pooling,
            pooling_skip=skip,
            dimensions=dimensions,
        )
        for text in texts
    ]
    return replace(members[0], more=tuple(members[1:]))
