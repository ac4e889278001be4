"""Engine settings by name from the command line."""

from __future__ import annotations

import pytest
from engine_settings import SettingError, parse_named, parse_overrides, with_overrides

from engine import EngineConfig


def test_given_overrides_when_they_are_applied_then_only_those_fields_change() -> None:
    name, overrides = parse_named("small=dtype:float32,threads:1,cache.block_size:16,cache.prefix_caching:false")

    config = with_overrides(EngineConfig(), overrides)

    assert name == "small"
    assert (config.dtype, config.threads) == ("float32", 1)
    assert (config.cache.block_size, config.cache.prefix_caching) == (16, False)
    assert config.schedule == EngineConfig().schedule
    assert with_overrides(EngineConfig(), parse_overrides("")) == EngineConfig()


@pytest.mark.parametrize("text", ["speed:fast", "cache.speed:1", "cache:1", "dtype.x:1"])
def test_given_a_setting_that_there_is_not_when_it_is_applied_then_the_known_ones_are_named(text: str) -> None:
    with pytest.raises(SettingError, match=r"no setting .* it has "):
        with_overrides(EngineConfig(), parse_overrides(text))


def test_given_text_that_is_no_setting_when_it_is_parsed_then_the_error_shows_the_form() -> None:
    with pytest.raises(SettingError, match="key:value"):
        parse_overrides("float32")
    with pytest.raises(SettingError, match="NAME=key:value"):
        parse_named("dtype:float32")
