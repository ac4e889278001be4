"""The checks of a cascade's answers: a JSON schema, a pattern, a length, an end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.config.rule_files import read_document
from tokenmill.errors import UserError

if TYPE_CHECKING:
    from pipeline.jobs.cascade import Check
    from schemas.jobs.cascade import Acceptance


def read_acceptance(path: Path | None, agreement: float | None, sample_rows: int | None) -> Acceptance:
    """The checks in a file. `agreement`, `sample_rows`: given on the command line. Raises `UserError`."""
    from pydantic import ValidationError

    from schemas.jobs.cascade import Acceptance

    given = {
        name: value for name, value in (("agreement", agreement), ("sample_rows", sample_rows)) if value is not None
    }
    if path is None:
        try:
            accept = Acceptance.model_validate(given)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"--agreement or --sample: {reason}") from None
    else:
        accept = read_document(path, Acceptance, given)
        make_check(accept)
    if sample_rows is not None and accept.agreement is None:
        raise UserError("--sample: needs --agreement, for which the sample is answered")
    return accept


def make_check(accept: Acceptance) -> Check:
    """The checks as a function. Raises `UserError` for a schema or a pattern that can't be used."""
    checks: list[tuple[str, Callable[[str, str | None], bool]]] = []
    if accept.finish_reasons is not None:
        ends = accept.finish_reasons
        checks.append(("finish_reasons", lambda _, end: end in ends))
    least, most = accept.min_chars, accept.max_chars
    if least is not None:
        checks.append(("min_chars", lambda text, _: len(text) >= least))
    if most is not None:
        checks.append(("max_chars", lambda text, _: len(text) <= most))
    if accept.pattern is not None:
        matches = _matcher(accept.pattern)
        checks.append(("pattern", lambda text, _: matches(text)))
    if accept.json_schema is not None:
        is_valid = _validator(accept.json_schema)
        checks.append(("json_schema", lambda text, _: is_valid(text)))

    def check(text: str, finish_reason: str | None) -> str | None:
        return next((name for name, holds in checks if not holds(text, finish_reason)), None)

    return check


def _matcher(pattern: str) -> Callable[[str], bool]:
    """A search in time linear in the text."""
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        raise UserError(f"pattern {pattern!r}: can't be used: {error}") from error
    return lambda text: compiled.search(text) is not None


def _validator(schema: dict[str, Any]) -> Callable[[str], bool]:
    """Whether a text is JSON of the schema."""
    import orjson

    from workers.structured.form_check import schema_check

    try:
        first_error = schema_check(schema)
    except ValueError as error:
        raise UserError(f"json_schema: can't be used: {str(error).splitlines()[0]}") from error

    def is_valid(text: str) -> bool:
        try:
            return first_error(orjson.loads(text)) is None
        except orjson.JSONDecodeError:
            return False

    return is_valid
