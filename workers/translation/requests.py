"""Translates a request's body (OpenAI's API) to the engine's request: token ids and plain numbers.

This module applies defaults, and checks whatever depends on the tokenizer or the model's size. It checks row by row: a
row's mistake fails that row only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from engine.errors import ContextLengthExceeded, RequestRefused
from engine.models.encoders.classifier import ClassifierSettings
from engine.models.encoders.settings import EmbeddingSettings
from engine.request import Pooling, Request, SamplingParams
from schemas.jobs.job import Tier
from schemas.requests.errors import RowError, RowErrorCode, invalid_request
from schemas.requests.parsing import CLASSIFY_URL, EMBEDDINGS_URL, RERANK_URL, SCORE_URL, ChatBody, CompletionBody
from schemas.requests.truncation import TruncatePrompt, limit_prompt_tokens
from workers.structured.constraints import grammar_of, shown_tokens
from workers.structured.grammar import Grammar, Grammars
from workers.text.stop_strings import StopStringWatcher
from workers.text.tokenizer import TokenIds, Tokenizer
from workers.translation.rendering import encodable, rendered_chat
from workers.translation.retained_prefixes import retained_prefixes
from workers.translation.truncation import PromptCutter

MAX_BAD_WORD_TOKENS: Final = 32_768
"""Of a request's `bad_words`. The engine keeps about 100 bytes for each."""

PRIORITIES: Final = {Tier.INTERACTIVE: 0, Tier.STANDARD: 1, Tier.BULK: 2}

Generation = ChatBody | CompletionBody


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits that a model sets to its requests.

    Attributes:
        max_model_len: tokens of one sequence, prompt and answer.
        vocab_size: number of the model's token ids, from 0.
        end_token_ids: tokens at which the engine itself ends an answer.
        generates: the model has a language-model head.
        embedding: its pooling settings; None: it makes no embeddings.  embedding_size: numbers in a vector.
        classifier: what its labels' numbers mean; None: it has no head for labels.
    """

    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    generates: bool = True
    embedding: EmbeddingSettings | None = None
    embedding_size: int = 0
    classifier: ClassifierSettings | None = None

    @property
    def pooling(self) -> Pooling | None:
        """How the hidden states of a prompt become numbers; None: they don't."""
        if self.classifier is not None:
            return self.classifier.pooling
        return None if self.embedding is None else self.embedding.pooling


@dataclass(frozen=True, slots=True)
class JobRules:
    """Settings of a job that apply to its requests.

    Attributes:
        seed: of requests without a seed.
        default_max_tokens: of requests without max_tokens (or the remaining context, if that is less).
        max_output_tokens: a request for more is refused.
        truncate_prompt: what a prompt loses that is too long for the context; None: it is refused.
        max_prompt_tokens: of several prompts in total.  max_prompt_logprobs: log-probabilities of prompt tokens in one
            response. A request with more is refused.
        max_embedding_tokens: of all inputs of one embeddings request; a request with more is refused.
        priority: the engine's class; lower runs first.
        salt: separates the prefix caches of tenants.
    """

    seed: int = 0
    default_max_tokens: int = 4_096
    max_output_tokens: int = 131_072
    truncate_prompt: TruncatePrompt | None = None
    max_prompt_tokens: int = 1_000_000
    max_prompt_logprobs: int = 4_000_000
    max_embedding_tokens: int = 300_000
    priority: int = 2
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class RowHints:
    """The planner's estimates for a row."""

    row: int
    prefix_group: int | None = None
    prefix_readers: int | None = None
    expected_tokens: int | None = None


@dataclass(slots=True)
class StopWatchers:
    """Makes the stop-string watcher of each choice for the engine, and stores the last one, which has the final
    text."""

    tokenizer: Tokenizer
    prompt: TokenIds
    stops: tuple[str, ...]
    min_tokens: int
    shown: Mapping[int, str] = field(default_factory=dict)
    includes_stop: bool = False
    watchers: dict[int, StopStringWatcher] = field(default_factory=dict)

    def __call__(self, choice: int) -> StopStringWatcher:
        watcher = StopStringWatcher(
            self.tokenizer, self.prompt, self.stops, self.min_tokens, self.shown, includes_stop=self.includes_stop
        )
        self.watchers[choice] = watcher
        return watcher

    def text(self, choice: int) -> str | None:
        """The text of a choice that a stop string ended, else None."""
        watcher = self.watchers.get(choice)
        return None if watcher is None else watcher.text

    def stop(self, choice: int) -> str | None:
        """The stop string that ended a choice, else None."""
        watcher = self.watchers.get(choice)
        return None if watcher is None else watcher.stop


