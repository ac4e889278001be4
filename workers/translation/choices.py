"""Requests to classify by choices: each is scored as the continuation of the prompt, and nothing is generated.

A choice's tokens are those of its text alone, behind the prompt's. So all choices continue the same tokens, which are
computed once (prefix cache), and each choice adds its own tokens to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.models.encoders.classifier import activate
from engine.request import Completion, Request, SamplingParams
from schemas.requests.errors import RowError, RowErrorCode, invalid_request
from schemas.requests.parsing import ClassifyBody
from workers.text.tokenizer import TokenIds, Tokenizer
from workers.translation.requests import JobRules, ModelLimits, RowHints

_SCORED = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)


class ChoiceReader:
    """Translates the requests of one job that are classified by choices."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, rules: JobRules) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._rules = rules
        self._encoded: tuple[tuple[str, ...], list[TokenIds]] = (), []  # of the latest request: mostly the next one's

    def request(self, request_id: str, body: ClassifyBody, prompts: Sequence[TokenIds], hints: RowHints) -> Request:
        """The engine's request: a member for each choice of each prompt (int32 [tokens]). Raises `RowError`."""
        choices = self._choices(body)
        longest, added = max(map(len, choices)), sum(map(len, choices))
        total = sum(len(prompt) + added for prompt in prompts)
        if total > (allowed := self._rules.max_embedding_tokens):
            name = "input" if body.input else "messages"
            raise invalid_request(f"{name} and choices make {total} tokens, but at most {allowed} are allowed", name)
        for at, prompt in enumerate(prompts):
            name = body.name_of(at) if body.input else "messages"
            if not len(prompt):
                raise invalid_request(f"{name} holds no tokens; give some text", name)
            if len(prompt) + longest > (most := self._limits.max_model_len):
                message = f"{name} has {len(prompt)} tokens and the longest choice {longest}, but the context holds "
                raise RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{message}{most}; shorten them", param=name)
        return scoring_request(request_id, prompts, choices, self._rules, hints)

    def _choices(self, body: ClassifyBody) -> list[TokenIds]:
        known, encoded = self._encoded
        if known != body.choices:
            most = self._limits.max_model_len - 1  # behind a prompt
            for at, text in enumerate(body.choices):
                if excess := self._tokenizer.count_excess(text, most):
                    message = (
                        f"choices[{at}] has {excess} tokens at least, but the context holds {most} behind a prompt"
                    )
                    raise RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{message}; shorten it", param="choices")
            encoded = self._tokenizer.encode_batch(body.choices, add_special_tokens=False)
            for at, ids in enumerate(encoded):
                if not len(ids):
                    raise invalid_request(f"choices[{at}] holds no tokens; give some text", "choices")
            self._encoded = body.choices, encoded
        return encoded


def scoring_request(
    request_id: str,
    prompts: Sequence[TokenIds],
    continuations: Sequence[TokenIds],
    rules: JobRules,
    hints: RowHints,
) -> Request:
    """The engine's request with a member for each continuation of each prompt (all int32 [tokens])."""
    members = [
        Request(
            request_id=request_id,
            prompt_token_ids=np.concatenate([prompt, continuation]),
            params=replace(_SCORED, prompt_logprobs_start=len(prompt)),
            priority=rules.priority,
            prefix_group=hints.prefix_group,
            prefix_readers=hints.prefix_readers or 0,
            salt=rules.salt,
        )
        for prompt in prompts
        for continuation in continuations
    ]
    return replace(members[0], more=tuple(members[1:]))


def classified_by_choices(body: ClassifyBody, request: Request, completion: Completion) -> list[dict[str, Any]]:
    """The response's data: for each prompt the most probable choice, with the log-probabilities of all."""
    data: list[dict[str, Any]] = []
    scored = continuation_logprobs(request, completion)
    count = len(body.choices)
    for index in range(len(scored) // count):
        logprobs = scored[index * count : (index + 1) * count]
        sums = np.array([each.sum(dtype=np.float64) for each in logprobs])
        lengths = np.array([len(each) for each in logprobs])
        probs = activate(sums if body.normalize == "sum" else sums / lengths, "softmax")
        data.append(
            {
                "index": index,
                "label": body.choices[int(probs.argmax())],
                "probs": probs,
                "num_classes": count,
                "choices": [
                    {"text": text, "logprob": np.float32(total), "num_tokens": int(length)}
                    for text, total, length in zip(body.choices, sums, lengths, strict=True)
                ],
            }
        )
    return data


def continuation_logprobs(request: Request, completion: Completion) -> list[NDArray[np.float32]]:
    """The log-probabilities of the tokens of each member's continuation."""
    found: list[NDArray[np.float32]] = []
    for member, scored in zip(request.members, completion.members or (completion,), strict=True):
        assert scored.prompt_logprobs is not None, "a scored prompt has log-probabilities"
        found.append(scored.prompt_logprobs.chosen[member.params.prompt_logprobs_start :])
    return found
