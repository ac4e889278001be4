"""Attacks by interactive requests to a model: prompts, schemas, choices, and floods of them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, Final

from tests.hostile.attack import Answer, Attack, Expected, Target
from tests.hostile.client import CHAT, COMPLETIONS, chat, flood, request

LONG: Final = 9_900_000
SECONDS: Final = 110.0


def bad_request(message: str, code: str = ".*") -> tuple[Expected, ...]:
    return (Expected("http", "400|413|429", code, message),)


def _completion(target: Target, prompt: str, **more: Any) -> Answer:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, **more}
    return request(target, "POST", COMPLETIONS, body, seconds=SECONDS)


def _schemas(target: Target, schemas: list[dict[str, Any]], max_tokens: int = 5) -> list[Answer]:
    formats = ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in schemas)
    return flood((partial(_completion, target, "x", max_tokens=max_tokens, response_format=one) for one in formats), 4)


def _structured(target: Target, *given: dict[str, Any], max_tokens: int = 20) -> list[Answer]:
    return flood((partial(_completion, target, "x", max_tokens=max_tokens, structured_outputs=one) for one in given), 4)


def long_prompts(target: Target) -> list[Answer]:
    text = ("The quick brown fox jumps over the lazy dog. " * 240_000)[:LONG]
    return flood((partial(_completion, target, text + str(number)) for number in range(3)), 3)


def one_long_word(target: Target) -> list[Answer]:
    return [_completion(target, "a" * LONG)]


def long_emoji(target: Target) -> list[Answer]:
    return [_completion(target, "\U0001f600\u0301" * 800_000)]


def many_messages(target: Target) -> list[Answer]:
    """A chat of 10,000 messages of 500 bytes."""
    messages = [{"role": "user", "content": "word " * 100}] * 10_000
    return [request(target, "POST", CHAT, chat("x") | {"messages": messages}, seconds=SECONDS)]


def schema_flood(target: Target) -> list[Answer]:
    """Three schemas of 3,000 patterns, 256 KB each."""
    return _schemas(target, [
        {"type": "object", "additionalProperties": False, "properties": {
            f"p{number}_{name}": {"type": "string", "pattern": "^(a|b)*a(a|b){12}$"} for name in range(3_000)}}
        for number in range(3)
    ])  # fmt: skip


def schema_bombs(target: Target) -> list[Answer]:
    """Products of alternatives, chains of references, and bounds of 100,000."""
    alternatives = [{"anyOf": [{"type": "object", "properties": {f"a{k}{j}": {"type": "integer"}}} for j in range(12)]}
                    for k in range(12)]  # fmt: skip
    chain = {f"d{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    bounds = {"type": "string", "minLength": 1_000, "maxLength": 100_000}
    return _schemas(target, [
        {"allOf": alternatives},
        {"$defs": chain | {"d40": {"type": "integer"}}, "$ref": "#/$defs/d0"},
        {"type": "array", "minItems": 100_000, "maxItems": 200_000, "items": bounds},
        {"type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 7.3},
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "http://169.254.169.254/x.json"}}},
    ])  # fmt: skip


def large_choice(target: Target) -> list[Answer]:
    drawn = random.Random(target.seed)
    return _structured(target, {"choice": [f"{drawn.getrandbits(64):x}" for _ in range(12_000)]})


def large_regex(target: Target) -> list[Answer]:
    drawn = random.Random(target.seed + 1)
    return _structured(target, {"regex": "|".join(f"{drawn.getrandbits(80):x}" for _ in range(12_000))})


def grammar_bombs(target: Target) -> list[Answer]:
    """Repeats of repeats, automata of 2^30 states, intersections, ambiguity."""
    product = "start: A\nA: /(?s:.)*/ & ~/.*(ab|cd){5,40}.*/ & ~/.*x.{100}y.*/ & /.*z.{100}w.*/"
    return _structured(
        target, {"regex": "(a{1,1000}){1,1000}"}, {"regex": "[ab]*a[ab]{30}c"}, {"regex": ".*a.{500}"},
        {"grammar": product}, {"grammar": "start: s\ns: s s | s s s | /[a-z ]+/\n"}, {"grammar": "start: start start"},
    )  # fmt: skip


def choices_flood(target: Target) -> list[Answer]:
    """200 chats of eight long choices each, given up after 40 seconds."""
    body = chat("tell me a long story", 1_000, n=8, ignore_eos=True) | {"temperature": 1}
    return flood((partial(request, target, "POST", CHAT, body, seconds=40.0) for _ in range(200)), 200)


def short_flood(target: Target) -> list[Answer]:
    """300 chats of one token, 32 at once."""
    calls = (partial(request, target, "POST", CHAT, chat(f"flood {number}")) for number in range(300))
    return flood(calls, 32)


def cancelled_flood(target: Target) -> list[Answer]:
    """300 long chats, each hung up on after 50 ms."""
    body = chat("cancel me", 500, ignore_eos=True)
    return flood((partial(request, target, "POST", CHAT, body, seconds=0.05) for _ in range(300)), 16)


def cache_eviction(target: Target) -> list[Answer]:
    """Answers of the attacker, until the cache is full many times over; another tenant's must still be there."""
    mine = chat("cached for the other tenant", 2, tokenmill={"cache": True})
    request(target, "POST", CHAT, mine, key="other")
    bodies = (
        chat(f"evict {number}", 8, logprobs=True, top_logprobs=20, tokenmill={"cache": True}) for number in range(300)
    )
    answers = flood((partial(request, target, "POST", CHAT, body) for body in bodies), 12)
    import json  # noqa: PLC0415

    from tests.hostile.client import send  # noqa: PLC0415

    status, data = send(target, "POST", CHAT, mine, key="other")
    is_cached = status == 200 and json.loads(data)["usage"].get("tokenmill_cached") is True
    return [*answers, Answer("check", "cached" if is_cached else "evicted", message="the other tenant's cached answer")]


