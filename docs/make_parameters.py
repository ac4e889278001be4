"""Writes docs/parameters.md: what becomes of each parameter of OpenAI's, vLLM's and Anthropic's APIs, and of this
project's own, by asking the schemas of requests. `docs/api_parameters.json` has the names, from the clients' and vLLM's
own types.

python docs/make_parameters.py > docs/parameters.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from pipeline.gateway.batches.requests import BatchBody
from pipeline.gateway.openapi.request_schemas import build_schemas
from schemas.requests.bodies import GenerationBody
from schemas.requests.dialects.registry import DIALECTS
from schemas.requests.fields import GUIDED
from schemas.requests.parsing import BODIES, NO_CHANGE, SCORE_URL
from schemas.requests.request_key import NO_EFFECT
from schemas.requests.scoring import PAIR_NAMES
from schemas.requests.tokenizing import TOKENIZER_BODIES

NAMES: Final = Path(__file__).with_name("api_parameters.json")
OWN: Final = "tokenmill"
WORKS: Final = "works"
REFUSED: Final = "refused"
SERVED: Final[Mapping[str, type[BaseModel]]] = {**BODIES, **TOKENIZER_BODIES, "/v1/batches": BatchBody}

INTRODUCTION: Final = """\
# Parameters

What becomes of each parameter of other APIs, and of those that only tokenmill has, over HTTP and in a line of a batch.
The names are those of {OpenAI}, {vLLM} and {Anthropic}.

- **works**: it does what it does there. Values that are not supported are refused with a reason.
- **no effect**: it is accepted, and no answer depends on it.
- **only …**: these values, which mean the same as its absence, are accepted; others are refused.
- **refused**: by name (`unsupported_parameter`), since nothing is ignored in silence.

[HTTP](http.md#vllms-parameters) describes the less known ones. `docs/make_parameters.py` writes this page.
"""


def page() -> str:
    """The page's text."""
    known = json.loads(NAMES.read_text(encoding="utf-8"))
    by_url = _by_url(known["parameters"])
    sections = [INTRODUCTION.format(**known["versions"])]
    sections += [_section(url, by_url.get(url, {})) for url in sorted(by_url.keys() | SERVED.keys())]
    return "\n".join(sections)


def verdicts(url: str, name: str) -> tuple[str, str | None]:
    """What becomes of a parameter over HTTP, and in a batch line; None: the url has no batch lines."""
    http = _schemas()[SERVED[url].__name__]["properties"]
    if url in TOKENIZER_BODIES:
        return _of_model(url, name), None
    if url not in BODIES:
        return _of_schema(http.get(name)), None
    batch = _of_model(url, name)
    return (batch if batch in (WORKS, "no effect") else _of_schema(http.get(name))), batch


def _of_model(url: str, name: str) -> str:
    """The verdict of what parses a body, without the fields that only HTTP has."""
    if name in SERVED[url].model_fields:
        return "no effect" if name in NO_EFFECT else WORKS
    if name in GUIDED and url not in DIALECTS and issubclass(SERVED[url], GenerationBody):
        return WORKS
    if url == SCORE_URL and any(name in pair for pair in PAIR_NAMES):
        return WORKS
    neutral = (DIALECTS[url].no_change if url in DIALECTS else NO_CHANGE).get(name)
    return REFUSED if neutral is None else _only(neutral)


def _of_schema(schema: Mapping[str, Any] | None) -> str:
    """The verdict of a property of the OpenAPI document; None: it has none of this name."""
    if schema is None:
        return REFUSED
    if schema.get("type") == "null":
        return _only(())
    values = schema.get("enum")
    is_neutral = values is not None and None in values and "description" not in schema
    return _only([value for value in values if value is not None]) if is_neutral else WORKS


def _only(values: Any) -> str:
    shown = dict.fromkeys(json.dumps(value) for value in values if not isinstance(value, float) or value != int(value))
    return "only " + ", ".join(f"`{value}`" for value in (*shown, "null"))


def _by_url(parameters: Mapping[str, Mapping[str, list[str]]]) -> dict[str, dict[str, list[str]]]:
    """url -> parameter -> the APIs that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for api, urls in parameters.items():
        for url, names in urls.items():
            for name in names:
                found.setdefault(url, {}).setdefault(name, []).append(api)
    return found


def _section(url: str, named: Mapping[str, list[str]]) -> str:
    if url not in SERVED:
        return f"## `{url}`\n\nThis route of vLLM's is not served.\n"
    return "\n".join([f"## `{url}`", "", *_rows(url, named), ""])


def _rows(url: str, named: Mapping[str, list[str]]) -> Iterator[str]:
    has_lines = url in BODIES
    yield "| parameter | of | HTTP | batch line |" if has_lines else "| parameter | of | HTTP |"
    yield "|---|---|---|---|" if has_lines else "|---|---|---|"
    own = {*SERVED[url].model_fields, *_schemas()[SERVED[url].__name__]["properties"]}
    for name in sorted({*named, *own}):
        http, batch = verdicts(url, name)
        if name not in named and http.startswith("only"):
            continue  # only named here to be refused with a hint
        cells = [f"`{name}`", ", ".join(named.get(name, [OWN])), http, *([] if batch is None else [batch])]
        yield f"| {' | '.join(cells)} |"


def _schemas() -> dict[str, Any]:
    if not _MADE:
        _MADE.update(build_schemas(None))
    return _MADE


_MADE: Final[dict[str, Any]] = {}

if __name__ == "__main__":
    print(page(), end="")
