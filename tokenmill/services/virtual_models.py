"""Routers of virtual models, which read heartbeats and ask classification models over the lane."""

from __future__ import annotations

from pipeline.lane.ports import Lane
from pipeline.models.catalog import Catalog
from pipeline.models.virtual_models import ModelResolver
from pipeline.ports import Heartbeats, World
from pipeline.routing.lane_classifier import LaneClassifier
from pipeline.routing.loads import LoadReader
from pipeline.routing.rules import RouteCounts, RuleRouter
from schemas.jobs.job import Tier
from schemas.models import ModelPin


def _router(
    world: World, heartbeats: Heartbeats, lane: Lane, tier: Tier, counts: RouteCounts | None = None
) -> RuleRouter:
    """A router for the virtual models of a root. `tier`: of its requests to classification models."""
    catalog = Catalog(world.store)

    def find(name: str) -> ModelPin | None:
        entry = catalog.find(name)
        return None if entry is None else entry.pin

    loads = LoadReader(heartbeats, world.clock)
    return RuleRouter(loads.read, LaneClassifier(lane, find, world.clock, world.random, tier), counts)


def job_router(world: World, heartbeats: Heartbeats, lane: Lane, counts: RouteCounts | None = None) -> RuleRouter:
    """A router for the rows of jobs. `counts`: where another part of this process counts too; None: its own."""
    return _router(world, heartbeats, lane, Tier.STANDARD, counts)


def model_resolver(world: World, heartbeats: Heartbeats, lane: Lane) -> ModelResolver:
    """A resolver for single requests."""
    return ModelResolver(world.store, world.clock, _router(world, heartbeats, lane, Tier.INTERACTIVE))
