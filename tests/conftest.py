"""Fixtures that every room of the tests may use."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.servers.plugin"]

# How long an example takes says nothing on a machine that has other things to do.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_configure() -> None:
    """What runs in the background (nohup, a script's &) was started with Ctrl-C ignored. So would be every process that
    a test starts, and that is to be interrupted."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _tiny_models() -> ModuleType:
    """tests/tiny_models.py, by path: tests are no package, and control-side tests must not import torch."""
    name = "tiny_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("tiny_models.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    """The module that makes tiny models, for tests that want changed ones."""
    return _tiny_models()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function family -> folder of a tiny random model; made once per run. Do not change it."""
    made: dict[str, Path] = {}

    def tiny_model(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp("models") / family
            made[family] = _tiny_models().make_tiny_model(family, folder)
        return made[family]

    return tiny_model
