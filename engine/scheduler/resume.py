"""Resumes interrupted requests: tokens that were sampled before are known tokens from the start.

No other state is needed. Draws depend on (seed, choice, position). Penalties and masks are replayed over the known
tokens whenever a sequence takes a row. A watcher receives them when it is created. A preempted sequence resumes in the
same way.
"""

from __future__ import annotations

import numpy as np

from engine.errors import RequestRefused
from engine.request import FinishReason, PartialChoice, Request, SamplingParams

ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


def check_partial(request: Request) -> None:
    """Check that `partial` can be the beginning of this request's answer; raises `RequestRefused`."""
    seen = set[int]()
    for partial in request.partial:
        where = f"request {request.request_id!r}, partial choice {partial.index}"
        if not 0 <= partial.index < request.num_choices or partial.index in seen:
            raise RequestRefused(f"{where}: must be one of the {request.num_choices} choices, each at most once")
        seen.add(partial.index)
        params = request.member_of(partial.index).params
        if not params.max_tokens:
            raise RequestRefused(f"{where}: only scores its prompt, so there is no partial answer")
        ids = partial.token_ids
        if ids.ndim != 1 or ids.dtype != np.int32:
            raise RequestRefused(f"{where}: tokens are {ids.dtype} {list(ids.shape)}, but must be int32 [tokens]")
        if len(ids) > params.max_tokens:
            raise RequestRefused(f"{where}: {len(ids)} tokens are more than max_tokens, {params.max_tokens}")
        if partial.finish_reason is not None and partial.finish_reason not in ANSWERED:
            raise RequestRefused(f"{where}: ended with {partial.finish_reason}, which is not an answer to go on from")
        if (partial.stop_token_id is not None) and partial.finish_reason is not FinishReason.STOP:
            raise RequestRefused(f"{where}: has a stop token, but did not end with one")
        _check_logprobs(params, partial, where)


def _check_logprobs(params: SamplingParams, partial: PartialChoice, where: str) -> None:
    top, given = params.logprobs, partial.logprobs
    if top is None:
        return
    shapes = None if given is None else (given.chosen.shape, given.top_ids.shape, given.top.shape)
    n = len(partial.token_ids)
    if shapes != ((n,), (n, top), (n, top)):
        raise RequestRefused(
            f"{where}: log-probabilities have shapes {shapes}, but must go along {n} tokens, {top} each"
        )


def resumed_tokens(request: Request) -> int:
    """Count the tokens that came with the request, end tokens included."""
    return sum(len(partial.token_ids) + (partial.stop_token_id is not None) for partial in request.partial)


def end_of(request: Request, partial: PartialChoice) -> FinishReason | None:
    """Return how a choice had ended already; None: it continues."""
    if partial.finish_reason is None and len(partial.token_ids) == request.params.max_tokens:
        return FinishReason.LENGTH
    return partial.finish_reason
