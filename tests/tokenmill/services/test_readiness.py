"""Checks of a model before it is published as served, and the tolerance of its canary answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from pipeline.models.canaries import Canaries, difference
from schemas.releases import CanaryAnswer
from schemas.settings.releases import WarmupOptions
from tests.pipeline.simulation import simulated_world
from tests.tokenmill.services.test_releases import another_version
from tokenmill.services.readiness import CanaryFailed, Readiness
from workers.model.loaded_model import LoadedModel
from workers.model.warmup import CANARY_PROMPTS, CANARY_TOKENS, answer_canaries, drift_from, warm_up

CONFIG = EngineConfig(dtype="float32", threads=1)


def loaded(path: Path, name: str = "tiny") -> LoadedModel:
    return LoadedModel.load(path, name=name, config=CONFIG)


def test_given_a_model_when_it_is_warmed_up_then_batches_of_each_size_went_through_it(model_folder: Path) -> None:
    model = loaded(model_folder)
    warm_up(model, WarmupOptions(prompt_tokens=100, rows=(1, 3, 9)))
    stats = model.engine.stats()
    assert stats.prompt == 100 + (1 + 3 + 9) * 16
    assert stats.generated == (1 + 1 + 3 + 9) * 4
    assert not model.engine.has_work


def test_given_the_same_weights_when_they_answer_again_then_nothing_differs_and_nothing_drifts(
    model_folder: Path,
) -> None:
    first, again = loaded(model_folder), loaded(model_folder)
    recorded = answer_canaries(first)
    assert [len(answer.tokens) for answer in recorded] == [CANARY_TOKENS] * len(CANARY_PROMPTS)
    assert difference(recorded, answer_canaries(again), 0.001) is None
    drift = drift_from(again, recorded)
    assert drift is not None
    assert drift.tokens == CANARY_TOKENS * len(CANARY_PROMPTS)
    assert drift.most < 1e-4


def test_given_other_weights_when_they_answer_then_they_differ_and_drift_by_as_much_as_they_are_off(
    model_folder: Path, tmp_path: Path
) -> None:
    recorded = answer_canaries(loaded(model_folder))
    found = []
    for number, noise in enumerate((1e-6, 0.03, 0.3)):
        other = loaded(another_version(model_folder, tmp_path / str(number), noise=noise))
        drift = drift_from(other, recorded)
        assert drift is not None
        found.append(drift.mean)
        assert (difference(recorded, answer_canaries(other), 0.05) is None) is (noise < 0.01)
    assert found[0] < 1e-3 < found[1] < found[2]


def test_given_a_model_that_makes_vectors_when_it_is_proven_then_its_vectors_are_compared(
    embedding_model: Path, tmp_path: Path
) -> None:
    world = simulated_world(tmp_path)
    ready = Readiness(world, WarmupOptions(), "w1")
    model = ready.load(lambda: loaded(embedding_model, "embeds"))
    record = Canaries(world.store).find(model.pin())
    assert record is not None
    assert [len(answer.vector) for answer in record.answers] == [32] * len(CANARY_PROMPTS)
    ready.load(lambda: loaded(embedding_model, "embeds"))
    assert drift_from(model, record.answers) is None
    first = record.answers[0]
    wrong = first.model_copy(update={"vector": (first.vector[0] + 0.1, *first.vector[1:])})
    changed = record.model_copy(update={"answers": (wrong, *record.answers[1:])})
    Canaries(world.store).forget(model.pin())
    Canaries(world.store).record(changed)
    with pytest.raises(CanaryFailed, match=r"canary prompt 0: the vector is off by 0\.1"):
        ready.load(lambda: loaded(embedding_model, "embeds"))


def test_given_a_near_tie_when_rounding_decides_otherwise_then_that_is_no_difference() -> None:
    recorded = CanaryAnswer(prompt=(1,), tokens=(5, 6, 7), logprobs=(-0.1, -0.7, -0.1), runners_up=(-3.0, -0.75, -3.0))
    flipped = CanaryAnswer(prompt=(1,), tokens=(5, 9, 2), logprobs=(-0.1, -0.7, -9.0), runners_up=(-3.0, -0.75, -9.0))
    assert difference([recorded], [flipped], 0.05) is None
    said = difference([recorded], [flipped], 0.01)
    assert said == "canary prompt 0: token 1 is 9, but 6 was recorded, and led clearly"
    other = recorded.model_copy(update={"prompt": (2,)})
    assert difference([recorded], [other], 9.0) == "the canary prompts are other tokens than were recorded"
    nan = recorded.model_copy(update={"logprobs": (float("nan"), -0.7, -0.1)})
    assert "is off by nan" in (difference([recorded], [nan], 9.0) or "")


def test_given_a_model_without_weights_when_it_is_loaded_then_nothing_is_recorded(
    model_folder: Path, tmp_path: Path
) -> None:
    world = simulated_world(tmp_path)
    Readiness(world, WarmupOptions(), "w1").load(
        lambda: LoadedModel.without_weights(model_folder, name="null", config=CONFIG, num_blocks=64, digest="sha256:0")
    )
    assert list(world.store.list("canaries/")) == []
