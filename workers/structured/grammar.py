"""Constrains answers by grammars: a token mask allows only the tokens that a valid answer may continue with.

llguidance (Rust) compiles a grammar for a model's tokens and advances it token by token. It gets the vocabulary once
for a model, with the first grammar. Compiled grammars are cached, since the rows of a job repeat theirs. Compiling
happens on the threads that prepare rows, never on the one that steps the engine. A step's work is bounded (`limits`),
and its masks are filled in one call, on several threads.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import llguidance
import numpy as np
from numpy.typing import NDArray

from engine.sampling.rows import MASK_FAILED
from schemas.requests.errors import RowError, RowErrorCode
from workers.structured.json_schema import adapt_schema, json_rule
from workers.text.tokenizer import Tokenizer
from workers.text.vocabulary import Vocabulary

OPTIONS: Final = '%llguidance {"no_forcing": true}\n'
"""Lets the model choose among all tokenizations of forced text, as it would without a grammar."""

TEXT: Final = r"/(?s:.)*/"
"""Any text: what is written without special tokens."""

MAX_CACHED_GRAMMARS: Final = 512
"""Compiled grammars of real schemas take a fifth of a megabyte each."""

MAX_MESSAGE_CHARS: Final = 300
PANIC: Final = "panic"
"""In the library's message about its own failure."""

ONE_OF: Final = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""The library's message about oneOf; its option corresponds to `strict: false` here."""

MAX_DIAGNOSIS_TRIES: Final = 100
MAX_DIAGNOSIS_SECONDS: Final = 1.0
"""Limit of the search for the part of a schema that can't be compiled."""


def literal(text: str) -> str:
    """A string in a grammar."""
    return json.dumps(text)


def for_slashes(pattern: str) -> str:
    """Escape a regex for use between slashes, on one line."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")


class GrammarFailure(Exception):
    """Raised when a mask can't continue: its grammar does not accept the token."""


class GrammarTooComplex(GrammarFailure):
    """Raised when a grammar reaches a limit of `limits` while an answer is generated. The request's grammar causes
    it."""


def too_complex(message: str) -> str | None:
    """The reason in the engine's message about a mask that raised `GrammarTooComplex`; None: another failure."""
    _, found, reason = message.partition(f"{GrammarTooComplex.__name__}: ")
    return reason if found and message.startswith(MASK_FAILED) else None


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """Ends a thought that is marked in plain text. (The library can count the tokens of a rule, but not end one both at
    a text and at a number of tokens.)

    Attributes:
        tokens: that the thought may have, at least one.
        opening: begins the thought; empty: it has begun.  closing: ends it.
        rest: the grammar from there on if the thought has not ended by itself, which begins with `closing`.
    """

    tokens: int
    opening: bytes
    closing: bytes
    rest: str


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar to compile.

    Attributes:
        text: in llguidance's Lark.
        param: the body's field that requests it.
        schemas: the JSON schemas in it by their path in the body, for the diagnosis of an error.
        limit: ends the thought before the answer; None: the grammar does.
    """

    text: str
    param: str
    schemas: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    limit: ThoughtLimit | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that compiles. A call makes the mask of a choice (`Request.mask`).

    It holds no compiled grammar, because a job may have as many grammars as waiting rows. When the compiled grammar has
    left the cache, it is compiled again.
    """

    grammars: Grammars
    source: GrammarSource

    def __call__(self, choice: int) -> GrammarMask:
        return self.grammars.mask(self.source)


class _LimitedThought:
    """Counts the tokens of a choice's thought."""

    def __init__(self, limit: ThoughtLimit, tokens: Sequence[bytes], rest: Any) -> None:
        """`tokens`: the bytes of each token id; `rest`: the matcher of `limit.rest` at its start."""
        self._rest = rest
        self._limit = limit
        self._tokens = tokens
        self._text = b""
        self._ids: list[int] = []
        self._has_begun = not limit.opening
        self._left = limit.tokens

    def push(self, token_id: int) -> Any:
        """Add the next token. Returns the matcher of the rest if the thought may have no more and has not ended."""
        self._text += self._tokens[token_id]
        self._ids.append(token_id)
        if not self._has_begun:
            before, found, behind = self._text.partition(self._limit.opening)
            self._has_begun = bool(found)
            self._text = behind if found else before
            return None
        self._left -= 1
        if self._left or self._limit.closing in self._text:
            return None
        begun = max(range(len(self._limit.closing)), key=lambda count: count if self._begins_marker(count) else 0)
        for last in self._ids[len(self._ids) - begun :]:
            self._rest.consume_token(last)
        return self._rest

    def _begins_marker(self, count: int) -> bool:
        """Whether the last tokens have begun the marker."""
        last = b"".join(self._tokens[token_id] for token_id in self._ids[len(self._ids) - count :])
        return self._limit.closing.startswith(last)