FLOODED: Final = (Expected("http", "200"), Expected("http", "429", "rate_limit_exceeded|lane_full", "."))

TABLE: Final = (
    Attack("model: three prompts of 9.9 MB", long_prompts, bad_request("context|tokens|bytes")),
    Attack("model: one word of 9.9 MB", one_long_word, bad_request("context|tokens|bytes")),
    Attack("model: 9.6 MB of emoji", long_emoji, bad_request("context|tokens|bytes")),
    Attack("model: 10,000 messages", many_messages, bad_request("context|tokens|bytes|messages")),
    Attack("model: 3 schemas of 3,000 patterns", schema_flood, bad_request("schema|grammar|mask|large|properties")),
    Attack(
        "model: schema bombs", schema_bombs,
        (*bad_request("schema|grammar|mask|large|ref|response_format"), Expected("http", "200")),
    ),
    Attack("model: choice of 12,000", large_choice, bad_request("choice|grammar|mask|large")),
    Attack(
        "model: regex of 12,000 alternatives", large_regex,
        (*bad_request("regex|grammar|mask|large"), Expected("http", "200")),
    ),
    Attack(
        "model: grammar bombs", grammar_bombs,
        (*bad_request("regex|grammar|mask|large|structured"), Expected("http", "200")),
    ),
    Attack(
        "model: 200 chats with n=8", choices_flood,
        (Expected("http", "429", "rate_limit_exceeded|lane_full", ".", required=True), Expected("http", "200"),
         Expected("timeout", "no answer")),
    ),
    Attack("model: 300 chats, 32 at once", short_flood, FLOODED, limit_seconds=240),
    Attack("model: 300 chats hung up on", cancelled_flood, (*FLOODED, Expected("timeout", "no answer"))),
    Attack(
        "model: eviction from the answer cache", cache_eviction, (*FLOODED, Expected("check", "cached", required=True)),
        ("serve",),
    ),
)  # fmt: skip