class Translator:
    """Translates the requests of one job for one model."""

    def __init__(
        self, tokenizer: Tokenizer, limits: ModelLimits, rules: JobRules, grammars: Grammars | None = None
    ) -> None:
        """`grammars`: those of the model; None: the translator makes its own."""
        self._tokenizer = tokenizer
        self._grammars = grammars or Grammars(tokenizer, limits.vocab_size, limits.end_token_ids)
        self._limits = limits
        self._rules = rules
        self._default_max_tokens = min(rules.default_max_tokens, rules.max_output_tokens)
        side = rules.truncate_prompt
        render = partial(rendered_chat, tokenizer=tokenizer)
        self._cutter = None if side is None else PromptCutter(tokenizer, side, render)
        # The last row's words and their tokens: most rows of a job have the same.
        self._bad_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = (), ()
        eos = tokenizer.eos_token_id
        is_known = eos is None or eos in limits.end_token_ids or eos >= limits.vocab_size
        self._extra_end_ids = () if eos is None or is_known else (eos,)

    def prompts_of(self, body: Generation) -> list[str | TokenIds]:
        """The prompts, each as text to encode (with special tokens for completions), or as the given token ids.

        Raises `RowError` when the model has no head, the chat template refuses the messages or the tools, an id is
        outside the vocabulary, or any encoding of a text is too long for the context.
        """
        if not self._limits.generates:
            does, urls = "makes embeddings", EMBEDDINGS_URL
            if self._limits.classifier is not None:
                does, urls = "makes scores", f"{SCORE_URL}, {RERANK_URL}, {CLASSIFY_URL}"
            raise RowError(
                RowErrorCode.UNSUPPORTED_URL,
                f"the model {does} and generates nothing; use {urls}, or another model",
                param="url",
            )
        if isinstance(body, ChatBody):
            return [self._within_context(rendered_chat(body, self._tokenizer), body, 0)]
        found: list[str | TokenIds] = []
        for at, prompt in enumerate(body.prompts):
            name = prompt_name(body, at)
            if isinstance(prompt, str):
                found.append(self._within_context(encodable(prompt, name), body, at))
                continue
            for token_id in prompt:
                self._check_token(name, token_id)
            found.append(np.asarray(prompt, dtype=np.int32))
        return found

    def request(self, request_id: str, body: Generation, prompts: Sequence[TokenIds], hints: RowHints) -> Request:
        """The engine's request for a body whose prompts are encoded (each int32 [prompt_tokens]).

        It has no deadline: that counts from the request's arrival in the engine. Raises `RowError`.
        """
        for token_id in body.stop_token_ids:
            self._check_token("stop_token_ids", token_id)
        for token_id in body.allowed_token_ids or ():
            self._check_token("allowed_token_ids", token_id)
        bias = {int(token_id): value for token_id, value in body.logit_bias.items()}
        for token_id in bias:
            self._check_token("logit_bias", token_id)
        cut = [self._truncated(body, at, prompt) for at, prompt in enumerate(prompts)]
        is_whole = all(len(one) == len(other) for one, other in zip(cut, prompts, strict=True))
        self._check_totals(body, sum(map(len, cut)))
        members: list[Request] = []
        for at in range(len(prompts)):
            shared = members[0].params if members else None
            members.append(self._member(request_id, body, cut, at, bias, hints, shared))
        if (bans := members[0].params.bans) is not None:
            bans.check(self._limits.vocab_size)  # here, and not in the thread that computes the steps
            bans.static_mask(self._limits.vocab_size)
        return replace(
            members[0],
            # The planner groups rows with a common prefix by their first prompts, before anything is cut off.
            prefix_group=hints.prefix_group if is_whole else None,
            prefix_readers=hints.prefix_readers or 0 if is_whole else 0,
            readers_known=len(members) == 1 and is_whole,
            retain=self._retained(body, prompts) if is_whole else (),
            more=tuple(members[1:]),
        )

    def _retained(self, body: Generation, prompts: Sequence[TokenIds]) -> tuple[tuple[int, float], ...]:
        if not isinstance(body, ChatBody) or not body.cache_breakpoints:
            return ()
        return retained_prefixes(body, prompts[0], self._tokenizer)

    def _truncated(self, body: Generation, at: int, prompt: TokenIds) -> TokenIds:
        """The prompt cut as the job wants it, or its last tokens, as many as `truncate_prompt_tokens` leaves (vLLM's
        rule)."""
        max_tokens = body.truncate_prompt_tokens
        if max_tokens is None:
            if self._cutter is None:
                return prompt
            context, default = self._limits.max_model_len, self._default_max_tokens
            limit = limit_prompt_tokens(body, len(prompt), context, default)
            return prompt if limit == len(prompt) else self._cutter.cut(body, at, prompt, limit)
        if max_tokens == -1:
            max_tokens = max(1, self._limits.max_model_len - (body.output_limit or 0))
        return prompt[max(0, len(prompt) - max_tokens) :]

    def _check_totals(self, body: Generation, tokens: int) -> None:
        """Raises `RowError` for prompts of too many tokens together, or too many of their log-probabilities."""
        rules = self._rules
        if body.num_prompts > 1 and tokens > rules.max_prompt_tokens:
            raise invalid_request(
                f"prompt holds {tokens} tokens in {body.num_prompts} prompts, but at most {rules.max_prompt_tokens} "
                "are allowed together; send several requests",
                "prompt",
            )
        scores = _prompt_scores(body)
        if not scores:
            return
        most, name = max((count, name) for name, count in scores.items())
        entries = tokens * (most + 1) * body.n
        if entries > rules.max_prompt_logprobs:
            raise invalid_request(
                f"{name} is {most}, which makes {entries} log-probabilities of {tokens} prompt tokens and {body.n} "
                f"choices, but at most {rules.max_prompt_logprobs} are allowed; lower {name} or n, or send fewer or "
                "shorter prompts",
                name,
            )

    def _member(
        self,
        request_id: str,
        body: Generation,
        prompts: Sequence[TokenIds],
        at: int,
        bias: dict[int, float],
        hints: RowHints,
        shared: SamplingParams | None,
    ) -> Request:
        """The engine's request for one of the prompts, as if it were the only one. `shared`: the parameters of another
        one, whose lists it shares."""
        prompt, name = prompts[at], prompt_name(body, at)
        if not len(prompt):
            raise invalid_request(f"the {name} holds no tokens; give some text", name)
        max_tokens = self._max_tokens(body, len(prompt), name)
        if body.min_tokens > max_tokens:
            raise invalid_request(
                f"min_tokens is {body.min_tokens}, but at most {max_tokens} can be generated", "min_tokens"
            )
        seed = row_seed(self._rules.seed, hints.row, at) if body.seed is None else body.seed
        try:
            if shared is None:
                params = self._params(body, max_tokens, bias, seed)
            else:
                params = replace(shared, max_tokens=max_tokens, seed=seed)
        except RequestRefused as error:
            raise invalid_request(str(error), None) from error
        watchers = None
        if body.stop:
            shown = shown_tokens(body, self._tokenizer)
            includes_stop = body.include_stop_str_in_output
            watchers = StopWatchers(self._tokenizer, prompt, body.stop, body.min_tokens, shown, includes_stop)
        expected = hints.expected_tokens
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            priority=self._rules.priority,
            expected_tokens=None if expected is None else max(1, min(expected, max_tokens)),
            salt=self._rules.salt,
            watcher=watchers,
            mask=self._grammar(body, prompt),
        )

    def _grammar(self, body: Generation, prompt: TokenIds) -> Grammar | None:
        """The grammar that constrains the answer."""
        wanted = grammar_of(body, prompt, self._tokenizer)
        return None if wanted is None else self._grammars.compile(wanted)

    def _params(self, body: Generation, max_tokens: int, bias: dict[int, float], seed: int) -> SamplingParams:
        top_logprobs = body.top_logprobs if isinstance(body, ChatBody) else body.logprobs
        return SamplingParams(
            max_tokens=max_tokens,
            n=body.n,
            temperature=body.temperature,
            top_k=max(0, body.top_k),
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
            logit_bias=bias,
            allowed_token_ids=body.allowed_token_ids,
            bad_words=self._bad_word_tokens(body.bad_words),
            seed=seed,
            stop_token_ids=body.stop_token_ids if body.ignore_eos else (*body.stop_token_ids, *self._extra_end_ids),
            ignore_eos=body.ignore_eos,
            min_tokens=body.min_tokens,
            logprobs=None if body.logprobs is False else top_logprobs,
            prompt_logprobs=max(_prompt_scores(body).values(), default=None),
        )

    def _bad_word_tokens(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        given, ids = self._bad_words
        if words != given:
            ids = bad_word_tokens(self._tokenizer, words)
            self._bad_words = words, ids
        return ids

    def _max_tokens(self, body: Generation, prompt_tokens: int, name: str) -> int:
        requested = body.output_limit
        limit = self._rules.max_output_tokens
        if requested is not None and requested > limit:
            raise invalid_request(
                f"max_tokens is {requested}, but this job allows at most {limit}; lower it", "max_tokens"
            )
        left = self._limits.max_model_len - prompt_tokens
        if requested is None and left >= 1:
            return min(self._default_max_tokens, left)
        wanted = 1 if requested is None else requested
        if wanted > left:
            error = ContextLengthExceeded(prompt_tokens, wanted, self._limits.max_model_len)
            message = str(error).replace("prompt", name, 1)
            fields = ("max_tokens", "max_tokens")
            raise RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=_param(name), fields=fields) from error
        return wanted

    def _within_context(self, text: str, body: Generation, at: int) -> str:
        """Return the text. Raises `RowError` when no encoding of it leaves room for one token of an answer."""
        if body.truncate_prompt_tokens is not None or self._cutter is not None:
            return text
        limit = self._limits.max_model_len
        if min_tokens := self._tokenizer.count_excess(text, limit - (body.output_limit != 0)):
            name = prompt_name(body, at)
            message = f"{name} of at least {min_tokens} tokens, but the context holds {limit}; shorten the prompt"
            raise RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=_param(name))
        return text

    def _check_token(self, name: str, token_id: int) -> None:
        if token_id >= self._limits.vocab_size:
            size = self._limits.vocab_size
            raise invalid_request(f"{name} holds token {token_id}, but the model's ids end at {size - 1}", name)


