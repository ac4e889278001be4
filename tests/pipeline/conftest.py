"""Fixtures that several of the pipeline's test modules use."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from tests.pipeline.simulated_harness import House
from tests.pipeline.simulation import simulated_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A world in memory."""
    return simulated_world(tmp_path)


@pytest.fixture
def house(world: World) -> House:
    return House(world, JobLedger(world.store))
