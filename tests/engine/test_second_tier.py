"""An engine finds the blocks of an earlier one in a folder, computes none of them again, and answers alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.config import SpeculationConfig
from engine.embedding.engine import check_encoder_config
from engine.errors import EngineError, UnsupportedModel
from engine.runner import second_tier
from engine.vllm.settings import _refused

TinyModel = Callable[[str], Path]
PREFIX = [3 + at * 7 % 50 for at in range(64)]
DIGEST = "sha256:00"


def load(path: Path, folder: Path | None, digest: str = DIGEST, block_size: int = 16, **changes: Any) -> Engine:
    config = EngineConfig(
        **{"dtype": "float32", "max_model_len": 128, "threads": 1} | changes,
        cache=CacheConfig(block_size, num_blocks=60, tier_folder=None if folder is None else str(folder)),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=48),
    )
    return Engine.load(path, config, model_digest=lambda: digest)


def request(name: str, end: list[int], salt: bytes = b"one") -> Request:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    return Request(name, as_token_ids([*PREFIX, *end]), params, salt=salt)


def answers(engine: Engine, *ends: int, salt: bytes = b"one") -> list[tuple[list[int], list[float]]]:
    """The tokens and log-probabilities that follow the prefix and each of these tokens, one request after the other."""
    found = []
    for end in ends:
        (done,) = engine.run([request(str(end), [end, end], salt)])
        (choice,) = done.choices
        assert choice.logprobs is not None
        found.append((choice.token_ids.tolist(), choice.logprobs.chosen.tolist()))
    engine.close()
    return found


def filled(path: Path, folder: Path, **changes: Any) -> list[tuple[list[int], list[float]]]:
    """Store the prefix's blocks; returns the answers that an engine without a folder gives behind it."""
    engine = load(path, folder, **changes)
    answers(engine, 5, 6)
    tier = engine.stats().tier
    assert tier is not None
    assert tier.bytes_written > 0
    return answers(load(path, None, **changes), 7, 8)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"dtype": "bfloat16", "kv_dtype": "int8"}),
        ("gemma3", {}),
        ("qwen3-next", {}),
        *(
            pytest.param(family, changes, marks=pytest.mark.exhaustive)
            for family, changes in (
                ("llama", {"attention": "paged-sdpa"}),
                ("llama", {"async_scheduling": True}),
                ("gemma4", {}),
                ("deepseek-v3", {}),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "default",
)
@pytest.mark.slow
def test_a_later_engine_computes_none_of_the_prefix_and_answers_alike(
    family: str, changes: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    expected = filled(tiny_model(family), tmp_path, **changes)
    engine = load(tiny_model(family), tmp_path, **changes)
    found = answers(engine, 7, 8)
    if "attention" in changes:  # torch's operators round by the chunk
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    else:
        assert found == expected
    stats = engine.stats()
    assert stats.prompt == 2 + 2
    assert stats.cached == 2 * len(PREFIX)
    assert stats.tier is not None
    assert stats.tier.hits >= len(PREFIX) // 16
    assert (stats.tier.rejected, stats.tier.bytes_written) == (0, 0)
    assert stats.free_blocks == stats.total_blocks


@pytest.mark.parametrize("bad", [0, 2])
def test_a_damaged_block_is_computed_and_stored_again(bad: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("llama")
    expected = filled(path, tmp_path)
    file = sorted(files(tmp_path), key=lambda file: -file.stat().st_mtime_ns)[bad]  # the first block was stored last
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    engine = load(path, tmp_path)
    assert answers(engine, 7, 8) == expected
    stats = engine.stats()
    # A step computes 48 tokens; behind them the tier's blocks are used again.
    reused = 1 if bad == 0 else 0
    assert stats.prompt == 2 + 2 + len(PREFIX) - 16 * (bad + reused)
    assert stats.tier is not None
    assert stats.tier.rejected == 1
    # The second request has hit it, so it is stored again.
    assert stats.tier.bytes_written > 0
    again = load(path, tmp_path)
    assert answers(again, 7) == expected[:1]
    assert again.stats().prompt == 2


@pytest.mark.parametrize(
    "other",
    [
        {"digest": "sha256:01"},
        {"attention": "paged-sdpa"},
        {"max_model_len": 120},
        pytest.param({"block_size": 8}, marks=pytest.mark.exhaustive),
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda other: next(iter(other)),
)
def test_blocks_of_another_model_or_layout_are_not_used(
    other: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("llama")
    filled(path, tmp_path)
    engine = load(path, tmp_path, **other)
    assert answers(engine, 7) == answers(load(path, None, **other), 7)
    stats = engine.stats()
    assert stats.prompt == len(PREFIX) + 2
    assert stats.tier is not None
    assert (stats.tier.hits, stats.tier.rejected) == (0, 0)


def test_blocks_of_another_tenant_are_not_used(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("llama")
    filled(path, tmp_path)
    engine = load(path, tmp_path)
    answers(engine, 7, salt=b"another")
    assert engine.stats().prompt == len(PREFIX) + 2


def test_a_folder_that_can_not_be_used_ends_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    path = tiny_model("llama")
    engine = load(path, tmp_path / "file")
    assert answers(engine, 7, 8) == answers(load(path, None), 7, 8)
    stats = engine.stats()
    assert stats.tier is not None
    assert not stats.tier.is_on


def test_what_was_not_stored_while_there_was_work_is_stored_at_its_end(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_tier, "MAX_STORE_BYTES", 1)  # a block a step
    engine = load(tiny_model("llama"), tmp_path)
    short = SamplingParams(max_tokens=1)
    for name, end in (("a", 5), ("b", 6)):
        list(engine.run([replace(request(name, [end, end]), params=short)]))
    engine.close()
    assert len(files(tmp_path)) == len(PREFIX) // 16


def test_without_a_folder_there_is_no_tier(tiny_model: TinyModel) -> None:
    assert load(tiny_model("llama"), None).stats().tier is None


def test_what_does_not_go_with_a_folder_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("llama")
    with pytest.raises(EngineError, match="doesn't hold the keys of speculate 'draft'"):
        load(path, tmp_path, speculation=SpeculationConfig("draft", draft_model=str(path)))
    with pytest.raises(EngineError, match=r"\(--kv-cache-dir\) doesn't run under tensor parallelism"):
        load(path, tmp_path, tensor_parallel=2)
    config = EngineConfig(cache=CacheConfig(tier_folder=str(tmp_path)))
    with pytest.raises(EngineError, match=r"give Engine\.load a model_digest"):
        Engine.load(path, config)
    with pytest.raises(EngineError, match="needs prefix_caching"):
        Engine.load(path, replace(config, cache=replace(config.cache, prefix_caching=False)), model_digest=lambda: "x")
    with pytest.raises(UnsupportedModel, match="leave --kv-cache-dir out"):
        check_encoder_config(config)
    assert [name for is_set, name, _ in _refused(config) if is_set] == ["--kv-cache-dir"]
