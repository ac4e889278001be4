"""Fixtures that several of the pipeline's test modules use."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.ledger import JobLedger
from tests.pipeline.simulated_house import House
from tests.pipeline.simulation import simulated_world


@pytest.fixture
def house(tmp_path: Path) -> House:
    world = simulated_world(tmp_path)
    return House(world, JobLedger(world.store))
