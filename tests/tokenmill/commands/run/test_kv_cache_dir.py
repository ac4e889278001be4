"""--kv-cache-dir in `run`: a later job computes nothing of a system prompt that an earlier one has computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Cli = Callable[..., Any]
Write = Callable[..., Path]
Results = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def long_model(folder: Path, model_folder: Path) -> Path:
    """The tiny model with a context of 8,192 tokens."""
    path = folder / "long"
    shutil.copytree(model_folder, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return path


def test_given_a_job_when_another_one_has_the_same_system_prompt_then_none_of_it_is_computed_again(
    tokenmill: Cli, folder: Path, long_model: Path, chat: Callable[..., dict[str, Any]], write_lines: Write,
    results: Results,
) -> None:  # fmt: skip
    # Given a job of two rows behind a system prompt of 4,000 tokens,
    system = {"role": "system", "content": " ".join(f"rule {n}" for n in range(520))}

    def run(name: str, *options: str) -> list[tuple[int, int, str]]:
        lines = [chat(f"{name}{n}", text=f"number {n}") for n in range(2)]
        for line in lines:
            line["body"]["messages"].insert(0, system)
        path = write_lines(*lines, name=f"{name}.jsonl")
        model = ("--model", f"tiny={long_model}", "--dtype", "float32", "--threads", "1")
        ended = tokenmill("run", path, *model, "-o", folder / name, *options)
        assert ended.code == 0, ended.err
        found = []
        for row in results(folder / name):
            body = json.loads(row["response"])
            usage, text = body["usage"], body["choices"][0]["message"]["content"]
            found.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], text))
        return found

    blocks = folder / "blocks"
    first = run("first", "--kv-cache-dir", str(blocks))
    prompt = first[0][0]
    assert prompt > 4000
    assert first[0][1] == 0
    # when another job with it is run,
    second = run("second", "--kv-cache-dir", str(blocks))
    # then its first row finds all whole blocks of it, and the answers are the same.
    blocks_of_prompt = first[1][1] // 32 * 32
    assert blocks_of_prompt > 4000
    assert [cached // 32 * 32 for _, cached, _ in second] == [blocks_of_prompt] * 2
    assert [text for _, _, text in second] == [text for _, _, text in first]
    # When all blocks are damaged, all are computed.
    for path in blocks.glob("*/*/*"):
        path.write_bytes(path.read_bytes()[:-1])
    third = run("third", "--kv-cache-dir", str(blocks))
    assert third[0][1] == 0
    assert [text for _, _, text in third] == [text for _, _, text in first]


def test_given_a_size_without_a_folder_when_run_then_it_is_refused(
    tokenmill: Cli, model_folder: Path, chat: Callable[..., dict[str, Any]], write_lines: Write
) -> None:
    path = write_lines(chat("a"))
    ended = tokenmill("run", path, "--model", f"tiny={model_folder}", "-o", "out", "--kv-cache-dir-size", "1GB")
    assert ended.code == 1
    assert "--kv-cache-dir-size is given without --kv-cache-dir" in ended.error


def test_given_host_memory_for_less_than_a_block_when_run_then_it_is_refused(
    tokenmill: Cli, model_folder: Path, chat: Callable[..., dict[str, Any]], write_lines: Write
) -> None:
    path = write_lines(chat("a"))
    ended = tokenmill("run", path, "--model", f"tiny={model_folder}", "-o", "out", "--kv-offloading-size", "1KB")
    assert ended.code == 1
    assert "1000 bytes of host memory for the KV cache (--kv-offloading-size) hold no block" in ended.error