class GrammarMask:
    """A choice's state in its grammar (an engine's `TokenMask`)."""

    __slots__ = ("_forget", "_thought", "filler", "matcher")

    def __init__(
        self,
        matcher: Any,
        filler: ThreadedMaskFiller,
        forget: Callable[[], None] = lambda: None,
        thought: _LimitedThought | None = None,
    ) -> None:
        """`forget`: called when the compiled grammar is unusable."""
        self.matcher = matcher
        self.filler = filler
        self._forget = forget
        self._thought = thought

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        """See `TokenMask.fill`. Raises `GrammarFailure`."""
        for error in self.filler.fill([self], bitmask[None]).values():
            raise error

    def advance(self, token_id: int) -> None:
        """See `TokenMask.advance`. Raises `GrammarFailure`."""
        if token_id in self.filler.ends:
            return
        if not self.matcher.consume_token(token_id):
            raise self.failure()
        if self._thought is not None and (rest := self._thought.push(token_id)) is not None:
            self.matcher, self._thought = rest, None

    def failure(self) -> GrammarFailure:
        """The error of a matcher that can't continue. All copies of a compiled grammar share a state, which a panic of
        the library leaves locked for ever: others have to compile it again."""
        if PANIC in self.matcher.get_error():
            self._forget()
        return _failure(self.matcher)


class ThreadedMaskFiller:
    """Fills the masks of many choices at once (an engine's `ThreadedMaskFiller`), on threads of its own.

    Args:
        ends: tokens that end an answer; all are allowed where the grammar may end.
        eos: the one of them that the grammar library uses.
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
        return {at: masks[at].failure() for matcher, at in matchers if matcher.is_error()}


@dataclass(slots=True)
class _CompiledGrammar:
    """The result of compiling: a matcher at its start, or the reason of the failure."""

    matcher: Any = None
    reason: str = ""
    done: threading.Event = field(default_factory=threading.Event)


class Grammars:
    """Compiles and caches the grammars of one model. Thread-safe.

    Args:
        size: number of the model's token ids.  ends: those of them that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> None:
        known = {*ends, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        self._ends = frozenset(end for end in known if end < size)
        self._tokenizer = tokenizer
        self._size = size
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, _CompiledGrammar] = OrderedDict()
        self._library: Any = None
        self._filler: ThreadedMaskFiller | None = None
        self._tokens: Sequence[bytes] = ()

    def compile(self, source: GrammarSource) -> Grammar:
        """Compile the grammar.

        Raises:
            RowError: invalid_request: it can't be compiled; unsupported_parameter: the model's tokens don't allow it.
        """
        for text in _texts(source):
            self._compiled(text, source)
        return Grammar(self, source)

    def mask(self, source: GrammarSource) -> GrammarMask:
        """A mask at the start of a grammar. Raises `RowError` as `compile`."""
        matchers = [self._compiled(text, source).deep_copy() for text in _texts(source)]
        _, filler, tokens = self._ready(source.param)
        thought = None if source.limit is None else _LimitedThought(source.limit, tokens, matchers[1])
        return GrammarMask(matchers[0], filler, partial(self._forget, source), thought)

    def _forget(self, source: GrammarSource) -> None:
        with self._lock:
            for text in _texts(source):
                self._cache.pop(text, None)

    def _compiled(self, text: str, source: GrammarSource) -> Any:
        """The matcher of a source's grammar at its start, from the cache or compiled now; waits for one that another
        thread is compiling."""
        library, _, _ = self._ready(source.param)
        with self._lock:
            entry = self._cache.get(text)
            is_missing = entry is None
            if entry is None:
                entry = self._cache[text] = _CompiledGrammar()
                while len(self._cache) > MAX_CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(text)
        if is_missing:
            try:
                began = time.monotonic()
                matcher, reason = _compile(library, text)
                entry.matcher = None if reason else matcher
                # The diagnosis would compile a slow schema again, part by part.
                is_quick = time.monotonic() - began < MAX_DIAGNOSIS_SECONDS / 4
                entry.reason = _locate_error(library, source, reason) if reason and is_quick else reason
            finally:
                entry.done.set()
        entry.done.wait()
        if entry.matcher is None:
            message = f"{source.param} can't be compiled: {entry.reason}"
            fields = [source.param, *(path for path in source.schemas if entry.reason.startswith(path))]
            raise RowError(RowErrorCode.INVALID_REQUEST, message, param=source.param, fields=fields)
        return entry.matcher

    def _ready(self, param: str) -> tuple[Any, ThreadedMaskFiller, Sequence[bytes]]:
        """The library's tokenizer with the model's vocabulary, and the bytes of each token, made at the first call."""
        with self._lock:
            if self._filler is None:
                if not self._ends:
                    raise _unsupported("no token that ends an answer", param)
                if not self._tokenizer.decodes_tokens_alone:
                    raise _unsupported("a tokenizer whose tokens are no runs of bytes", param)
                vocabulary = Vocabulary.of(self._tokenizer, self._size, self._ends)
                self._library = llguidance.LLTokenizer(cast(Any, vocabulary))
                self._filler = ThreadedMaskFiller(self._ends, vocabulary.eos_token_id, self._size)
                self._tokens = vocabulary.tokens
            return self._library, self._filler, self._tokens


