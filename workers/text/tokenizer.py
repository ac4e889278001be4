"""Encodes text to token ids and decodes them, with a model's own tokenizer.

transformers builds the tokenizer and renders chat templates (in its jinja sandbox). Encoding and decoding call the Rust
tokenizer behind it directly, a whole shard in one call. That object is never reconfigured after loading (no truncation
or padding is switched on), so one `Tokenizer` may be used by several threads at once.

Only the template writes special tokens into a conversation. A special token that a message spells is encoded as text:
otherwise the author of a message could end it and continue in another role.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jinja2.meta
import numpy as np
import structlog
import tokenizers
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatMessage
from schemas.requests.structured import Tool, ToolCall
from workers.errors import TokenizerError
from workers.text.chat_options import OWN_CHAT, ChatOptions
from workers.text.pair_frames import FramePart, cut_lengths, pair_frame
from workers.text.prompt_bounds import bound_of, component_state
from workers.text.reasoning import REPLACEMENT, TOKEN_MARK, ReasoningMarkers, format_of, without_marks
from workers.text.token_bytes import TokenBytes, dropped_blanks, without_blanks

logger = structlog.get_logger(__name__)

TokenIds = NDArray[np.int32]

Texts = tuple[str, ...]
"""A text, or a pair of texts that a model reads together."""


class EncodedText(NamedTuple):
    """A text or a pair: its token ids, and the number of the text that each is from (None: not told apart); both int32
    [tokens]."""

    ids: TokenIds
    types: TokenIds | None = None


DIGIT_SPLITTING_PRE_TOKENIZERS: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
"""Values of a GGUF file's `tokenizer.ggml.pre` whose merges were trained with every digit split off first (llama.cpp,
src/llama-vocab.cpp). transformers reads such files with GPT-2's plain splitting, which encodes blanks before numbers
as other tokens than those the model was trained on."""

GPT2_PRE_TOKENIZERS: Final = frozenset({"gpt-2", "gpt2", "default", "phi-2", "jina-es", "jina-de", "mpt", "olmo"})
"""Values for which GPT-2's plain splitting is correct."""

SPELT: Final = "\ufdd0"
"""Marks a special token that a message spells: it follows the token's first character from the template to the encoder.
Unicode reserves this character for internal use."""

CONTEXT_TOKENS: Final = 4
"""Prompt tokens decoded before an answer, for tokenizers whose decoding depends on the preceding tokens."""

PIECE_CHARS: Final = 1 << 17
"""Characters of a long text that are encoded at once to count its tokens."""

