"""The key of a request: equal for requests that must give equal answers, however they are written.

It is the one key of answers: the planner finds copies by it, a run takes answers of a former one by it, and the
answer store has answers under it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import orjson

from schemas.requests.dialects.registry import DIALECTS
from schemas.requests.parsing import Body, ChatBody, GenerationBody, dump_body

NO_EFFECT: Final = frozenset(("user", "metadata", "store", "safety_identifier", "prompt_cache_key"))
SAMPLING_ONLY: Final = ("seed", "top_p", "top_k", "min_p")  # no effect on a greedy request
KEY_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """All that enters an answer besides its request.

    Attributes:
        model: `ModelPin.key`: the weights with the chat template, and the arithmetic. A model's name doesn't count.
        default_max_tokens: of requests that set no limit.
        policies: the fingerprint of the content policies; None: there are none.
        seed: of sampled requests that bring none; None: drawn anew each time.
        truncate_prompt: what a prompt loses that is too long for the context; None: it is refused.
    """

    model: str
    default_max_tokens: int
    policies: str | None = None
    seed: int | None = None
    truncate_prompt: str | None = None

    def facts(self, body: Body) -> bytes:
        """Those of them that enter this request's answer."""
        limit = seed = None
        if isinstance(body, GenerationBody):
            limit = self.default_max_tokens if body.output_limit is None else None
            seed = None if body.is_deterministic else self.seed
        return orjson.dumps([self.model, self.policies, self.truncate_prompt, limit, seed])


def stored_body(url: str, body: Body) -> bytes:
    """The body for the worker, without fields that change no response."""
    return dump_body(_effective(url, body))


def request_key(url: str, body: Body, context: AnswerContext) -> bytes:
    """The key, `KEY_BYTES` long."""
    body = _effective(url, body)
    update: dict[str, object] = {"model": ""}
    if isinstance(body, GenerationBody):
        update |= _same_answer(body)
    content = dump_body(body.model_copy(update=update))
    return blake2b(content + b"\0" + context.facts(body), digest_size=KEY_BYTES, key=url.encode()).digest()


def _effective(url: str, body: Body) -> Body:
    """The body without fields that change no response; those that a dialect's response repeats stay."""
    dialect = DIALECTS.get(url)
    without = (body.model_fields_set & NO_EFFECT) - (frozenset() if dialect is None else dialect.repeated)
    return body.model_copy(update=dict.fromkeys(without)) if without else body


def _same_answer(body: GenerationBody) -> dict[str, object]:
    """Normalized fields: equal for all requests that must give the same answer."""
    update: dict[str, object] = {}
    if body.temperature == 0 and not body.model_fields_set.isdisjoint(SAMPLING_ONLY):
        update = {name: type(body).model_fields[name].default for name in SAMPLING_ONLY}
    if len(body.logit_bias) > 1:
        update["logit_bias"] = dict(sorted(body.logit_bias.items()))
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        update |= {"max_tokens": body.max_completion_tokens, "max_completion_tokens": None}
    if isinstance(body, ChatBody) and body.cache_breakpoints:
        update["cache_breakpoints"] = ()
    return update