def _texts(source: GrammarSource) -> list[str]:
    return [source.text] if source.limit is None else [source.text, source.limit.rest]


def _compile(library: Any, text: str) -> tuple[Any, str]:
    """A matcher at its start, and why it can't be used (empty: it can)."""
    matcher = llguidance.LLMatcher(library, text, log_level=0, limits=limits())
    reason = _error_of(matcher)
    if not reason:
        mask = matcher.compute_bitmask()  # computed once for all copies: the first step's work
        reason = _error_of(matcher) or _second_error(matcher, mask, library.eos_token)
    return matcher, reason


def _second_error(matcher: Any, mask: bytes, eos: int) -> str:
    """Why no second token can follow (empty: one can). The library checks the size of a grammar's start only with the
    first token, so a start that is too large for every answer fails only here."""
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
    first = next((token for token in allowed.tolist() if token != eos), None)
    if first is None:
        return ""
    advanced = matcher.deep_copy()
    if advanced.consume_token(first):
        advanced.compute_bitmask()
    return _error_of(advanced)


def _error_of(matcher: Any) -> str:
    return _reason(matcher.get_error()) if matcher.is_error() else ""


def _locate_error(library: Any, source: GrammarSource, reason: str) -> str:
    """The reason, with the path of the innermost schema that fails by itself, if there is one."""
    tries_left = MAX_DIAGNOSIS_TRIES
    until = time.monotonic() + MAX_DIAGNOSIS_SECONDS
    for path, root in source.schemas.items():
        shared: dict[str, Any] = {name: root[name] for name in ("$defs", "definitions") if name in root}
        found, pending = "", [(path, root)]
        while pending and tries_left and time.monotonic() < until:
            tries_left -= 1
            at, schema = pending.pop(0)
            _, error = _compile(library, f"start: {json_rule(adapt_schema({**shared, **schema}))}")
            if error:
                found, pending, reason = at, list(_inside(at, schema)), error
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
    """The error of a mask that can't continue."""
    error = matcher.get_error()
    is_refused = "doesn't satisfy the grammar" in error  # the library's message about a token that no mask allowed
    return GrammarFailure(_reason(error)) if is_refused else GrammarTooComplex(_reason(error))


def limits() -> Any:
    """Limits of compiling and of a step. At the library's speed a step takes some 20 ms at most."""
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
    """The library's message on one line, without the quoted grammar."""
    message = re.split(r"\n\s*\d+ \| ", text.removesuffix("<non-verbose/>"))[0]
    message = message.replace(
        ONE_OF, "oneOf is kept to only where its options can't both hold; use anyOf, or strict false"
    )
    message = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", message)
    message = "no text fits it" if message.startswith("NoExtension") else message
    return " ".join(message.split())[:MAX_MESSAGE_CHARS] or "the grammar library gives no reason"


def _unsupported(what: str, param: str) -> RowError:
    message = f"{param} is not supported: the model has {what}; remove it"
    return RowError(RowErrorCode.UNSUPPORTED_PARAMETER, message, param=param)
