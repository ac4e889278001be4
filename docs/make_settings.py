"""Writes docs/operations/settings.md: every setting with its default, from the classes and docstrings of
`schemas.settings`.

python docs/make_settings.py
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from schemas.settings.settings import Settings

PAGE: Final = Path(__file__).parent / "operations/settings.md"
INTRODUCTION: Final = """# Settings

Settings come from options, then `TOKENMILL_…` environment variables, then `tokenmill.toml` in the current folder
(`TOKENMILL_CONFIG` names another file), then defaults. In a variable's name, `__` separates a group from its field;
lists and tables are JSON. In TOML, a group is a table:

```toml
root = "s3://bucket/tokenmill"
[kafka]
bootstrap_servers = ["kafka:9092"]
```

An unknown name or an invalid value stops the start with an error that names the setting. `python docs/make_settings.py`
writes this page from `schemas/settings`.
"""
PAGES: Final = {
    "": "[Command line](../cli.md), [priorities](priorities-and-latency.md), [costs](costs.md).",
    "instance": "[Costs](costs.md).",
    "spending": "[Spending limits](limits-and-quotas.md#spending-limits).",
    "gpu": "[GPUs](../gpu.md#using-one).",
    "bucket": "[Files in a bucket](../dropping-files.md).",
    "kafka": "[Kafka](../kafka.md).",
    "celery": "[Celery](../celery.md).",
    "gateway": "[HTTP](../http.md).",
    "gateway.tenant_limits": "[Limits](../http.md#limits).",
    "lane.limits": "[Requests that wait](limits-and-quotas.md#interactive-requests-that-wait).",
    "overload": "[Overload](priorities-and-latency.md#overload).",
    "lane.slo": "[Latency targets](priorities-and-latency.md#latency-targets-of-interactive-requests).",
    "answers": "[The answer store](answer-store.md).",
    "retention": "[Retention](retention.md).",
    "metrics": "[Metrics and alerts](metrics-and-alerts.md).",
    "cloudwatch": "[Backlog in CloudWatch](../scaling.md#backlog-in-cloudwatch).",
    "autoscale.limits": "[Scaling](../scaling.md).",
    "tracing": "[Traces](../observability.md#traces).",
    "releases": "[Releases](../releases.md).",
}
_ENTRY: Final = re.compile(r"^([a-z][a-z0-9_]*(?:, [a-z][a-z0-9_]*)*): (.*)$")


def meanings(of: type[BaseModel]) -> dict[str, str]:
    """The text of each field, from the "Attributes" of the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for each in reversed(of.__mro__):
        if not issubclass(each, BaseModel) or each is BaseModel or "Attributes:" not in (each.__doc__ or ""):
            continue
        names: list[str] = []
        for line in inspect.cleandoc(each.__doc__ or "").partition("Attributes:")[2].strip("\n").splitlines():
            for part in [line] if line.startswith("     ") else line.split(".  "):
                entry = None if line.startswith("     ") else _ENTRY.match(part.strip())
                if entry:
                    names = entry[1].split(", ")
                    found |= dict.fromkeys(names, entry[2])
                else:
                    found |= {name: f"{found[name]} {part.strip()}" for name in names}
    return found


def group_of(field: FieldInfo) -> type[BaseModel] | None:
    """The settings class of a field that is a group."""
    kind = field.annotation
    return kind if inspect.isclass(kind) and issubclass(kind, BaseModel) else None


def default_of(field: FieldInfo, *, in_bytes: bool = False) -> str:
    """A field's default, as it is written in a variable."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "none"
    if isinstance(value, Path):
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return f"`{value}`".replace(cache, "~/.cache").replace(str(Path.home()), "~")
    if isinstance(value, timedelta):
        days, seconds = value.days, value.seconds
        return f"`{days}d`" if not seconds else f"`{seconds // 3600}h`"
    if isinstance(value, int) and not isinstance(value, bool):
        units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
        unit = next((unit for unit, size in units.items() if value % size == 0), None)
        return f"{value:,}" if unit is None or not in_bytes else f"{value} ({value // units[unit]} {unit})"
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def groups(of: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Every group of settings with its path: first the class itself, then its groups."""
    yield path, of
    for name, field in of.model_fields.items():
        if inner := group_of(field):
            yield from groups(inner, (*path, name))


def fields(path: tuple[str, ...], of: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """Variable, default and meaning of each field of a group. Raises ValueError where the docstring lacks one."""
    known = meanings(of)
    for name, field in of.model_fields.items():
        if group_of(field):
            continue
        if name not in known:
            raise ValueError(f"{of.__name__}.{name} is not described in its class's docstring")
        meaning = f"{known[name]} {choices_of(field.annotation)}".strip().replace("|", "\\|")
        yield (
            "TOKENMILL_" + "__".join([*path, name]).upper(),
            default_of(field, in_bytes=name.endswith("_bytes")),
            meaning,
        )


def rows() -> Iterator[tuple[str, str, str]]:
    """Variable, default and meaning of every setting."""
    for path, of in groups(Settings):
        yield from fields(path, of)


def tables() -> Iterator[str]:
    """The page's sections."""
    for path, of in groups(Settings):
        title = ".".join(path) or "General"
        first = inspect.cleandoc(of.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        text = f"{first if path else ''} {PAGES.get('.'.join(path), '')}".strip()
        yield f"\n## {title}\n\n{text}\n\n| variable | default | meaning |\n|---|---|---|\n"
        for variable, default, meaning in fields(path, of):
            yield f"| `{variable}` | {default} | {meaning} |\n"


def choices_of(kind: Any) -> str:
    """The values of a field that takes a few, as text."""
    values = [value for value in get_args(kind) if isinstance(value, str)]
    return f"One of {', '.join(f'`{value}`' for value in values)}." if values and "Literal" in repr(kind) else ""


def page() -> str:
    """The whole page, in Markdown."""
    return INTRODUCTION + "".join(tables())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
