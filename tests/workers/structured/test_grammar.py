"""Grammars as masks: token bytes, the cache, refused grammars, and time limits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.request import Choice, Completion, FinishReason
from engine.sampling.rows import MASK_FAILED
from schemas.requests.errors import RowError, RowErrorCode
from tests.workers.text.test_gguf_tokenizer import write
from workers.structured import grammar
from workers.structured.constraints import json_grammar
from workers.structured.grammar import Grammar, GrammarFailure, Grammars, GrammarSource, GrammarTooComplex
from workers.text.tokenizer import Tokenizer
from workers.text.vocabulary import SPECIAL_MARK, token_bytes
from workers.translation.responses import failure_of

END = 2
TEXTS = ["The quick brown fox", ' {"a": [1, 2.5e3, null]}\n', "naïve café 日本語 🎉", "\t\x00 x  y", "<end> <turn>"]


@pytest.fixture(params=["byte level", "sentencepiece", "gguf"])
def tokenizer(request: pytest.FixtureRequest, kit: Any, tmp_path: Path) -> Tokenizer:
    if request.param == "byte level":
        return Tokenizer(kit.byte_level_tokenizer())
    if request.param == "sentencepiece":
        return Tokenizer(kit.sentencepiece_tokenizer())
    path = tmp_path / "m.gguf"
    return Tokenizer.load(write(path, kit.byte_level_tokenizer(), model="gpt2", pre="gpt-2", add_bos=False))


@pytest.fixture
def grammars(byte_level: Tokenizer) -> Grammars:
    return Grammars(byte_level, byte_level.size, (END,))


def allowed(made: Grammar, size: int, *texts: int) -> set[int]:
    """Tokens that may come after these."""
    mask = made(0)
    for token in texts:
        mask.advance(token)
    words = np.zeros(-(-size // 32), dtype=np.int32)
    mask.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little", count=size)).tolist())


def of_schema(schema: dict[str, Any], param: str = "response_format") -> GrammarSource:
    return json_grammar(schema, param, f"{param}.json_schema.schema")


def test_a_tokens_bytes_are_what_decoding_gives(tokenizer: Tokenizer) -> None:
    found = token_bytes(tokenizer, tokenizer.size + 40, (END,))
    assert found[tokenizer.size :] == [b""] * 40
    # Given texts as the tokenizer cuts them, when their tokens' bytes are joined, then that is the decoded text
    for text in TEXTS:
        (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
        plain = [token for token in ids.tolist() if token not in tokenizer.special_ids]
        anchor = tokenizer.encode_batch(["x"], add_special_tokens=False)[0]
        decoded = tokenizer.decode_answers([anchor], [plain])[0]
        assert b"".join(found[token] for token in plain).decode() == decoded
    # and each single token stands for what it adds to a text
    head = tokenizer.decode(anchor)
    for token, raw in enumerate(found[: tokenizer.size]):
        if raw and not raw.startswith(SPECIAL_MARK) and raw.isascii():
            assert tokenizer.decode([*anchor.tolist(), token]) == head + raw.decode()


def test_no_two_tokens_stand_for_the_same_bytes(tokenizer: Tokenizer) -> None:
    found = [raw for raw in token_bytes(tokenizer, tokenizer.size, (END,)) if raw]
    assert len(set(found)) == len(found)
    specials = {t for t, raw in enumerate(token_bytes(tokenizer, tokenizer.size, (END,))) if raw[:1] == SPECIAL_MARK}
    assert specials == tokenizer.special_ids | {END}


@pytest.mark.parametrize("extra", [0, 1, 45])
def test_masks_allow_the_grammars_tokens_and_end_tokens_where_it_may_end(tokenizer: Tokenizer, extra: int) -> None:
    """Also where the model has more token ids than its tokenizer, as many have."""
    size = tokenizer.size + extra
    ends = (END, *([size - 1] if extra else []))
    made = Grammars(tokenizer, size, ends).compile(GrammarSource('start: "1" | "123"', "x"))
    found = token_bytes(tokenizer, size, ends)
    at = {raw: token for token, raw in enumerate(found)}
    begin = {at[raw] for raw in (b"1", b"12", b"123") if raw in at}
    assert allowed(made, size) == begin
    behind = {at[raw] for raw in (b"2", b"23") if raw in at}
    assert allowed(made, size, at[b"1"]) == behind | set(ends)
    assert allowed(made, size, at[b"1"], at[b"2"], at[b"3"]) == set(ends)


def test_a_token_that_was_not_allowed_is_an_error_and_stays_one(grammars: Grammars, byte_level: Tokenizer) -> None:
    mask = grammars.compile(GrammarSource('start: "1"', "x"))(0)
    (wrong,) = byte_level.encode_batch(["2"], add_special_tokens=False)
    with pytest.raises(GrammarFailure):
        mask.advance(int(wrong[0]))
    with pytest.raises(GrammarFailure):
        mask.fill(np.zeros(-(-byte_level.size // 32), dtype=np.int32))


def test_masks_filled_in_one_call_equal_those_filled_one_by_one(grammars: Grammars, byte_level: Tokenizer) -> None:
    words = -(-byte_level.size // 32)
    sources = ['start: "1"', "start: /[a-z]+/", json_grammar({"type": "object"}, "x").text]
    masks = [grammars.compile(GrammarSource(source, "x"))(0) for source in sources for _ in range(5)]
    broken = grammars.compile(GrammarSource('start: "1"', "x"))(0)
    with pytest.raises(GrammarFailure):
        broken.advance(300)
    in_one_call = np.zeros((16, words), dtype=np.int32)
    failed = masks[0].filler.fill([*masks, broken], in_one_call)
    assert set(failed) == {15}
    for mask, line in zip(masks, in_one_call, strict=False):
        alone = np.zeros(words, dtype=np.int32)
        mask.fill(alone)
        np.testing.assert_array_equal(line, alone)


@pytest.mark.parametrize(
    ("schema", "where", "why"),
    [
        ({"properties": {"a": {"items": {"not": {}}}}}, "schema.properties.a.items", "not"),
        ({"properties": {"a": {"type": "strin"}}}, "schema.properties.a", "strin"),
        ({"anyOf": [{"type": "null"}, {"pattern": "(", "type": "string"}]}, "schema.anyOf[1]", ""),
        ({"$ref": "https://example.org/x.json"}, "schema", ""),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"if": {}}}}, "schema.", "if"),
    ],
)
def test_the_error_of_a_schema_has_the_path_of_its_invalid_part(
    grammars: Grammars, schema: dict[str, Any], where: str, why: str
) -> None:
    with pytest.raises(RowError) as refused:
        grammars.compile(of_schema(schema))
    assert refused.value.code is RowErrorCode.INVALID_REQUEST
    assert refused.value.param == "response_format"
    assert refused.value.message.startswith(f"response_format can't be compiled: response_format.json_schema.{where}")
    assert refused.value.fields == ("response_format", "response_format.json_schema.schema")
    assert why in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 600


def nested(depth: int, wrap: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}} if wrap == "properties" else {wrap: [schema, {"type": "null"}]}
    return schema


def wide(count: int) -> dict[str, Any]:
    options = [{"properties": {f"p{i}": {"type": "string"}}, "required": [f"p{i}"]} for i in range(count)]
    return {"allOf": [{"anyOf": options}, {"anyOf": options}, {"anyOf": options}, {"anyOf": options}]}


HOSTILE: list[Any] = [
    of_schema(nested(31, "anyOf")),
    of_schema(nested(30, "properties")),
    of_schema(wide(40)),
    of_schema({"type": "string", "pattern": "^(a{1,5000}){1,5000}$"}),
    of_schema({"type": "string", "pattern": "(.*a){40}.{300}b"}),
    of_schema({"type": "string", "maxLength": 100_000_000}),
    of_schema({"type": "array", "items": {"type": "string"}, "minItems": 10_000_000}),
    of_schema({"enum": [f"{i} choices" for i in range(12_000)]}),
    of_schema({"type": "number", "minimum": 1e-300, "maximum": 1.7976931348623157e308, "multipleOf": 1e-10}),
    of_schema({"$ref": "#"}),
    of_schema({"allOf": [{"$ref": "#"}]}),
    of_schema({"properties": {f"p{i}": {"type": "string", "format": "date-time"} for i in range(2000)}}),
    GrammarSource("start: /((((a{1,99}){1,99}){1,99}){1,99}){1,99}/", "structured_outputs"),
    GrammarSource("start: /(x+x+)+y/", "structured_outputs"),
    GrammarSource("start: " + "(" * 5000 + '"a"' + ")" * 5000, "structured_outputs"),
    GrammarSource('start: start start | "a" | ""', "structured_outputs"),
    GrammarSource('start: "a"{1,1000000}', "structured_outputs"),
    GrammarSource("start: nothing", "structured_outputs"),
    GrammarSource("%json", "structured_outputs"),
    GrammarSource("start: <[99999999]>", "structured_outputs"),
    GrammarSource("\x00\ud7ff", "structured_outputs"),
]


@pytest.mark.parametrize("source", HOSTILE, ids=lambda source: source.text.replace("\n", " ")[30:110])
@pytest.mark.slow
def test_hostile_grammars_cost_little_and_fail_by_themselves(
    grammars: Grammars, byte_level: Tokenizer, source: GrammarSource
) -> None:
    """They are refused or, where they are good for something, made; then no step takes long."""
    try:
        made = grammars.compile(source)
    except RowError as error:
        code: RowErrorCode | None = error.code
    else:
        code, mask = None, made(0)
        words = np.zeros(-(-byte_level.size // 32), dtype=np.int32)
        for _ in range(20):
            words[:] = 0
            try:
                mask.fill(words)
            except GrammarFailure:  # costs its row, as every mask that raises
                break
            bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=byte_level.size)
            mask.advance(int(np.flatnonzero(bits)[-1]))
    assert code in (None, RowErrorCode.INVALID_REQUEST)


def test_a_grammar_is_compiled_once_also_when_it_can_not_be(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    compiled = grammar._compile

    def counting(library: Any, text: str) -> Any:
        made.append(text)
        time.sleep(0.05)
        return compiled(library, text)

    monkeypatch.setattr(grammar, "_compile", counting)
    good, bad = GrammarSource('start: "1"', "x"), GrammarSource("start: nothing", "x")
    threads = [threading.Thread(target=lambda: grammars.compile(good)(0)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(2):
        with pytest.raises(RowError, match="x can't be compiled"):
            grammars.compile(bad)
    assert made == [good.text, bad.text]


def test_the_grammar_cache_is_bounded(
    grammars: Grammars, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED_GRAMMARS", 3)
    sources = [GrammarSource(f'start: "{n}"', "x") for n in range(5)]
    made = [grammars.compile(source) for source in sources]
    assert len(grammars._cache) == 3
    # a row whose grammar has left the cache gets it compiled again, and it is cached again
    assert allowed(made[0], byte_level.size) == allowed(grammars.compile(sources[0]), byte_level.size)
    assert sources[0].text in grammars._cache
    assert len(grammars._cache) == 3


def test_a_model_whose_tokens_are_no_bytes_is_refused(byte_level: Tokenizer, kit: Any) -> None:
    hf = kit.byte_level_tokenizer()
    state = json.loads(hf.backend_tokenizer.to_str())
    state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    hf = type(hf)(tokenizer_object=type(hf.backend_tokenizer).from_str(json.dumps(state)), eos_token="<end>")
    for tokenizer, ends in ((Tokenizer(hf), (END,)), (byte_level, ())):
        with pytest.raises(RowError, match="x is not supported: the model has") as refused:
            _without_end(tokenizer, ends).compile(GrammarSource('start: "1"', "x"))
        assert refused.value.code is RowErrorCode.UNSUPPORTED_PARAMETER


def _without_end(tokenizer: Tokenizer, ends: Sequence[int]) -> Grammars:
    """The tokenizer's own end token counts where the model has it: here it has fewer ids."""
    return Grammars(tokenizer, tokenizer.size if ends else END, ends)


