"""Builds the grammar of an answer (in llguidance's Lark) from a request's body: tools, response format, regex and so
on.

JSON schemas are embedded as they are; tool calls follow the model's own format, around the schemas of their arguments.
Free text is any text without special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import Body, ChatBody, CompletionBody, GenerationBody
from schemas.requests.structured import NamedTool, Tool
from workers.structured.grammar import OPTIONS, TEXT, GrammarSource, for_slashes, literal
from workers.structured.json_schema import adapt_schema, check_depth, json_rule
from workers.structured.thinking import grammar_behind_thought
from workers.structured.tool_formats import KNOWN_FORMATS, ToolFormat, find_tool_format, takes_tools
from workers.text.markers import cut_at
from workers.text.tokenizer import TokenIds, Tokenizer
from workers.text.vocabulary import spelt_specials


def grammar_of(body: ChatBody | CompletionBody, prompt: TokenIds, tokenizer: Tokenizer) -> GrammarSource | None:
    """The grammar of the answer to this prompt; None: any text may be the answer. Raises `RowError` when the model
    can't be constrained to it."""
    form = form_of(body, tokenizer)
    return grammar_behind_thought(form, body, prompt, tokenizer) if isinstance(body, ChatBody) else form


def form_of(body: ChatBody | CompletionBody, tokenizer: Tokenizer) -> GrammarSource | None:
    """The grammar of the form that the request asks for; None: it asks for none. Raises `RowError` when the model can't
    be constrained to it."""
    if isinstance(body, ChatBody) and body.offered_tools:
        parts = {
            f"tools[{at}].function.parameters": tool.function.parameters or {} for at, tool in enumerate(body.tools)
        }
        return GrammarSource(_tools_grammar(body, tool_format(tokenizer), tokenizer), "tools", parts)
    if body.response_format is not None:
        wanted = body.response_format
        path = "response_format.json_schema.schema"
        return json_grammar(wanted.schema_of_answer, "response_format", path, lenient=wanted.is_lenient)
    outputs = body.structured_outputs
    if outputs is None:
        return None
    where = "structured_outputs"
    if outputs.json_schema is not None:
        return json_grammar(outputs.json_schema, where, f"{where}.json")
    if outputs.regex is not None:
        return GrammarSource(f"{OPTIONS}start: {_regex(outputs.regex)}\n", where)
    if outputs.choice is not None:
        return GrammarSource(f"{OPTIONS}start: {' | '.join(map(literal, outputs.choice))}\n", where)
    assert outputs.grammar is not None, "one of its fields is set"
    return GrammarSource(OPTIONS + outputs.grammar, where)


def json_grammar(schema: dict[str, Any], param: str, path: str = "", *, lenient: bool = False) -> GrammarSource:
    """The grammar of a JSON text that follows the schema.

    `path`: the schema's path in the body.  `is_lenient`: ignore keywords that can't be enforced. Raises `RowError` when
    the schema is nested too deep.
    """
    return GrammarSource(f"{OPTIONS}start: {_json(schema, param, lenient)}\n", param, {path or param: schema})


def _json(schema: dict[str, Any], param: str, lenient: bool = False) -> str:
    """The rule of a JSON text that follows the schema."""
    check_depth(schema, param)
    return json_rule(adapt_schema(schema), lenient=lenient)


def shown_tokens(body: Body, tokenizer: Tokenizer) -> Mapping[int, str]:
    """Tokens whose spelling the decoded text of an answer contains: those that mark calls or thoughts, and all special
    ones with `skip_special_tokens: false`."""
    found: dict[int, str] = {}
    if isinstance(body, ChatBody) and body.offered_tools and (form := find_tool_format(tokenizer)) is not None:
        found |= spelt_specials(tokenizer, form.opening + form.closing)
    if isinstance(body, GenerationBody) and not body.skip_special_tokens:
        found |= tokenizer.special_spellings
    if isinstance(body, ChatBody) and tokenizer.reasoning is not None:
        found |= tokenizer.reasoning.shown
    return found


def tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """The model's format of tool calls. Raises `RowError` when the model has none or an unknown one."""
    template = tokenizer.tool_template
    if template is None or not takes_tools(template):
        why = "the model's chat template takes no tools; remove them, or give a --chat-template that does"
        raise RowError(RowErrorCode.UNSUPPORTED_PARAMETER, f"tools is not supported: {why}", param="tools")
    form = find_tool_format(tokenizer)
    if form is None:
        why = "the model's chat template writes calls in a form that is not known here"
        why = f"{why} (known: {KNOWN_FORMATS}); remove them"
        raise RowError(RowErrorCode.UNSUPPORTED_PARAMETER, f"tools is not supported: {why}", param="tools")
    return form


def _tools_grammar(body: ChatBody, form: ToolFormat, tokenizer: Tokenizer) -> str:
    """The grammar of the calls that the answer must or may contain."""
    choice = body.tool_choice
    tools = body.offered_tools
    single = form.max_calls == 1 or not body.parallel_tool_calls
    if isinstance(choice, NamedTool):
        tools = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        single = True
    one = {"anyOf": [_call_schema(tool, at, form) for at, tool in enumerate(tools)]}
    schema: dict[str, Any] = one
    if form.listed:
        schema = {"type": "array", "items": adapt_schema(one, "#/items"), "minItems": 1}
        schema |= {"maxItems": 1} if single else {}
    opening, closing = (_marker(text, tokenizer) for text in (form.opening, form.closing))
    lenient = all(tool.function.strict is False for tool in tools)
    rules = [f"call: {json_rule(schema, lenient=lenient)}"]
    last = f'" "? call {closing}' if form.listed else f"call {closing}"  # some models write a blank before a list
    more = "" if single or form.listed else f" ({_marker(form.between, tokenizer)} {opening} {last})*"
    forced = f"{opening} {last}{more}"
    if choice is not None:
        rules.append(f"start: {forced}")
    elif body.response_format is not None:
        wanted = body.response_format
        answer = _json(wanted.schema_of_answer, "response_format", wanted.is_lenient)
        rules += [f"start: answer | {forced}", f"answer: {answer}"]
    else:
        rules += _free(form, tokenizer, opening, f"{last}{more}")
    return OPTIONS + "\n".join(rules) + "\n"


def _free(form: ToolFormat, tokenizer: Tokenizer, opening: str, rest: str) -> list[str]:
    """Rules for any text, optionally followed by calls. After the marker only calls may follow."""
    if not form.opening:  # a leading brace is the marker
        return [f"start: {rest} | TEXT", r"TEXT: /([^{\s](?s:.)*)?/"]
    head, *behind = cut_at(form.opening, spelt_specials(tokenizer, form.opening).values())
    if head in spelt_specials(tokenizer, form.opening).values():
        return [f"start: TEXT | TEXT {opening} {rest}", f"TEXT: {TEXT}"]
    marker = head.rstrip()
    after = _marker(head[len(marker) :] + "".join(behind), tokenizer)
    return [
        f"start: TEXT | head {after} {rest}",
        f"head[lazy]: /(?s:.)*{for_slashes(re.escape(marker))}/",
        f"TEXT: {TEXT}",
    ]


def _call_schema(tool: Tool, at: int, form: ToolFormat) -> dict[str, Any]:
    """The schema of a call of this tool, whose parameters' internal references are rebased to their new location."""
    given = {k: v for k, v in (tool.function.parameters or {}).items() if k not in ("$schema", "$id", "id")}
    check_depth(given, "tools")
    parameters = {"type": "object", **adapt_schema(given, f"#/anyOf/{at}/properties/{form.arguments}")}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, form.arguments: parameters},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """The rule of a marker, in which special tokens are matched as tokens."""
    specials = {spelling: token_id for token_id, spelling in spelt_specials(tokenizer, text).items()}
    pieces = cut_at(text, specials)
    return " ".join(f"<[{specials[piece]}]>" if piece in specials else literal(piece) for piece in pieces)


def _regex(pattern: str) -> str:
    return f"/{for_slashes(pattern)}/"
