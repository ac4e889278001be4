"""Chat templates that take tools, each in the way of a family: short forms of what their models bring."""

from __future__ import annotations

_MESSAGES = (
    "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALLS{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
_TOOLS = "{% if tools %}<turn>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}HOW<end>\n{% endif %}"


def _template(how: str, calls: str) -> str:
    return _TOOLS.replace("HOW", how) + _MESSAGES.replace("CALLS", calls)


HERMES = _template(
    'Answer calls as <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>',
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>',
)
LLAMA = _template(
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
)
MISTRAL = _template("", '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}]')
BARRED = _template("Calls stand in a list behind <|tool_call|>.", "<|tool_call|>{{ c.function }}")
FUNCTION_TAGS = _template("Write <tool_call>\n<function=name>\n</function>\n</tool_call>", "<tool_call>")
NAMES_AND_PARAMETERS = _template('{{ \'{"name": "\' + t.name + \'", "parameters": \' }}Use <function_call>.', "")
UNKNOWN = _template("Call them by name.", "")
