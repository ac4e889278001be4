"""The installation's settings; invalid ones are reported in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import UserError

if TYPE_CHECKING:
    from schemas.settings.settings import Settings


def read_settings() -> Settings:
    """Read the settings from TOKENMILL_ variables and tokenmill.toml; raises `UserError`."""
    from schemas.settings.settings import InvalidSettingsError, load_settings

    try:
        return load_settings()
    except InvalidSettingsError as error:
        raise UserError(str(error)) from error