TEMPLATE_NAMES: Final = frozenset(
    {
        *jinja2.defaults.DEFAULT_NAMESPACE, "messages", "tools", "documents", "add_generation_prompt",
        "continue_final_message", "raise_exception", "strftime_now", "bos_token", "eos_token", "unk_token", "sep_token",
        "pad_token", "cls_token", "mask_token", "additional_special_tokens", "conversation", "chat_template",
        "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip
"""Names that a chat template reads and no request sets: of jinja, of transformers, and those that it calls with."""

NOTHING_SHOWN: Final[Mapping[int, str]] = MappingProxyType({})


class Tokenizer:
    """The tokenizer of one model.

    Attributes:
        bos_token_id, eos_token_id: as the tokenizer names them, or None.
        size: ids from 0 that encode or decode to something.
        byte_level: whether tokens are runs of bytes, so that the texts of token runs can be joined.
        decodes_tokens_alone: whether each token has bytes of its own, except for a blank at the beginning.
        tool_template: the chat template for conversations with tools.
        template_variables: of the chat templates, that a request may set.
        renders_pairs: the chat template has roles for a query and a document (`render_pair`).
        takes_instruction: with them it reads an instruction.
        added_tokens: ids and texts of the tokens that are matched whole.  special_ids: those that decoding leaves out.
        special_spellings: ids and texts of these.
        joins_bytes: whether a text is its joined `token_bytes`; otherwise a token's text depends on its neighbours.
        reasoning: how the model marks its thought; None: it marks none.  reasoning_ids: the tokens of these markers.
        shows_thought: its chat template shows one, split off (`reasoning`) or left in the text.
        thinking_token_budget: of requests without one; None: a thought may have any length.
    """

    def __init__(self, hf: Any, chat: ChatOptions = OWN_CHAT) -> None:
        """`hf` is a transformers tokenizer with a Rust backend. Raises `TokenizerError`."""
        if not getattr(hf, "is_fast", False):
            raise TokenizerError(
                f"the tokenizer {type(hf).__name__} has no fast form; convert it to a tokenizer.json beside the model"
            )
        self._hf = hf
        self._backend: tokenizers.Tokenizer = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        if chat.template is not None:
            hf.chat_template = chat.template
        self._template: str | None = hf.get_chat_template() if hf.chat_template else None
        self.tool_template: str | None = hf.get_chat_template(tools=[{}]) if hf.chat_template else None
        self.template_variables = template_variables(self._template or "") | template_variables(
            self.tool_template or ""
        )
        self.renders_pairs = all(_names_role(self._template or "", role) for role in ("query", "document"))
        self._reads_instruction = "instruction" in self.template_variables
        self.takes_instruction = self._reads_instruction or _names_role(self._template or "", "system")
        self._supports_developer = self._template is not None and "developer" in self._template
        self.bos_token_id: int | None = hf.bos_token_id
        self.eos_token_id: int | None = hf.eos_token_id
        self.size: int = self._backend.get_vocab_size(with_added_tokens=True)
        decoder = component_state(self._backend.decoder)
        self.byte_level = decoder.get("type") == "ByteLevel"
        self.decodes_tokens_alone = self.byte_level or any(map(_joins_pieces, decoder.get("decoders", [decoder])))
        added = self._backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_spellings: Mapping[int, str] = {i: self.added_tokens[i] for i in sorted(self.special_ids)}
        self.token_bytes = TokenBytes(self.id_to_token, self.added_tokens, self.special_ids, self.byte_level)
        dropped = dropped_blanks(decoder)
        self.joins_bytes = dropped is not None
        self._dropped_blanks = dropped or 0
        spellings = sorted((self.added_tokens[i] for i in self.special_ids if self.added_tokens[i]), key=len)[::-1]
        self._special = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self._marked = re.compile("|".join(re.escape(_mark_as_text(text)) for text in spellings) or r"(?!)")
        self._plain_ids = {
            _mark_as_text(text): ids for text, ids in zip(spellings, self._as_text(spellings), strict=True)
        }
        self._bound = bound_of(self._backend)
        self._frames: dict[int, tuple[FramePart, ...]] = {}  # by the number of texts, read off when it is needed
        self._gives_types = "token_type_ids" in hf.model_input_names
        templates = "".join({self._template or "", self.tool_template or ""})
        form = format_of(templates, chat.reasoning_parser)
        self.shows_thought = form is not None or format_of(templates, None) is not None
        self.reasoning = None if form is None else ReasoningMarkers(form, self.added_tokens)
        self.reasoning_ids = frozenset(() if self.reasoning is None else self.reasoning.shown)
        self.thinking_token_budget = chat.thinking_token_budget
        if chat.thinking_token_budget is not None and form is None:
            raise TokenizerError(
                "--thinking-token-budget: the model's chat template shows no thought; name its form with "
                "--reasoning-parser, or leave it out"
            )

    @classmethod
    def load(cls, path: Path, chat: ChatOptions = OWN_CHAT) -> Tokenizer:
        """Load the tokenizer of a model folder (Hugging Face layout) or of a GGUF file, without network access.

        Raises `TokenizerError` when there is none or it can't be built.
        """
        try:
            return cls(_from_gguf(path) if path.is_file() else _from_folder(path), chat)
        except TokenizerError:
            raise
        except Exception as error:  # the Rust side raises no other class, and transformers doesn't validate files
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TokenizerError(f"{path}: no tokenizer that can be loaded (tokenizer.json, …): {reason}") from error

    def first_difference(self, other: Tokenizer) -> int | None:
        """The lowest token id whose text differs between the tokenizers; None: there is none."""
        mine, theirs = (of._backend.get_vocab(with_added_tokens=True) for of in (self, other))
        return min((token_id for _, token_id in mine.items() ^ theirs.items()), default=None)

    def save(self, folder: Path) -> None:
        """Write the files of a Hugging Face folder: tokenizer.json, its settings and the chat template."""
        self._hf.save_pretrained(folder)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenIds]:
        """Token ids of each text, int32 [tokens]; `add_special_tokens` adds the tokenizer's own ones (BOS)."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_texts(self, texts: Sequence[Texts], limits: Sequence[int | None] | None = None) -> list[EncodedText]:
        """Each text or pair with the special tokens around and between them. A text that stands in several pairs is
        encoded once.

        Args:
            limits: for each text or pair None, or a number above `num_added_tokens`: tokens at the end beyond it are
                left out; of a pair the longer text is cut first.
        """
        distinct = list(dict.fromkeys(text for one in texts for text in one))
        encodings = self._backend.encode_batch_fast(distinct, add_special_tokens=False)
        ids = {text: np.asarray(found.ids, dtype=np.int32) for text, found in zip(distinct, encodings, strict=True)}
        limits = [None] * len(texts) if limits is None else limits
        return [self._framed([ids[text] for text in one], limit) for one, limit in zip(texts, limits, strict=True)]

    def _framed(self, texts: Sequence[TokenIds], limit: int | None) -> EncodedText:
        """The encoded text or pair, cut, with the special tokens."""
        if limit is not None:
            room = limit - self.num_added_tokens(pair=len(texts) > 1)
            texts = [ids[:length] for ids, length in zip(texts, cut_lengths([*map(len, texts)], room), strict=True)]
        if (frame := self._frames.get(len(texts))) is None:
            frame = self._frames[len(texts)] = pair_frame(self._backend, len(texts))
        parts = [texts[part.text] if part.text is not None else part.ids for part in frame]
        types = None
        if self._gives_types:
            lengths = list(map(len, parts))
            types = np.repeat([part.type_id for part in frame], lengths).astype(np.int32)
        return EncodedText(np.concatenate(parts), types)

    def without_last_tokens(self, text: str, count: int, *, chat: bool) -> str:
        """The text without its last `count` tokens, at least 1; a character that is partly dropped is dropped whole.
        `chat`: it is a message's, in which spelt special tokens are text."""
        end = len(text)
        spelt = list(self._special.finditer(text)) if chat else []
        for found in (*reversed(spelt), None):
            begin = 0 if found is None else found.end()
            (encoding,) = self._backend.encode_batch([text[begin:end]], add_special_tokens=False)
            if (kept := len(encoding) - count) >= 0:
                span = encoding.token_to_chars(kept) if kept else None
                return text[: begin + min(span[0] if span else 0, end - begin - 1)]
            if found is None:
                break
            count -= len(encoding) + len(self._plain_ids[_mark_as_text(found[0])])
            end = found.start()
            if count <= 0:
                return text[:end]
        return ""

    def num_added_tokens(self, *, pair: bool) -> int:
        """The special tokens that the tokenizer adds to a text or a pair."""
        return self._backend.num_special_tokens_to_add(pair)

    def count_min_tokens(self, text: str) -> int:
        """A lower bound of the text's tokens; 0: no bound is known without encoding it."""
        return 0 if self._bound is None else self._bound.count_min_tokens(text.replace(SPELT, ""))

    def count_excess(self, text: str, limit: int) -> int:
        """A lower bound of the text's tokens that exceeds `limit`; 0: the text may have no more tokens than that.

        A long text is counted in pieces up to the limit, so that none with far more tokens is encoded as a whole, which
        takes memory for all of them. A piece may begin and end within a token of the whole, so pieces have slightly
        more tokens than the whole, but not twice as many.
        """
        bound = self.count_min_tokens(text)
        if bound > limit:
            return bound
        if len(text) <= max(PIECE_CHARS, 2 * limit):
            return 0
        plain, tokens = text.replace(SPELT, ""), 0
        for start in range(0, len(plain), PIECE_CHARS):
            tokens += len(self.encode_batch([plain[start : start + PIECE_CHARS]], add_special_tokens=False)[0])
            if tokens > 2 * limit:
                return max(bound, limit + 1)
        return 0

    def encode_chats(self, texts: Sequence[str]) -> list[TokenIds]:
        """Token ids of each conversation from `render_chat`, int32 [tokens]."""
        encoded = self.encode_batch([text if SPELT not in text else "" for text in texts], add_special_tokens=False)
        for index, text in enumerate(texts):
            if SPELT in text:
                encoded[index] = self._encode_marked(text)
        return encoded

    def _encode_marked(self, text: str) -> TokenIds:
        """Encode a text with marked spellings. Splitting it there changes no other token: the text is split at special
        tokens anyway."""
        pieces = self.encode_batch(self._marked.split(text), add_special_tokens=False)
        parts = [pieces[0]]
        for spelling, piece in zip(self._marked.findall(text), pieces[1:], strict=True):
            parts += [self._plain_ids[spelling], piece]
        return np.concatenate(parts)

    def _as_text(self, spellings: Sequence[str]) -> list[TokenIds]:
        """Token ids of special tokens' spellings, encoded as text."""
        self._backend.encode_special_tokens = True
        try:
            whole = self.encode_batch(spellings, add_special_tokens=False)
            halves = self.encode_batch([half for s in spellings for half in (s[:1], s[1:])], add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = False
        return [  # some vocabularies hold a special token as an ordinary one too
            np.concatenate(halves[2 * at : 2 * at + 2]) if self.special_ids & set(ids.tolist()) else ids
            for at, ids in enumerate(whole)
        ]

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        begins_answer: bool = True,
        continues: bool = False,
    ) -> str:
        """Render the conversation with the model's chat template, up to the start of the answer.

        The text contains all special tokens that the model requires: encode it with `encode_chats`.

        Args:
            variables: further ones of the template.
            begins_answer: the prompt ends with what begins an answer.  continues: the answer goes on with the last
                message instead.

        Raises `RowError` (invalid_request) when there is no template or the template refuses the messages.
        """
        template = self.tool_template if tools else self._template
        if template is None:
            raise RowError(
                RowErrorCode.INVALID_REQUEST,
                "the model has no chat template (a base model?); use /v1/completions or give --chat-template",
                param="messages",
            )
        if "tool_calls" not in template and any(message.tool_calls for message in messages):
            raise RowError(
                RowErrorCode.INVALID_REQUEST,
                "messages hold tool_calls, which the model's chat template leaves out; write them as content",
                param="messages",
            )
        return self._apply_template(
            template,
            [self._message(message) for message in messages],
            variables,
            "messages",
            tools=[self._escape_specials(_tool(tool)) for tool in tools] or None,
            add_generation_prompt=begins_answer and not continues,
            continue_final_message=continues,
        )

    def render_pair(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render a pair with the model's chat template, which `renders_pairs`: a message of the role query and one of
        the role document. An instruction is the variable of this name, where the template reads it (vLLM), else a
        message of the role system before them (sentence-transformers).

        Encode the text with `encode_chats`. Raises `RowError` (invalid_request) when the template refuses the pair.
        """
        pair = [("query", query), ("document", document)]
        if instruction is not None and self._reads_instruction:
            variables = {"instruction": instruction, **variables}
        elif instruction is not None:
            pair.insert(0, ("system", instruction))
        messages = [{"role": role, "content": self._escape_specials(text)} for role, text in pair]
        return self._apply_template(self._template or "", messages, variables, "documents")

    def _apply_template(
        self,
        template: str,
        conversation: list[dict[str, Any]],
        variables: Mapping[str, Any],
        param: str,
        **options: Any,
    ) -> str:
        """The text of a conversation; `param` names it in errors. Raises `RowError`."""
        try:
            rendered: str = self._hf.apply_chat_template(
                conversation,
                chat_template=template,
                tokenize=False,
                **options,
                **self._escape_specials(dict(variables)),
            )
        except Exception as error:  # a template is a program from the model's author
            raise RowError(
                RowErrorCode.INVALID_REQUEST,
                f"the model's chat template refuses the {param}: {str(error) or type(error).__name__}"[:500],
                param=param,
            ) from error
        return rendered

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        role = "system" if message.role == "developer" and not self._supports_developer else message.role
        optional = {
            "content": message.text,
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "reasoning": message.thought,  # templates read either name, as clients write either
            "reasoning_content": message.thought,
        }
        fields: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
        if message.tool_calls:
            fields["tool_calls"] = [_call(call) for call in message.tool_calls]
        return {"role": role} | {name: self._escape_specials(value) for name, value in fields.items()}

    def _escape_specials(self, value: Any) -> Any:
        """A JSON value in whose strings the special tokens are marked as text (`SPELT`)."""
        if isinstance(value, str):
            return self._special.sub(lambda found: _mark_as_text(found[0]), value)
        if isinstance(value, list):
            return [self._escape_specials(item) for item in value]
        if isinstance(value, dict):
            return {self._escape_specials(key): self._escape_specials(item) for key, item in value.items()}
        return value

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """The text of these ids without context and without special tokens; invalid UTF-8 becomes U+FFFD."""
        if self.joins_bytes:
            return self.decode_showing(_NO_TOKENS, _as_list(ids), NOTHING_SHOWN)
        return self._backend.decode(_as_list(ids), skip_special_tokens=True)

    def join_bytes(self, ids: Sequence[int], shown: Mapping[int, str] = NOTHING_SHOWN) -> bytes:
        """The bytes of these tokens in running text; the special tokens in `shown` are spelt out."""
        if not shown:
            return b"".join(map(self.token_bytes.__getitem__, ids))
        return b"".join([shown[i].encode() if i in shown else self.token_bytes[i] for i in ids])

    def _join_showing(self, ids: Sequence[int], shown: Mapping[int, str]) -> bytes:
        """The bytes of a whole answer; only the tokens in `shown` write their marks."""
        joined, start = b"", 0
        for at in [*(at for at, token_id in enumerate(ids) if token_id in shown), len(ids)]:
            joined += self.join_bytes(ids[start:at]).replace(TOKEN_MARK.encode(), REPLACEMENT.encode())
            joined += self.join_bytes(ids[at : at + 1], shown)
            start = at + 1
        return joined

    def blanks_to_drop(self, prompt: TokenIds) -> int:
        """Number of leading blanks that the decoder drops from an answer to `prompt`: it drops them only when no text
        precedes the answer."""
        if not self._dropped_blanks:
            return 0
        before = self.join_bytes(prompt[-CONTEXT_TOKENS:].tolist())
        return 0 if before.strip(b" ") else max(0, self._dropped_blanks - len(before))

    def decode_showing(self, prompt: TokenIds, answer: TokenIds | list[int], shown: Mapping[int, str]) -> str:
        """The text of an answer after its prompt; of its special tokens only those in `shown` are spelt out."""
        ids = _as_list(answer)
        if self.joins_bytes:
            joined = self._join_showing(ids, shown) if shown else self.join_bytes(ids)
            raw = without_blanks(joined, self.blanks_to_drop(prompt))
            return raw.decode("utf-8", "replace")
        positions = [index for index, token_id in enumerate(ids) if token_id in shown]
        text, start = "", 0
        for position in [*positions, len(ids)]:
            before = np.concatenate([prompt, np.asarray(ids[:start], dtype=np.int32)])
            text += without_marks(self.decode_answers([before], [ids[start:position]])[0])
            text += shown[ids[position]] if position < len(ids) else ""
            start = position + 1
        return text

    def decode_answers(self, prompts: Sequence[TokenIds], answers: Sequence[TokenIds | list[int]]) -> list[str]:
        """The text of each answer after its prompt, without special tokens.

        Decoders that do more than to join bytes also decode the end of the prompt, whose text is then cut off.
        """
        ids = [_as_list(answer) for answer in answers]
        if self.joins_bytes:
            pairs = zip(prompts, ids, strict=True)
            return [self.decode_showing(prompt, answer, NOTHING_SHOWN) for prompt, answer in pairs]
        contexts = [_as_list(prompt[-CONTEXT_TOKENS:]) for prompt in prompts]
        joined = [context + answer for context, answer in zip(contexts, ids, strict=True)]
        texts = self._backend.decode_batch(contexts + joined, skip_special_tokens=True)
        heads, wholes = texts[: len(contexts)], texts[len(contexts) :]
        return [
            whole[len(head) :] if whole.startswith(head) else self.decode(answer)
            for head, whole, answer in zip(heads, wholes, ids, strict=True)
        ]

    def token_to_id(self, token: str) -> int | None:
        """The id of the token with this spelling in the vocabulary, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary (bytes may be escaped), or None for an unused id."""
        token: str | None = self._backend.id_to_token(token_id)
        return token


_NO_TOKENS: Final = np.zeros(0, np.int32)


def template_variables(template: str) -> frozenset[str]:
    """The variables that a chat template (jinja) reads besides those that each has. A template that can't be parsed has
    none: rendering says why."""
    try:
        source = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # transformers' own statement
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        return frozenset(jinja2.meta.find_undeclared_variables(tree)) - TEMPLATE_NAMES
    except (jinja2.TemplateError, RecursionError):
        return frozenset()


def _names_role(template: str, role: str) -> bool:
    """Whether a chat template (jinja) asks for messages of this role. (One that writes any role's name does not.)"""
    return re.search(f"""["']{role}["']""", template) is not None


def _joins_pieces(decoder: dict[str, Any]) -> bool:
    """Whether a decoder's step joins SentencePiece's pieces."""
    replaces_blanks = decoder.get("type") == "Replace" and "\u2581" in str(decoder.get("pattern"))
    return replaces_blanks or decoder.get("type") in ("ByteFallback", "Metaspace")


def _tool(tool: Tool) -> dict[str, Any]:
    """A tool in the form that templates expect."""
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    return {
        "type": "function",
        "function": {"description": "", "parameters": {"type": "object", "properties": {}}} | function,
    }


def _call(call: ToolCall) -> dict[str, Any]:
    """A call in the form that templates expect, with its arguments as an object. Raises `RowError`."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RowError(
            RowErrorCode.INVALID_REQUEST,
            f"the arguments of the tool call {call.id[:40]!r} are not a JSON object; correct them",
            param="messages",
        )
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _mark_as_text(text: str) -> str:
    return text[:1] + SPELT + text[1:]


def _as_list(ids: Sequence[int] | TokenIds) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def _from_folder(path: Path) -> Any:
    if not path.is_dir():
        raise TokenizerError(f"{path} is neither a model folder nor a GGUF file")
    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


_IMPORTING: Final = Lock()
"""The module that transformers reads GGUF with puts another one into its place: a thread that imports it meanwhile
would not find its names."""


def _from_gguf(path: Path) -> Any:
    """A GGUF file's tokenizer. It is loaded with the generic class instead of AutoTokenizer, which would first parse
    the whole file for the model's config: 0.7 s instead of 5.4 s for 49,152 tokens, with the same result."""
    with _IMPORTING:
        import_module("transformers.integrations.gguf")
    hf = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    kind = _gguf_pre_tokenizer(path)
    plain = component_state(hf.backend_tokenizer.pre_tokenizer).get("type") == "ByteLevel"
    if kind in DIGIT_SPLITTING_PRE_TOKENIZERS and plain:
        hf.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif plain and kind is not None and kind not in GPT2_PRE_TOKENIZERS:
        logger.warning("unknown pre-tokenizer: GPT-2's rule is used", path=str(path), kind=kind)
    return hf


def _gguf_pre_tokenizer(path: Path) -> str | None:
    """The value of `tokenizer.ggml.pre`, found without parsing the file.

    In GGUF a string entry is: key, uint32 type 8, uint64 length, bytes (little-endian).
    """
    needle = b"tokenizer.ggml.pre" + struct.pack("<I", 8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(needle)
        if at < 0:
            return None
        start = at + len(needle)
        (length,) = struct.unpack_from("<Q", data, start)
        return data[start + 8 : start + 8 + min(length, 256)].decode("utf-8", "replace")
