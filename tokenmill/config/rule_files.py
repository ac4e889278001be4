"""Files with the rules of virtual models and cascades: TOML, or JSON by the suffix .json."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from tokenmill.errors import UserError

if TYPE_CHECKING:
    from schemas.stored import StoredModel
    from schemas.virtual_models import VirtualModel

MAX_BYTES: Final = 131_072


Document = TypeVar("Document", bound="StoredModel")


def read_virtual_model(path: Path) -> VirtualModel:
    """The virtual model in the file. Raises `UserError`."""
    from schemas.virtual_models import VirtualModel

    return read_document(path, VirtualModel)


def read_document(path: Path, kind: type[Document], given: Mapping[str, Any] = MappingProxyType({})) -> Document:
    """The file's document, with the fields of `given` in place of its own. Raises `UserError`, with the place of the
    first mistake."""
    from pydantic import ValidationError

    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UserError(f"{path}: has more than {MAX_BYTES} bytes; make it shorter")
        raw = orjson.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
        return kind.model_validate({**raw, **given})
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror or error}") from error
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in detail["loc"])
        reason = detail["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {f'{place}: {reason}' if place else reason}") from None
    except (ValueError, TypeError) as error:
        wanted = "a JSON object" if path.suffix == ".json" else "TOML"
        raise UserError(f"{path}: is not {wanted}: {error}") from error
