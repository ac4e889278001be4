"""Validates a gateway's responses against its OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jsonschema_rs
import orjson
import pyarrow as pa

_MOST_BYTES = 4 << 20
"""The largest body that is validated."""


class Witness:
    """Compares responses with an OpenAPI document.

    Attributes:
        untrue: descriptions of the responses that are not documented.
        seen: operations and statuses that were answered: (method, path of the document, status).
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.untrue: list[str] = []
        self.seen: set[tuple[str, str, int]] = set()
        # The longest first: /v1/batches/{batch_id}/cancel before /v1/batches/{batch_id}.
        self._paths = [(_pattern(path), path) for path in sorted(document["paths"], key=len, reverse=True)]
        self.validator = cache(self._validator)

    def documented(self) -> set[tuple[str, str, int]]:
        """All documented responses: (method, path, status)."""
        return {
            (method, path, int(status))
            for path, operations in self.document["paths"].items()
            for method, operation in operations.items()
            for status in operation["responses"]
        }

    def look(self, method: str, path: str, status: int, headers: Mapping[str, str], body: bytes | None) -> None:
        """Judge an answer.

        Args:
            headers: by lower-case names.  body: None: it is not known whole.
        """
        for problem in self._problems(method.lower(), path, status, headers, body):
            self.untrue.append(f"{method} {path[:120]} answered {status}: {problem}")

    def _problems(
        self, method: str, path: str, status: int, headers: Mapping[str, str], body: bytes | None
    ) -> Iterator[str]:
        known = next((known for pattern, known in self._paths if pattern.fullmatch(path)), None)
        operations = {} if known is None else self.document["paths"][known]
        if known is None or method not in operations:
            # Refused before routing, or because no route matches.
            if status not in (400, 403, 503, 404 if known is None else 405):
                yield "no operation is here"
                return
            form = "anthropic-" if path.startswith("/v1/messages") else ""
            said: Any = {"$ref": f"#/components/responses/{form}{status}"}
        else:
            self.seen.add((method, known, status))
            said = operations[method]["responses"].get(str(status))
            if said is None:
                yield f"documented are {', '.join(operations[method]['responses'])}"
                return
        said = self._resolved(said)
        for name, one in said["headers"].items():
            header, value = self._resolved(one), headers.get(name.lower())
            if value is None:
                if header["required"]:
                    yield f"{name} is missing"
            elif error := _mistake(self.validator(_of_text(header["schema"])), _as_value(value, header["schema"])):
                yield f"{name}: {error}"
        coding = headers.get("content-encoding")
        if body and coding is not None:
            body = pa.CompressedInputStream(pa.BufferReader(body), coding).read()
        yield from self._body_problems(said.get("content"), headers.get("content-type"), body)

    def _body_problems(self, content: Any, kind: str | None, body: bytes | None) -> Iterator[str]:
        if content is None:
            if body:
                yield "a body is not documented"
            return
        bare = (kind or "").partition(";")[0].strip()
        if bare not in content:
            yield f"{kind} is not among {', '.join(content)}"
        elif body is not None and len(body) <= _MOST_BYTES:
            schema = content[bare].get("schema")
            if bare == "application/json":
                if error := _mistake(self.validator(_of_text(schema)), orjson.loads(body)):
                    yield error
            elif bare == "text/event-stream":
                validator = self.validator(_of_text(content[bare]["x-item-schema"]))
                for data in re.findall(rb"^data: (.*)$", body, re.MULTILINE):
                    if data != b"[DONE]" and (error := _mistake(validator, orjson.loads(data))):
                        yield f"an event: {error}"

    def _resolved(self, said: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in said:
            found: Any = self.document
            for step in said["$ref"].removeprefix("#/").split("/"):
                found = found[step]
            said = found
        return said

    def _validator(self, schema: str) -> Any:
        whole = {"allOf": [orjson.loads(schema)], "components": self.document["components"]}
        return jsonschema_rs.Draft202012Validator(whole, validate_formats=True)


class Watched:
    """Wraps an application, and passes its responses to a witness."""

    def __init__(self, app: Any, witness: Witness) -> None:
        self._app = app
        self._witness = witness

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun: list[Any] = []
        body, ended = bytearray(), False

        async def send_on(message: Any) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                begun.append(message)
            elif message["type"] == "http.response.body":
                if len(body) <= _MOST_BYTES:
                    body.extend(message.get("body", b""))
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            for message in [one for one in begun if one["status"] != 499]:  # the client is gone
                headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
                whole = bytes(body) if ended else None
                self._witness.look(scope["method"], scope["path"], message["status"], headers, whole)


def _pattern(path: str) -> re.Pattern[str]:
    """A pattern for the paths of a template. A model's name may hold slashes."""
    parts = re.split(r"\{(\w+)\}", path)
    found = "".join(
        re.escape(part) if at % 2 == 0 else ".+" if part == "model" else "[^/]+" for at, part in enumerate(parts)
    )
    return re.compile(found, re.DOTALL)


def _of_text(schema: Any) -> str:
    return orjson.dumps(schema, option=orjson.OPT_SORT_KEYS).decode()


def _as_value(text: str, schema: Any) -> Any:
    return int(text) if schema.get("type") == "integer" and re.fullmatch("[0-9]+", text) else text


def _mistake(validator: Any, value: Any) -> str | None:
    for error in validator.iter_errors(value):
        where = "/".join(map(str, error.instance_path))
        return f"{where}: {error.message[:300]}"
    return None
