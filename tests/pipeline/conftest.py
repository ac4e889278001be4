"""Fixtures that several of the pipeline's test modules use."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from tests.pipeline.simulated_harness import PipelineHarness
from tests.pipeline.simulation import simulated_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A world in memory."""
    return simulated_world(tmp_path)


@pytest.fixture
def harness(world: World) -> PipelineHarness:
    return PipelineHarness(world, JobLedger(world.store))