TOO_WIDE = [
    GrammarSource("start: " + " | ".join(f'"{at:x}"' for at in range(70_000, 73_000)), "structured_outputs"),
    of_schema({"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(3_000)}}),
]


@pytest.mark.parametrize("source", TOO_WIDE, ids=["choices", "properties"])
@pytest.mark.slow
def test_a_grammar_whose_beginning_is_too_large_is_refused_when_it_is_compiled(
    grammars: Grammars, source: GrammarSource
) -> None:
    with pytest.raises(RowError, match=r"can't be compiled: .*Current row has \d+ items") as refused:
        grammars.compile(source)
    assert (refused.value.code, refused.value.param) == (RowErrorCode.INVALID_REQUEST, source.param)


def test_a_grammar_that_grows_too_large_later_is_its_callers_fault(grammars: Grammars, byte_level: Tokenizer) -> None:
    options = " | ".join(f'"{at:x}"' for at in range(70_000, 73_000))
    made = grammars.compile(GrammarSource(f'start: "a" | "b" ({options})', "structured_outputs"))
    mask, words = made(0), np.zeros(-(-byte_level.size // 32), dtype=np.int32)

    def spell(text: str) -> None:
        for character in text:
            mask.fill(words)
            mask.advance(int(byte_level.encode_batch([character], add_special_tokens=False)[0][0]))

    with pytest.raises(GrammarTooComplex) as failed:
        spell("b1")
    # Given what the engine makes of that, then the failure names the field, and other failures stay the engine's
    ended = Choice(0, np.zeros(0, np.int32), FinishReason.ERROR)
    for error, code, param in (
        (f"{MASK_FAILED}: GrammarTooComplex: {failed.value}", RowErrorCode.INVALID_REQUEST, "structured_outputs"),
        (f"{MASK_FAILED}: GrammarFailure: {failed.value}", RowErrorCode.ENGINE_ERROR, None),
        ("the device said no", RowErrorCode.ENGINE_ERROR, None),
    ):
        failure = failure_of(Completion("r", (ended,), 1, 0, 0, 0.0, 0.0, error=error), mask=made)
        assert failure is not None
        assert (failure.code, failure.param) == (code, param)
