"""Engine settings from the command line: any field of `EngineConfig`, by name.

    NAME=key:value,key:value      "int8=quantize:int8,cache.block_size:64"; a part of the settings before the dot

A field that the engine gets later needs nothing here. Values are JSON where they read as such (numbers, true, null),
else text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from engine import EngineConfig

T = TypeVar("T")


class SettingError(ValueError):
    """Raised when a setting can't be read or the engine has none of that name."""


def parse_overrides(text: str) -> dict[str, Any]:
    """ "key:value,key:value" as a dict; empty text is no override."""
    overrides: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, colon, value = item.partition(":")
        if not colon or not key:
            raise SettingError(f"{item!r} is no setting; write key:value, as in dtype:float32")
        overrides[key] = _value(value)
    return overrides


def parse_named(text: str) -> tuple[str, dict[str, Any]]:
    """ "NAME=key:value,…" as its name and overrides."""
    name, equals, rest = text.partition("=")
    if not equals or not name:
        raise SettingError(f"{text!r} has no name; write NAME=key:value,…, as in int8=quantize:int8")
    return name, parse_overrides(rest)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def with_overrides(config: EngineConfig, overrides: Mapping[str, Any]) -> EngineConfig:
    """The settings with these fields changed.

    Raises:
        SettingError: naming the field that there is not, and those that there are.
    """
    for key, value in overrides.items():
        config = _changed(config, key, key.split("."), value)
    return config


def _changed(part: T, key: str, path: list[str], value: Any) -> T:
    name, *rest = path
    known = [field.name for field in fields(part)]  # type: ignore[arg-type]
    if name not in known or bool(rest) != is_dataclass(getattr(part, name)):
        raise SettingError(f"the engine has no setting {key!r}; here it has {', '.join(known)}")
    new = _changed(getattr(part, name), key, rest, value) if rest else value
    return replace(part, **{name: new})  # type: ignore[type-var]
