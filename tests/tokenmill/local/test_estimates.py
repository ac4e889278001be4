"""The estimates of `estimate`, compared with the counts of `run` on a real model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.load import describe_shape
from pipeline.planner.estimates import sample
from tests.engine.runner.fake_cuda import compiler, fake_cuda
from tokenmill.bench_results import MeasuredSpeed
from tokenmill.config.engine_options import EngineOptions
from tokenmill.local.dry_run import sized
from workers.model.loaded_model import model_digest

pytestmark = pytest.mark.slow

Cli = Callable[..., Any]
Write = Callable[..., Path]
Chat = Callable[..., dict[str, Any]]

HEADER = "from the user to the assistant and back again a message and another one "


def by_chance(chat: Chat) -> list[dict[str, Any]]:
    """Half of the rows begin alike, some of them for longer; no prefix is long enough for the planner to see it."""
    rows = []
    for n in range(40):
        text = f"{HEADER if n % 2 == 0 else ''}{'once more ' * (n % 8 // 2)}{n} said the user"
        rows.append(chat(f"r{n}", text=text, max_tokens=4 + n * 5 % 17, ignore_eos=True))
    return rows


def estimated(tokenmill: Cli, path: Path, model: Path, *more: object) -> Any:
    return tokenmill("estimate", path, "--model", f"tiny={model}", "--dtype", "float32", *more, "--json").json()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_KV_BLOCK_SIZE", "8")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shard_rows", ["2000", "7"])
def test_given_accidental_prefixes_when_estimated_then_tokens_are_those_that_a_run_counts(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, shard_rows: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", shard_rows)
    path = write_lines(*by_chance(chat), *by_chance(chat)[:3])

    found = estimated(tokenmill, path, model_folder)
    ran = tokenmill(
        "run", path, "--model", f"tiny={model_folder}", "-o", folder / "out", "--dtype", "float32",
        "--speculate", "off", "--json",
    ).json()  # fmt: skip

    usage = ran["usage"]
    assert found["exact"]
    assert found["prompt_tokens"] == usage["prompt"]
    assert found["expected_tokens"] == usage["completion"]
    assert usage["cached"] > usage["prompt"] / 5, "else there is nothing to foresee"
    # What a shard finds in the cache depends on what the others had computed when it was ready: of shards of 7 rows,
    # 952 to 1,078 tokens have been seen, and 999 are foreseen. A whole job in one shard is counted to the token.
    tolerance = 0 if shard_rows == "2000" else 0.06 * usage["prompt"]
    assert abs(usage["cached"] - found["shared_prefix_tokens"]) <= tolerance


@pytest.mark.usefixtures("small_blocks")
def test_given_more_rows_than_are_sampled_when_estimated_then_the_sample_is_extrapolated(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat(f"r{n}", text=f"{HEADER} {n}", max_tokens=4 + n * 5 % 17, ignore_eos=True) for n in range(1600)]
    path = write_lines(*rows)
    digest = model_digest(model_folder)
    speed = MeasuredSpeed(
        digest, "float32", 1, "far away", "2026-01-01", 1e3, 100.0, 8, step_sizes=((1, 0.01), (128, 0.02)), read=1e-6
    )
    (folder / "speed.json").write_text(json.dumps(asdict(speed)))
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "40")

    whole = estimated(tokenmill, path, model_folder, "--measured", folder / "speed.json")
    monkeypatch.setattr(sample.ShardSample.__init__, "__defaults__", (60_000, 1000))
    part = estimated(tokenmill, path, model_folder, "--measured", folder / "speed.json")

    assert (whole["exact"], part["exact"]) == (True, False)
    for name in ("prompt_tokens", "shared_prefix_tokens", "expected_tokens"):
        assert part[name] == pytest.approx(whole[name], rel=0.05), name
    assert part["times"][0]["seconds"] == pytest.approx(whole["times"][0]["seconds"], rel=0.15)


def test_given_a_small_cache_elsewhere_when_estimated_then_recomputation_takes_time(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(*by_chance(chat))
    speed = MeasuredSpeed(
        model_digest(model_folder), "float32", 1, "far away", "2026-01-01", 1e3, 100.0, 8,
        step_sizes=((1, 0.01), (128, 0.02)),
    )  # fmt: skip
    took = []
    for cache_bytes in (None, 1):
        (folder / "speed.json").write_text(json.dumps(asdict(speed) | {"cache_bytes": cache_bytes}))
        took.append(
            estimated(tokenmill, path, model_folder, "--measured", folder / "speed.json")["times"][0]["seconds"]
        )
    assert np.isfinite(took).all(), "one that could not even load the model is taken for one that can"


def test_given_a_device_elsewhere_when_estimated_then_its_steps_have_the_size_that_is_chosen_there(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(*(chat(f"r{n}", text=str(n), max_tokens=40, ignore_eos=True) for n in range(400)))
    speed = MeasuredSpeed(
        model_digest(model_folder), "float32", 1, "far away", "2026-01-01", 1e3, 100.0, 8,
        step_sizes=((1, 0.01), (2048, 0.01)),
    )  # fmt: skip
    took = {}
    for rows, tokens in ((None, None), (512, 16384), (32, None), (512, 256)):
        (folder / "speed.json").write_text(json.dumps(asdict(speed) | {"step_rows": rows, "step_tokens": tokens}))
        (there,) = estimated(tokenmill, path, model_folder, "--measured", folder / "speed.json")["times"]
        took[rows, tokens] = there["seconds"]
    assert took[512, 16384] < took[None, None] / 2 < took[32, None] / 4
    assert took[512, 16384] < took[512, 256]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")
@pytest.mark.skipif(compiler() is None, reason="NOT TESTED HERE: a fake CUDA device; there is no C++ compiler")
def test_given_a_device_here_when_a_job_is_rehearsed_then_with_the_size_that_loading_would_choose(
    model_folder: Path,
) -> None:
    with fake_cuda(triton=False):
        spec, _ = describe_shape(model_folder)
        config = sized(EngineOptions().config(100, 400, rows=96), spec, model_folder)
        assert (config.schedule.rows, config.schedule.tokens) == (96, 16384)
        large = replace(spec, num_layers=32, windows=(None,) * 32, num_parameters=8_000_000_000, hidden_size=4096)
        config = sized(EngineOptions(quantize="int4").config(), large, model_folder)
        assert (config.schedule.tokens, config.graph_tokens) == (8192, 1024)
        larger = replace(large, num_parameters=130_000_000_000, num_active_parameters=8_000_000_000)
        config = sized(EngineOptions(quantize="int4", max_num_seqs=500).config(), larger, model_folder)
        assert (config.schedule.rows, config.schedule.tokens) == (500, 4096), "61 of 80 GiB are weights"
    config = EngineOptions().config()
    assert sized(config, spec, model_folder) == config


def test_given_measured_rates_only_when_steps_are_estimated_then_they_take_the_measured_time() -> None:
    times = MeasuredSpeed("m", "float32", 1, "old", "2026-01-01", prefill=1000.0, decode=100.0, batch=8).times
    eight, prompt = times.of(np.array([[8, 8, 500, 500], [8 + 2048, 0, 0, 9e6]], dtype=float)).tolist()
    assert eight == pytest.approx(8 / 100)
    assert prompt == pytest.approx(8 / 100 + 2048 / 1000)


def test_given_rows_that_a_run_refuses_when_estimated_then_their_tokens_are_not_expected(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(chat("far", max_tokens=9999), chat("near", max_tokens=5))
    found = estimated(tokenmill, path, model_folder)
    assert (found["rows"], found["rejected"], found["unique"], found["max_tokens"]) == (2, 1, 1, 5)
    ran = tokenmill(
        "run", path, "--model", f"tiny={model_folder}", "-o", folder / "out", "--dtype", "float32", "--json"
    )  # fmt: skip
    assert ran.json()["counts"]["failed"] == found["rejected"]


def test_given_an_empty_input_when_estimated_then_a_message_says_so(
    tokenmill: Cli, folder: Path, model_folder: Path
) -> None:
    (folder / "empty.jsonl").write_text("\n")
    ended = tokenmill("estimate", folder / "empty.jsonl", "--model", f"tiny={model_folder}")
    assert "the input holds no rows: nothing would be computed" in ended.err
    assert "estimated from a sample" not in ended.out