def bad_word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of bad words, each as it begins a text and as it stands behind a blank (vLLM's rule). Raises
    `RowError`."""
    texts = [blank + encodable(word, "bad_words").lstrip() for word in words for blank in ("", " ")]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    if (total := sum(map(len, encoded))) > MAX_BAD_WORD_TOKENS:
        message = f"bad_words hold {total} tokens, but at most {MAX_BAD_WORD_TOKENS} are allowed; name fewer or shorter"
        raise invalid_request(message, "bad_words")
    return tuple(dict.fromkeys(tuple(ids.tolist()) for ids in encoded if len(ids)))


def row_seed(job_seed: int, row: int, prompt: int = 0) -> int:
    """The seed of a prompt of a row without one: the same in each run of the job, different for each row and prompt."""
    name = f"{job_seed}:{row}:{prompt}" if prompt else f"{job_seed}:{row}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _prompt_scores(body: Generation) -> dict[str, int]:
    """The parameters that ask for log-probabilities of the prompt's tokens, and how many likeliest each names."""
    scores = {} if body.prompt_logprobs is None else {"prompt_logprobs": body.prompt_logprobs}
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        scores["logprobs"] = body.logprobs
    return scores


def prompt_name(body: Generation, at: int) -> str:
    """A prompt's name in messages."""
    return f"prompt[{at}]" if body.num_prompts > 1 else "prompt"


def _param(name: str) -> str | None:
    """The field of an error about a prompt's length; a single prompt may be a conversation's."""
    return None if name == "prompt" else name
