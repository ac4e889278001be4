"""Converts requests to vLLM's parameters, and its results back. What vLLM can't compute is refused by name."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import RequestRefused
from engine.request import Request, TokenLogprobs

if TYPE_CHECKING:
    from vllm import PoolingParams
    from vllm import SamplingParams as VLLMParams
    from vllm.logprobs import FlatLogprobs

MAX_BIAS = 100.0
"""vLLM clamps larger biases without a word."""


def grammar_of(request: Request) -> str | None:
    """The grammar of the answer in llguidance's Lark; None: there is none. Raises `RequestRefused` for a mask that is
    no grammar (`workers.structured.grammar.Grammar` has its `source.text`), or more than one (its `source.limit`)."""
    if request.mask is None:
        return None
    source = getattr(request.mask, "source", None)
    text = getattr(source, "text", None)
    if not isinstance(text, str):
        raise RequestRefused("a mask that is no grammar is not available with vLLM")
    if getattr(source, "limit", None) is not None:
        raise RequestRefused("a budget of a thought whose markers are plain text is not available with vLLM")
    return text


def continues(request: Request) -> bool:
    """Whether vLLM can go on behind tokens that were sampled before. They become a part of its prompt, where neither a
    grammar nor a penalty of answers nor a bad word sees them."""
    params = request.params
    needs_output = params.frequency_penalty or params.presence_penalty or params.has_long_bad_words
    return request.mask is None and not needs_output


def check_supported(request: Request, end_token_ids: tuple[int, ...]) -> None:
    """Raise `RequestRefused` for what vLLM does not compute."""
    params = request.params
    grammar_of(request)
    if params.prompt_targets:
        raise RequestRefused("prompt_targets are not available with vLLM; score each with prompt_logprobs")
    if any(abs(bias) > MAX_BIAS for bias in params.logit_bias.values()):
        raise RequestRefused(f"logit_bias is not available with vLLM beyond -{MAX_BIAS:g} to {MAX_BIAS:g}")
    if request.mask is not None and params.ignore_eos and not set(params.stop_token_ids) & set(end_token_ids):
        raise RequestRefused("ignore_eos with a grammar is not available with vLLM: the grammar's end is an end token")


def sampling_params(request: Request, choice: int, known: int, end_token_ids: tuple[int, ...]) -> VLLMParams:
    """vLLM's parameters of one choice that has `known` tokens already.

    End tokens are passed as stop tokens, so that vLLM's own idea of the model's end tokens does not matter. A request
    that scores its prompt samples one token, which is thrown away.
    """
    from vllm import SamplingParams as VLLMParams  # noqa: PLC0415 - the package is optional
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: PLC0415

    params = request.params
    ends = params.stop_token_ids if params.ignore_eos else (*end_token_ids, *params.stop_token_ids)
    grammar = grammar_of(request)
    return VLLMParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=dict(params.logit_bias) or None,
        allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        _bad_words_token_ids=[list(word) for word in params.bad_words] or None,
        seed=None if params.greedy else choice_seed(params.seed, choice, known),
        max_tokens=max(1, params.max_tokens - known),
        min_tokens=max(0, params.min_tokens - known),
        ignore_eos=True,
        stop_token_ids=list(dict.fromkeys(ends)) or None,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs if choice == 0 else None,
        flat_logprobs=True,
        structured_outputs=None if grammar is None else StructuredOutputsParams(grammar=grammar),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def pooling_params() -> PoolingParams:
    """Parameters of a prompt whose hidden states are returned, one by one: the pooling is ours."""
    from vllm import PoolingParams  # noqa: PLC0415 - the package is optional

    return PoolingParams(task="token_embed", use_activation=False)


def choice_seed(seed: int, choice: int, known: int) -> int:
    """The seed of a choice's draws behind its first `known` tokens: vLLM draws by a generator of each request, which
    would begin anew with the same numbers."""
    if not choice and not known:
        return seed & (2**63 - 1)
    digest = hashlib.blake2b(f"{seed}:{choice}:{known}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def token_logprobs(flat: FlatLogprobs, top: int) -> TokenLogprobs:
    """Log-probabilities of consecutive tokens. vLLM gives a position's own token first and then the `top` best ones;
    nothing for a prompt's first token."""
    count = len(flat)
    chosen = np.full(count, np.nan, np.float32)
    top_ids, values = np.full((count, top), -1, np.int32), np.full((count, top), np.nan, np.float32)
    for at, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        if end == start:
            continue
        chosen[at] = flat.logprobs[start]
        best = slice(start + 1, min(end, start + 1 + top))
        top_ids[at, : best.stop - best.start] = flat.token_ids[best]
        values[at, : best.stop - best.start] = flat.logprobs[best]
    return TokenLogprobs(chosen, top_ids, values)


def joined(parts: list[TokenLogprobs], top: int) -> TokenLogprobs:
    """The log-probabilities of consecutive runs of tokens as one."""
    if not parts:
        empty = np.zeros((0, top), np.float32)
        return TokenLogprobs(np.zeros(0, np.float32), empty.astype(np.int32), empty)
    fields: Any = zip(*((part.chosen, part.top_ids, part.top) for part in parts), strict=True)
    return TokenLogprobs(*(np.concatenate(field) for field in fields))
