"""The recorder of experts on a tiny mixture, whose rows can be counted."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from experts import ExpertRecorder, decode, make_model

from engine import CacheConfig, Engine, EngineConfig, ScheduleConfig
from tests.native_paths import native_path


def test_given_a_mixture_when_it_decodes_then_each_step_has_the_experts_that_its_tokens_chose(tmp_path: Path) -> None:
    native_path("avx2")  # or skip
    # Given two layers of four experts, of which a token chooses two
    make_model(tmp_path, Namespace(layers=2, hidden=64, experts=4, top_k=2, intermediate=32, vocabulary=64))
    config = EngineConfig(
        dtype="float32",
        threads=1,
        cache=CacheConfig(sequences=3, tokens_per_sequence=32, prefix_caching=False),
        schedule=ScheduleConfig(max_num_seqs=3),
    )
    engine = Engine.load(tmp_path, config)
    recorder = ExpertRecorder.attach(engine)
    # When three rows decode
    decoded = decode(engine, recorder, batch=3, tokens=5, name="a")
    # Then each step computed every token twice in each layer, and touched two to four experts of each
    uses = [use for _, use in decoded.steps]
    assert len(uses) == 4
    for use in uses:
        assert use is not None
        assert use.rows == 3 * 2 * 2
        assert 2 * 2 <= use.touched <= 2 * 4
