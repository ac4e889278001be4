"""tokenmill release: how a release begins, and how its state is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.models.registry import ModelRegistry
from pipeline.models.request_samples import StoredSamples
from pipeline.ports import World
from schemas.releases import AnswerSample, RequestSample, RequestSamples, Traffic
from tests.pipeline.made_jobs import MODEL
from tests.pipeline.models.releases_harness import NEW, OLD

VERSION = f"{MODEL}@{(NEW.pin.digest or '')[:20]}"


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    """A root with a served version and a candidate."""
    with FolderStore(folder / "root") as store:
        made = World(store, SystemClock(), SystemRandomness(), store.scratch)
        registry = ModelRegistry(store)
        registry.publish(OLD)
        registry.publish(NEW, candidate=True)
        yield made


def sample(world: World, traffic: Traffic, ttft: float) -> None:
    """A gateway compares 32 requests."""
    last = ModelRegistry(world.store).last(MODEL)
    assert last is not None
    stable, candidate = (AnswerSample(ttft_seconds=seconds, itl_seconds=0.01, tokens=9) for seconds in (1.0, ttft))
    one = RequestSample(stable=stable, candidate=candidate, agreement=0.9)
    batch = RequestSamples(
        release=last.release.id, traffic=traffic, at=world.clock.now(), samples=(one,) * 32, dropped=3
    )
    StoredSamples(world.store, last.release).write(batch, "a")


@pytest.mark.slow
def test_a_release_begins_with_shares_of_the_callers_and_its_status_shows_both(
    world: World, tokenmill: Any, folder: Path
) -> None:
    root = ("--root", folder / "root")
    begun = tokenmill("release", "start", VERSION, "--mirror", 0.05, "--canary", 0.02, *root)
    assert begun.code == 0, begun.err
    assert "0.05 of the callers' requests (copies), 0.02 of the callers (after the comparison)" in begun.err
    sample(world, "mirror", 2.0)
    before = tokenmill("release", "status", MODEL, *root).out
    assert "  mirror: 32 requests were compared; 3 copies were dropped\n" in before
    assert "    time to the first token: 2 (2 to 2)\n" in before
    assert "  canary: 0.02 of the callers after the comparison\n" in before
    last = ModelRegistry(world.store).last(MODEL)
    assert last is not None
    assert (last.release.rules.mirror, last.release.rules.canary) == (0.05, 0.02)
    stage = ModelRegistry(world.store).begin_canary(last.release, world.clock.now(), ())
    sample(world, "canary", 3.0)
    after = tokenmill("release", "status", MODEL, *root).out
    assert "  canary: 32 requests were compared; 3 copies were dropped\n" in after
    assert f"  canary: 0.02 of the callers since {stage.at.isoformat()}\n" in after
    (shown,) = tokenmill("release", "status", MODEL, *root, "--json").json()["releases"]
    assert (shown["rules"]["mirror"], shown["canary_since"]) == (0.05, stage.at.isoformat())
    assert shown["comparison"]["mirror"]["rows"] == 32
    assert shown["comparison"]["canary"]["ttft"]["mean"] == pytest.approx(3.0)


def test_a_comparison_that_decides_nothing_has_no_canary(world: World, tokenmill: Any, folder: Path) -> None:
    refused = tokenmill("release", "start", VERSION, "--shadow", "--canary", 0.02, "--root", folder / "root")
    assert (refused.code, refused.error) == (
        1, "error: --shadow only compares, and --canary lets the new version answer callers; leave one of them out",
    )  # fmt: skip
    assert ModelRegistry(world.store).last(MODEL) is None


@pytest.mark.parametrize("share", ["-0.1", "1.5", "nan"])
def test_a_share_is_between_none_and_all(world: World, tokenmill: Any, folder: Path, share: str) -> None:
    refused = tokenmill("release", "start", VERSION, f"--mirror={share}", "--root", folder / "root")
    assert refused.code != 0
    assert ModelRegistry(world.store).last(MODEL) is None
