"""Grammars as masks: which tokens an answer may go on with, so that it ends as it must be.

llguidance (Rust) compiles a grammar for a model's tokens and walks it token by token. The vocabulary is handed over
once for a model, when the first grammar comes; compiled grammars are kept, since the rows of a job repeat theirs.
Compiling happens on the threads that prepare rows, never on the one that steps the engine; what a step has to do then
is bounded, too (`limits`), and a step's masks are filled together, on several threads.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import llguidance
import numpy as np
from numpy.typing import NDArray

from engine.sampling.rows import MASK_FAILED
from schemas.requests.errors import RowError, RowErrorCode
from workers.structured.json_schema import adapted, json_rule
from workers.text.tokenizer import Tokenizer
from workers.text.vocabulary import Vocabulary

KEPT_GRAMMARS: Final = 512
"""A fifth of a megabyte each, of real schemas."""

MOST_MESSAGE: Final = 300
ONE_OF: Final = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""What the library says of it; its option is `strict: false` here."""

MOST_TRIES: Final = 100
MOST_SECONDS: Final = 1.0
"""Spent on finding the place in a schema that is to blame."""


class GrammarFailure(Exception):
    """A mask can't go on: its grammar does not take the token."""


class GrammarTooComplex(GrammarFailure):
    """A grammar reached a limit of `limits` while an answer was made: whoever wrote the grammar is to blame."""


def too_complex(message: str) -> str | None:
    """The reason in the engine's message on a mask that failed with `GrammarTooComplex`; None: another failure."""
    _, found, reason = message.partition(f"{GrammarTooComplex.__name__}: ")
    return reason if found and message.startswith(MASK_FAILED) else None


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar to compile.

    Attributes:
        text: in llguidance's Lark.
        param: the body's field that asks for it.
        schemas: JSON schemas that are part of it, by their path in the body: one of them may be to blame.
    """

    text: str
    param: str
    schemas: Mapping[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that could be compiled; called, it makes the mask of a choice (`Request.mask`).

    Rows that wait hold no compiled grammar: a job may have as many of them as rows. Where it isn't kept any more it is
    compiled once more.
    """

    grammars: Grammars
    source: GrammarSource

    def __call__(self, choice: int) -> GrammarMask:
        return self.grammars.mask(self.source)


class GrammarMask:
    """A choice's place in its grammar (an engine's `TokenMask`)."""

    __slots__ = ("filler", "matcher")

    def __init__(self, matcher: Any, filler: ThreadedMaskFiller) -> None:
        self.matcher = matcher
        self.filler = filler

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        """See `TokenMask.fill`. Raises `GrammarFailure`."""
        for error in self.filler.fill([self], bitmask[None]).values():
            raise error

    def advance(self, token_id: int) -> None:
        """See `TokenMask.advance`. Raises `GrammarFailure`."""
        if token_id not in self.filler.ends and not self.matcher.consume_token(token_id):
            raise _failure(self.matcher)


