"""Job options of an ingested file: from its folder, its metadata, and its sidecar file.

The three have equal precedence. A file whose sources give different values for one option is refused: either choice
would surprise its sender.

    incoming/[TIER/]NAME.jsonl             the input; `SUFFIXES` lists the other formats' suffixes
    incoming/[TIER/]NAME.job.json          options as a JSON object; NAME.jsonl.job.json is read too

A sidecar must exist before its file, or be announced by the file's metadata (`tokenmill-sidecar: true`): then the file
waits for it. Metadata may hold other programs' names too. So only names of options count, with or without the prefix
`tokenmill-`; with the prefix, an unknown name is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import orjson
from pydantic import ValidationError

from pipeline.ingest.intake import IntakeRefused
from pipeline.planner.ports import InputError
from pipeline.planner.readers.source import choose_files, suffix_of
from schemas.jobs.inputs import InputFormat
from schemas.jobs.job import Tier
from schemas.jobs.job_options import JobOptions, PartialJobOptions

SIDECAR: Final = ".job.json"
MAX_SIDECAR_BYTES: Final = 1 << 20
_PREFIX = "tokenmill-"
_SIDECAR_FLAG = "sidecar"
_UNFINISHED = re.compile(r"^\.|(\.(tmp|temp|part|partial|filepart|crdownload|download|swp)|~)$", re.IGNORECASE)
_TIERS = (Tier.STANDARD.value, Tier.BULK.value)
_YES, _NO = frozenset({"true", "yes", "1"}), frozenset({"false", "no", "0"})


class InboxEntryKind(Enum):
    """The kind of a name in an inbox."""

    INPUT = auto()
    SIDECAR = auto()
    PASSED_OVER = auto()
    """Unfinished, or no file."""


@dataclass(frozen=True, slots=True)
class OptionSource:
    """Options, and their source for messages."""

    where: str
    values: Mapping[str, Any]


def kind_of(name: str) -> InboxEntryKind:
    """The kind of a name (a path relative to the inbox). Parts that begin with '.' or '_', and suffixes such as .tmp
    and .part, are the conventional names of unfinished or private files."""
    *folders, last = name.split("/")
    if not last or any(_UNFINISHED.search(part) or part.startswith("_") for part in folders):
        return InboxEntryKind.PASSED_OVER
    if _UNFINISHED.search(last) or (last.startswith("_") and suffix_of(last) is None):
        return InboxEntryKind.PASSED_OVER
    return InboxEntryKind.SIDECAR if name.endswith(SIDECAR) else InboxEntryKind.INPUT


def sidecars_of(name: str) -> tuple[str, str]:
    """The possible names of an input's sidecar."""
    folder, slash, last = name.rpartition("/")
    stem = last[: len(last) - len(suffix_of(last) or "")] or last
    return f"{folder}{slash}{stem}{SIDECAR}", f"{name}{SIDECAR}"


def format_of(name: str) -> InputFormat:
    """The input format by the name's suffix; raises `IntakeRefused` for any other, also for a folder that is no
    tier."""
    folder, _, last = name.rpartition("/")
    if folder and folder not in _TIERS:
        raise IntakeRefused(
            "unknown_folder",
            f"{name}: lies in a folder that is no tier; put it into the inbox itself, or into one of its folders "
            f"{', '.join(_TIERS)}",
        )
    try:
        return choose_files(name, [last], folder=False)[0]
    except InputError as error:
        raise IntakeRefused("unsupported_format", str(error)) from error


def options_of(
    name: str, metadata: Mapping[str, str], sidecars: Sequence[tuple[str, bytes]], *, location: str
) -> JobOptions:
    """All options of an ingested file.

    Args:
        name: path relative to the inbox.  metadata: of the object.  sidecars: name and content of existing sidecars.
        location: the file's location, for messages.

    Raises:
        IntakeRefused: an option is unknown, can't be used, or is given twice with different values.
    """
    folder = name.rpartition("/")[0]
    sources = [OptionSource("its folder", {"tier": folder} if folder else {})]
    sources.append(OptionSource("its metadata", _from_metadata(metadata, location)))
    sources += [OptionSource(sidecar, _from_sidecar(sidecar, data)) for sidecar, data in sidecars]
    chosen: dict[str, tuple[str, Any]] = {}
    for source in sources:
        options = _checked(source, location)
        for field in sorted(options.model_fields_set):
            value = getattr(options, field)
            if value is None:
                continue
            where, other = chosen.setdefault(field, (source.where, value))
            if other != value:
                raise IntakeRefused(
                    "conflicting_options",
                    f"{location}: {field} is {_shown(other)} by {where}, but {_shown(value)} by {source.where}; "
                    "say it once",
                )
    try:
        return JobOptions(**{field: value for field, (_, value) in chosen.items()})
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        raise IntakeRefused(
            "invalid_option", f"{location}: the options can't be used together: {detail['msg']}"
        ) from error


def announces_sidecar(metadata: Mapping[str, str], location: str) -> bool:
    """Whether the file's metadata announce a sidecar. Raises `IntakeRefused` for a value that is no boolean."""
    for key, value in metadata.items():
        if key.lower().removeprefix(_PREFIX) == _SIDECAR_FLAG:
            flag = value.strip().lower()
            if flag not in _YES | _NO:
                raise IntakeRefused("invalid_option", f"{location}: metadata {key} is {value!r}; give true or false")
            return flag in _YES
    return False


def _from_metadata(metadata: Mapping[str, str], location: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        name = key.lower().removeprefix(_PREFIX)
        field = name.replace("-", "_")
        if name == _SIDECAR_FLAG:
            continue
        if field in PartialJobOptions.model_fields:
            found[field] = _json(value, f"{location}: metadata {key}") if field == "metadata" else value
        elif key.lower().startswith(_PREFIX):
            raise IntakeRefused("unknown_option", f"{location}: metadata {key} is no option; remove or correct it")
    return found


def _from_sidecar(name: str, data: bytes) -> dict[str, Any]:
    if len(data) > MAX_SIDECAR_BYTES:
        raise IntakeRefused("invalid_option", f"{name}: is larger than {MAX_SIDECAR_BYTES} bytes")
    found = _json(data, name)
    if not isinstance(found, dict):
        raise IntakeRefused("invalid_option", f"{name}: is no JSON object; write the options as one")
    return found


def _json(data: str | bytes, where: str) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise IntakeRefused("invalid_option", f"{where}: is not JSON ({error})") from error


def _checked(source: OptionSource, location: str) -> PartialJobOptions:
    try:
        return PartialJobOptions.model_validate(source.values)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in detail["loc"]) or "the whole"
        unknown = detail["type"] == "extra_forbidden"
        raise IntakeRefused(
            "unknown_option" if unknown else "invalid_option",
            f"{location}: {field}, given by {source.where}, "
            + ("is no option; remove or correct it" if unknown else f"can't be used: {detail['msg']}"),
        ) from error


def _shown(value: Any) -> str:
    return repr(getattr(value, "value", value))
