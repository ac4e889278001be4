"""Files with the rules of virtual models: TOML, or JSON by the suffix .json."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from tokenmill.errors import UserError

if TYPE_CHECKING:
    from schemas.virtual_models import VirtualModel


def read_virtual_model(path: Path) -> VirtualModel:
    """The virtual model in the file. Raises `UserError`, with the place of the first mistake."""
    from pydantic import ValidationError

    from schemas.virtual_models import MAX_FILE_BYTES, VirtualModel

    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UserError(f"{path}: has more than {MAX_FILE_BYTES} bytes; write fewer rules")
        raw = orjson.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
        return VirtualModel.model_validate(raw)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror or error}") from error
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in detail["loc"])
        raise UserError(
            f"{path}: {f'{place}: ' if place else ''}{detail['msg'].removeprefix('Value error, ')}"
        ) from None
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UserError(f"{path}: is not {kind}: {error}") from error