class ThreadedMaskFiller:
    """Fills the masks of many choices at once (an engine's `ThreadedMaskFiller`), on threads of its own.

    Args:
        ends: tokens that end an answer: all are allowed where the grammar may end.
        eos: the one of them that the grammar library knows.
    """

    def __init__(self, ends: frozenset[int], eos: int, size: int) -> None:
        self.ends = ends
        self._executor = llguidance.LLExecutor()
        self._word, self._bit = eos // 32, np.int32(np.uint32(1 << (eos % 32)).view(np.int32))
        self._end_words = np.zeros(-(-size // 32), dtype=np.int32)
        for end in ends:
            self._end_words.view(np.uint32)[end // 32] |= np.uint32(1 << (end % 32))

    def fill(self, masks: Sequence[Any], bitmasks: NDArray[np.int32]) -> Mapping[int, Exception]:
        """See `engine.request.ThreadedMaskFiller`."""
        matchers = [(mask.matcher, at) for at, mask in enumerate(masks)]
        rows, words = bitmasks.shape
        assert bitmasks.flags.c_contiguous, "masks are written through a pointer"
        self._executor.unsafe_compute_mask_ptr(matchers, bitmasks.ctypes.data, words * 4, rows)
        may_end = (bitmasks[:, self._word] & self._bit) != 0
        bitmasks[may_end] |= self._end_words
        return {at: _failure(matcher) for matcher, at in matchers if matcher.is_error()}


@dataclass(slots=True)
class _Made:
    """What compiling gave: a matcher at its beginning, or why there is none."""

    matcher: Any = None
    reason: str = ""
    done: threading.Event = field(default_factory=threading.Event)


class Grammars:
    """The grammars of one model. May be used by several threads at once.

    Args:
        size: token ids of the model.  ends: those of them that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> None:
        known = {*ends, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        self._ends = frozenset(end for end in known if end < size)
        self._tokenizer = tokenizer
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Made] = OrderedDict()
        self._library: Any = None
        self._filler: ThreadedMaskFiller | None = None

    def compile(self, source: GrammarSource) -> Grammar:
        """The grammar, if it can be compiled.

        Raises:
            RowError: invalid_request: it can't be; unsupported_parameter: the model's tokens don't allow it.
        """
        self._made(source)
        return Grammar(self, source)

    def mask(self, source: GrammarSource) -> GrammarMask:
        """A mask at the beginning of a grammar; raises `RowError`, too."""
        matcher, filler = self._made(source)
        return GrammarMask(matcher.deep_copy(), filler)

    def _made(self, source: GrammarSource) -> tuple[Any, ThreadedMaskFiller]:
        """What was kept, or is compiled now. Whoever wants one that is being compiled waits for it."""
        library, filler = self._ready(source.param)
        with self._lock:
            made = self._kept.get(source.text)
            mine = made is None
            if made is None:
                made = self._kept[source.text] = _Made()
                while len(self._kept) > KEPT_GRAMMARS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(source.text)
        if mine:
            try:
                began = time.monotonic()
                matcher, reason = _compiled(library, source.text)
                made.matcher = None if reason else matcher
                # A schema that took long to compile isn't compiled again, part by part.
                quick = time.monotonic() - began < MOST_SECONDS / 4
                made.reason = _where(library, source, reason) if reason and quick else reason
            finally:
                made.done.set()
        made.done.wait()
        if made.matcher is None:
            message = f"{source.param} can't be compiled: {made.reason}"
            raise RowError(RowErrorCode.INVALID_REQUEST, message, param=source.param)
        return made.matcher, filler

    def _ready(self, param: str) -> tuple[Any, ThreadedMaskFiller]:
        """The library with the model's vocabulary."""
        with self._lock:
            if self._filler is None:
                if not self._ends:
                    raise _unsupported("no token that ends an answer", param)
                if not self._tokenizer.decodes_tokens_alone:
                    raise _unsupported("a tokenizer whose tokens are no runs of bytes", param)
                vocabulary = Vocabulary.of(self._tokenizer, self._size, self._ends)
                self._library = llguidance.LLTokenizer(cast(Any, vocabulary))
                self._filler = ThreadedMaskFiller(self._ends, vocabulary.eos_token_id, self._size)
            return self._library, self._filler


def _compiled(library: Any, text: str) -> tuple[Any, str]:
    """A matcher at its beginning, and why it can't be used (empty: it can)."""
    matcher = llguidance.LLMatcher(library, text, log_level=0, limits=limits())
    reason = _error_of(matcher)
    if not reason:
        mask = matcher.compute_bitmask()  # the work of the first step, which all copies have done then
        reason = _error_of(matcher) or _second_error(matcher, mask, library.eos_token)
    return matcher, reason


def _second_error(matcher: Any, mask: bytes, eos: int) -> str:
    """Why no second token can follow (empty: one can). The library counts the items of a grammar's beginning when it
    takes the first token, so a beginning that is too large for every answer shows only there."""
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
    first = next((token for token in allowed.tolist() if token != eos), None)
    if first is None:
        return ""
    walked = matcher.deep_copy()
    if walked.consume_token(first):
        walked.compute_bitmask()
    return _error_of(walked)


def _error_of(matcher: Any) -> str:
    return _reason(matcher.get_error()) if matcher.is_error() else ""


def _where(library: Any, source: GrammarSource, reason: str) -> str:
    """The reason, with the place in a schema if there is one that fails by itself."""
    tries = MOST_TRIES
    until = time.monotonic() + MOST_SECONDS
    for path, root in source.schemas.items():
        shared: dict[str, Any] = {name: root[name] for name in ("$defs", "definitions") if name in root}
        found, left = "", [(path, root)]
        while left and tries and time.monotonic() < until:
            tries -= 1
            at, schema = left.pop(0)
            _, wrong = _compiled(library, f"start: {json_rule(adapted({**shared, **schema}))}")
            if wrong:
                found, left, reason = at, list(_inside(at, schema)), wrong
        if found:
            return f"{found}: {reason}"
    return reason


def _inside(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside a schema, each with its path."""
    for key, value in schema.items():
        inner: Iterable[tuple[str, Any]] = ()
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            inner = ((f"{path}.{key}.{name[:60]}", child) for name, child in value.items())
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            inner = ((f"{path}.{key}[{at}]", child) for at, child in enumerate(value))
        elif key in ("items", "additionalProperties"):
            inner = ((f"{path}.{key}", value),)
        yield from ((at, child) for at, child in inner if isinstance(child, dict))


def _failure(matcher: Any) -> GrammarFailure:
    """Why a mask can't go on."""
    error = matcher.get_error()
    refused = "doesn't satisfy the grammar" in error  # the library's words for a token that no mask allowed
    return GrammarFailure(_reason(error)) if refused else GrammarTooComplex(_reason(error))


def limits() -> Any:
    """What compiling and a step may cost. At the library's speeds a step's share is some 20 ms at most."""
    return llguidance.LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _reason(text: str) -> str:
    """The library's message, on one line, without the grammar that it shows."""
    said = re.split(r"\n\s*\d+ \| ", text.removesuffix("<non-verbose/>"))[0]
    said = said.replace(ONE_OF, "oneOf is kept to only where its options can't both hold; use anyOf, or strict false")
    said = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", said)
    said = "no text fits it" if said.startswith("NoExtension") else said
    return " ".join(said.split())[:MOST_MESSAGE] or "the grammar library gives no reason"


def _unsupported(what: str, param: str) -> RowError:
    message = f"{param} is not supported: the model has {what}; remove it"
    return RowError(RowErrorCode.UNSUPPORTED_PARAMETER, message, param=param)
