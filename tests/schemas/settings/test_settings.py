"""Settings: arguments over environment over file over defaults, and one clear line for a mistake."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from schemas.jobs.job import Tier
from schemas.settings.settings import InvalidSettingsError, load_settings


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENMILL_CONFIG", raising=False)


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().default_max_tokens == 4096
    Path("tokenmill.toml").write_text("default_max_tokens = 10\nprice_per_hour = 2.5\n[plan]\nshard_tokens = 1000\n")
    settings = load_settings()
    assert (settings.default_max_tokens, settings.price_per_hour, settings.plan.shard_tokens) == (10, 2.5, 1000)
    monkeypatch.setenv("TOKENMILL_DEFAULT_MAX_TOKENS", "20")
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "7")
    settings = load_settings()
    assert (settings.default_max_tokens, settings.plan.max_shard_rows, settings.plan.shard_tokens) == (20, 7, 1000)
    assert load_settings(default_max_tokens=30).default_max_tokens == 30


def test_a_named_file_is_read_and_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CONFIG", str(tmp_path / "other.toml"))
    with pytest.raises(InvalidSettingsError, match=r"other\.toml, which is no file"):
        load_settings()
    (tmp_path / "other.toml").write_text("[max_output_tokens]\nbulk = 5\n")
    assert load_settings().max_output_tokens.of(Tier.BULK) == 5


def test_amounts_of_time_are_written_as_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().retention.outputs is None
    Path("tokenmill.toml").write_text("[retention]\noutputs = '30d'\nintake = '2d'\n")
    monkeypatch.setenv("TOKENMILL_RETENTION__DEADLETTERS", "90d")
    monkeypatch.setenv("TOKENMILL_RETENTION__INTAKE", "12h")
    retention = load_settings().retention
    assert (retention.outputs, retention.deadletters) == (timedelta(days=30), timedelta(days=90))
    assert (retention.intake, retention.interval) == (timedelta(hours=12), timedelta(days=1))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("shard_tokens = 1", "setting shard_tokens is not a setting"),
        ("[plan]\nshard_token = 1", r"setting plan\.shard_token is not a setting"),
        ("[plan]\nshard_tokens = 0", r"setting plan\.shard_tokens is wrong"),
        ("default_max_tokens = 'many'", "setting default_max_tokens is wrong"),
        ("price_per_hour = -1", "setting price_per_hour is wrong"),
        ("[retention]\noutputs = 30", r"setting retention\.outputs is wrong: .*text, such as 30d"),
        ("[retention]\noutputs = '30 days'", r"setting retention\.outputs is wrong: .*no amount of time"),
        ("default_max_tokens", "can't be read as TOML"),
    ],
)
def test_a_mistake_is_one_clear_line(toml: str, message: str) -> None:
    Path("tokenmill.toml").write_text(toml)
    with pytest.raises(InvalidSettingsError, match=message) as mistake:
        load_settings()
    assert "\n" not in str(mistake.value)


def test_a_mistake_in_the_environment_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_LIMITS__MAX_LINE_BYTES", "lots")
    with pytest.raises(InvalidSettingsError, match=r"setting limits\.max_line_bytes is wrong"):
        load_settings()


def test_lane_limits_have_the_bounds_that_callers_and_workers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_LANE__LIMITS__MAX_WAITING", "15")
    monkeypatch.setenv("TOKENMILL_LANE__LIMITS__MAX_TENANT_SHARE", "0.5")
    limits = load_settings().lane.limits
    assert (limits.max_waiting, limits.max_waiting_per_tenant) == (15, 8)
    assert load_settings(lane={"limits": {"max_waiting": 16}}).lane.limits.max_waiting_per_tenant == 8
    for name, value, why in (
        ("CLIENT_TIMEOUT_SECONDS", "29", r"lane\.limits is wrong: .*give at least 30"),
        ("WORKER_TIMEOUT_SECONDS", "0.5", r"lane\.limits is wrong: .*give at least 1"),
        ("MAX_TENANT_SHARE", "1.5", "lane.limits.max_tenant_share"),
        ("MAX_EVENTS", "0", "lane.limits.max_events"),
    ):
        with monkeypatch.context() as wrong:
            wrong.setenv(f"TOKENMILL_LANE__LIMITS__{name}", value)
            with pytest.raises(InvalidSettingsError, match=why):
                load_settings()
