"""Schemas that people use: whatever a model prefers, a text that comes to its end follows its schema."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from schemas.requests.errors import RowError
from workers.structured.constraints import json_grammar
from workers.structured.grammar import Grammar, Grammars
from workers.text.tokenizer import Tokenizer
from workers.text.vocabulary import token_bytes

SCHEMAS = Path(__file__).parents[3] / "benchmarks" / "workloads" / "schemas.jsonl"
END = 2
MOST_TOKENS = 600
CLOSING = frozenset(b'"}],:')


@pytest.fixture(scope="module")
def schemas() -> list[tuple[str, dict[str, Any]]]:
    lines = (json.loads(line) for line in SCHEMAS.read_text(encoding="utf-8").splitlines())
    return [(line["name"], line["schema"]) for line in lines]


def written(made: Grammar, tokens: list[bytes], chance: random.Random) -> str | None:
    """A text from a model that chooses anything, but likes to come to an end; None: it didn't."""
    mask, raw = made(0), b""
    words = np.zeros(-(-len(tokens) // 32), dtype=np.int32)
    for _ in range(MOST_TOKENS):
        words[:] = 0
        mask.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(tokens))
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, "a grammar never leaves a model without a token"
        if END in allowed:
            return raw.decode()
        closing = [token for token in allowed if CLOSING.issuperset(tokens[token])]
        token = chance.choice(closing if closing and chance.random() < 0.7 else allowed)
        raw += tokens[token]
        mask.advance(token)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 6))],
)
def test_a_complete_answer_follows_its_schema(
    byte_level: Tokenizer, schemas: list[tuple[str, dict[str, Any]]], seed: int
) -> None:
    grammars = Grammars(byte_level, byte_level.size, (END,))
    tokens = token_bytes(byte_level, byte_level.size, (END,))
    made, ended = 0, 0
    for name, schema in schemas:
        try:
            compiled = grammars.compile(json_grammar(schema, "response_format"))
        except RowError:
            continue
        made += 1
        text = written(compiled, tokens, random.Random(f"{seed} {name}"))
        if text is None:
            continue
        ended += 1
        value = json.loads(text)
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        assert error is None, f"{name}: {error.json_path}: {error.message}: {text[:300]}"
    assert made >= 200
    assert ended >= 190


@pytest.mark.slow
def test_with_strict_false_more_schemas_are_accepted(
    byte_level: Tokenizer, schemas: list[tuple[str, dict[str, Any]]]
) -> None:
    grammars = Grammars(byte_level, byte_level.size, (END,))
    taken = 0
    for _, schema in schemas:
        try:
            grammars.compile(json_grammar(schema, "response_format", lenient=True))
            taken += 1
        except RowError:
            pass
    assert taken >= 255
