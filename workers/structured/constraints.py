"""From what a body says about its answer's form to a grammar (llguidance's Lark).

JSON schemas go in as they are; calls are written in the model's own form around the schemas of their arguments. Free
text is any text without special tokens.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.requests import ChatBody, CompletionBody, EmbeddingBody
from schemas.requests.structured import NamedTool, Tool
from workers.structured.grammar import GrammarSource
from workers.structured.json_schema import adapted, check_depth, json_rule
from workers.structured.tool_formats import KNOWN, ToolFormat, find_tool_format, takes_tools
from workers.text.tokenizer import Tokenizer
from workers.text.vocabulary import cut_at, spelt_specials

OPTIONS: Final = '%llguidance {"no_forcing": true}\n'
"""The model chooses among all ways to spell what is forced, as it would without a grammar."""

TEXT: Final = r"/(?s:.)*/"


def grammar_of(body: ChatBody | CompletionBody, tokenizer: Tokenizer) -> GrammarSource | None:
    """The grammar of the answer; None: every text may be the answer. Raises `RowError` when the model can't be held to
    it."""
    if isinstance(body, ChatBody) and body.offered_tools:
        parts = {
            f"tools[{at}].function.parameters": tool.function.parameters or {} for at, tool in enumerate(body.tools)
        }
        return GrammarSource(_tools_grammar(body, tool_format(tokenizer), tokenizer), "tools", parts)
    if body.response_format is not None:
        asked = body.response_format
        path = "response_format.json_schema.schema"
        return json_grammar(asked.schema_of_answer, "response_format", path, lenient=asked.lenient)
    outputs = body.structured_outputs
    if outputs is None:
        return None
    where = "structured_outputs"
    if outputs.json_schema is not None:
        return json_grammar(outputs.json_schema, where, f"{where}.json")
    if outputs.regex is not None:
        return GrammarSource(f"{OPTIONS}start: {_regex(outputs.regex)}\n", where)
    if outputs.choice is not None:
        return GrammarSource(f"{OPTIONS}start: {' | '.join(map(_literal, outputs.choice))}\n", where)
    assert outputs.grammar is not None, "one of its fields is set"
    return GrammarSource(OPTIONS + outputs.grammar, where)


def json_grammar(schema: dict[str, Any], param: str, path: str = "", *, lenient: bool = False) -> GrammarSource:
    """A JSON text that follows the schema, and nothing else; `path`: of the schema in the body; `lenient`: but for
    keywords that can't be kept. Raises `RowError`: it is nested too deep."""
    return GrammarSource(f"{OPTIONS}start: {_json(schema, param, lenient)}\n", param, {path or param: schema})


def _json(schema: dict[str, Any], param: str, lenient: bool = False) -> str:
    """A JSON text that follows the schema."""
    check_depth(schema, param)
    return json_rule(adapted(schema), lenient=lenient)


def shown_tokens(body: ChatBody | CompletionBody | EmbeddingBody, tokenizer: Tokenizer) -> dict[int, str]:
    """Special tokens that mark calls in an answer: its text shows them."""
    form = find_tool_format(tokenizer) if isinstance(body, ChatBody) and body.offered_tools else None
    return {} if form is None else spelt_specials(tokenizer, form.opening + form.closing)


def tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """How the model writes calls. Raises `RowError` where it can't be told."""
    template = tokenizer.tool_template
    if template is None or not takes_tools(template):
        why = "the model's chat template takes no tools; remove them, or give a --chat-template that does"
        raise RowError(RowErrorCode.UNSUPPORTED_PARAMETER, f"tools is not supported: {why}", param="tools")
    form = find_tool_format(tokenizer)
    if form is None:
        why = f"the model's chat template writes calls in a form that is not known here (known: {KNOWN}); remove them"
        raise RowError(RowErrorCode.UNSUPPORTED_PARAMETER, f"tools is not supported: {why}", param="tools")
    return form


def _tools_grammar(body: ChatBody, form: ToolFormat, tokenizer: Tokenizer) -> str:
    """The calls that must or may come."""
    choice = body.tool_choice
    tools = body.offered_tools
    single = form.most == 1 or not body.parallel_tool_calls
    if isinstance(choice, NamedTool):
        tools = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        single = True
    one = {"anyOf": [_call_schema(tool, at, form) for at, tool in enumerate(tools)]}
    schema: dict[str, Any] = one
    if form.listed:
        schema = {"type": "array", "items": adapted(one, "#/items"), "minItems": 1}
        schema |= {"maxItems": 1} if single else {}
    opening, closing = (_marker(text, tokenizer) for text in (form.opening, form.closing))
    lenient = all(tool.function.strict is False for tool in tools)
    rules = [f"call: {json_rule(schema, lenient=lenient)}"]
    last = f'" "? call {closing}' if form.listed else f"call {closing}"  # some write a blank before a list
    more = "" if single or form.listed else f" ({_marker(form.between, tokenizer)} {opening} {last})*"
    forced = f"{opening} {last}{more}"
    if choice is not None:
        rules.append(f"start: {forced}")
    elif body.response_format is not None:
        asked = body.response_format
        answer = _json(asked.schema_of_answer, "response_format", asked.lenient)
        rules += [f"start: answer | {forced}", f"answer: {answer}"]
    else:
        rules += _free(form, tokenizer, opening, f"{last}{more}")
    return OPTIONS + "\n".join(rules) + "\n"


def _free(form: ToolFormat, tokenizer: Tokenizer, opening: str, rest: str) -> list[str]:
    """Any text, or calls behind it: from the marker on there is no way back."""
    if not form.opening:  # a brace at the beginning is the marker
        return [f"start: {rest} | TEXT", r"TEXT: /([^{\s](?s:.)*)?/"]
    head, *behind = cut_at(form.opening, spelt_specials(tokenizer, form.opening).values())
    if head in spelt_specials(tokenizer, form.opening).values():
        return [f"start: TEXT | TEXT {opening} {rest}", f"TEXT: {TEXT}"]
    marker = head.rstrip()
    after = _marker(head[len(marker) :] + "".join(behind), tokenizer)
    return [
        f"start: TEXT | head {after} {rest}",
        f"head[lazy]: /(?s:.)*{_for_slashes(re.escape(marker))}/",
        f"TEXT: {TEXT}",
    ]


def _call_schema(tool: Tool, at: int, form: ToolFormat) -> dict[str, Any]:
    """A call of this tool; the schema's references into itself are led to where it stands now."""
    given = {k: v for k, v in (tool.function.parameters or {}).items() if k not in ("$schema", "$id", "id")}
    check_depth(given, "tools")
    parameters = {"type": "object", **adapted(given, f"#/anyOf/{at}/properties/{form.arguments}")}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, form.arguments: parameters},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """A text of ours, in which special tokens stand for themselves."""
    specials = {spelling: token_id for token_id, spelling in spelt_specials(tokenizer, text).items()}
    pieces = cut_at(text, specials)
    return " ".join(f"<[{specials[piece]}]>" if piece in specials else _literal(piece) for piece in pieces)


def _literal(text: str) -> str:
    return json.dumps(text)


def _regex(pattern: str) -> str:
    return f"/{_for_slashes(pattern)}/"


def _for_slashes(pattern: str) -> str:
    """The pattern as it stands between slashes, on one line."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")
