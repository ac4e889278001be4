"""The order of runs, what becomes of an engine that fails, and runs of real processes through the runners' protocol."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import catalog
from benchmarks.peers.catalog import Environment, Peer, Setting, select
from benchmarks.peers.compare import Ours, compare, opponents, parse_ours
from benchmarks.peers.engines import Bench, Failed, processor_list, run_ours, run_peer
from benchmarks.peers.offline import Prompt as PeerPrompt
from benchmarks.peers.offline import leaders, salted
from benchmarks.peers.outcomes import Measured, Row
from benchmarks.peers.process import Finished
from benchmarks.workload import Prompt, write_prompts

# An engine that answers each prompt with its own last token, through the protocol that all runners share. `short` takes
# one token from the last answer, `fail` ends it.
ENGINE = """
import sys, time
sys.path.append({peers!r})
from offline import measure, parse_task
task = parse_task(None)
if task.options.get("fail"):
    raise RuntimeError("this engine is broken")
def generate(prompts):
    time.sleep(0.3)
    answers = [[prompt.token_ids[-1]] * prompt.max_tokens for prompt in prompts]
    answers[-1] = answers[-1][task.options.get("short", 0):]
    return answers
measure("echo", (), task, generate, lambda: None)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    prompts = [Prompt(f"row-{i}", [3 + i, 4, 5 + i], 2 + i) for i in range(4)]
    ids = tmp_path / "rows.json"
    write_prompts(ids, prompts)
    return Bench(prompts, ids, sorted(os.sched_getaffinity(0))[:1], 120, tmp_path)


def echo(tmp_path: Path) -> Peer:
    runner = tmp_path / "echo.py"
    runner.write_text(ENGINE.format(peers=str(Path(catalog.__file__).parent)), encoding="utf-8")
    return Peer("echo", str(runner), Environment("echo", ()), ())


def test_each_run_of_a_peer_stands_right_behind_one_of_each_of_ours() -> None:
    order: list[str] = []

    def runner(name: str) -> Callable[[], Measured]:
        def run() -> Measured:
            order.append(name)
            return Measured(float(len(order)), 1.0, 1, 1, 0.0)

        return run

    # Given a peer that is compared with both of ours, and one that is compared with one of them
    rows = [
        (Row(name, "best", "", "bf16", against, []), runner(name))
        for name, against in (("vllm", ("int8", "bf16")), ("openvino", ("bf16",)))
    ]
    ours = {name: runner(name) for name in ("bf16", "int8")}
    saved: list[list[int]] = []

    done = compare(rows, ours, 2, lambda _: None, lambda sofar: saved.append([len(row.pairs) for row in sofar]))

    assert order == ["int8", "bf16", "vllm", "bf16", "openvino"] * 2
    assert [pair.ours for pair in done[1].pairs] == [{"bf16": Measured(rate, 1.0, 1, 1, 0.0)} for rate in (4.0, 9.0)]
    assert saved == [[1, 0], [1, 1], [2, 1], [2, 2]]


def test_a_peer_that_fails_is_reported_and_not_run_again_while_the_others_continue() -> None:
    counts = {"fails": 0, "works": 0}

    def fails() -> Measured:
        counts["fails"] += 1
        if counts["fails"] == 2:
            raise Failed("no result within 600 s")
        return Measured(1.0, 1.0, 1, 1, 0.0)

    def works() -> Measured:
        counts["works"] += 1
        return Measured(1.0, 1.0, 1, 1, 0.0)

    def never() -> Measured:
        raise AssertionError("it was never installed")

    rows = [
        (Row("fails", "best", "", "bf16", ("ours",), []), fails),
        (Row("works", "best", "", "bf16", ("ours",), []), works),
        (Row("missing", "best", "", "bf16", ("ours",), [], "not installed"), never),
    ]

    done = compare(rows, {"ours": works}, 4, lambda _: None, lambda _: None)

    assert counts["fails"] == 2
    assert [pair.peer is None for pair in done[0].pairs] == [False, True]
    assert done[0].reason == "no result within 600 s"
    assert len(done[1].pairs) == 4
    assert done[1].reason is None
    assert (done[2].pairs, done[2].reason) == ([], "not installed")


@pytest.mark.slow
def test_a_peers_run_gives_its_rate_after_a_warm_up_that_shares_no_prefix(bench: Bench, tmp_path: Path) -> None:
    result = run_peer(bench, echo(tmp_path), Setting("best", "", "any", "bf16"), Path(sys.executable), tmp_path)

    assert result.output_tokens == 2 + 3 + 4 + 5
    assert result.rate == pytest.approx(14 / result.wall_seconds)
    assert result.peak_rss_bytes > 1_000_000
    assert result.details["preloaded"] == []


def test_a_peer_that_lacks_a_library_of_its_best_setting_has_no_result(bench: Bench, tmp_path: Path) -> None:
    best = Setting("best", "", "any", "bf16", preload=("libnothing.so.9",))

    with pytest.raises(Failed, match=r"libnothing\.so\.9: not installed"):
        run_peer(bench, echo(tmp_path), best, Path(sys.executable), tmp_path)


@pytest.mark.slow
def test_a_peer_that_makes_one_token_too_few_has_no_result(bench: Bench, tmp_path: Path) -> None:
    short = Setting("best", "", "any", "bf16", {"short": 1})

    with pytest.raises(Failed, match=r"1 of 4 requests.*first row-3: asked for 5, made 4"):
        run_peer(bench, echo(tmp_path), short, Path(sys.executable), tmp_path)


def test_a_peer_that_breaks_has_its_error_as_the_reason(bench: Bench, tmp_path: Path) -> None:
    broken = Setting("best", "", "any", "bf16", {"fail": True})

    with pytest.raises(Failed, match="RuntimeError: this engine is broken"):
        run_peer(bench, echo(tmp_path), broken, Path(sys.executable), tmp_path)


@pytest.mark.slow
def test_a_peer_that_takes_too_long_has_no_result(bench: Bench, tmp_path: Path) -> None:
    peer = echo(tmp_path)
    Path(peer.runner).write_text("import time; time.sleep(60)", encoding="utf-8")

    with pytest.raises(Failed, match="no result within 1 s"):
        run_peer(replace(bench, limit=1), peer, Setting("best", "", "any", "bf16"), Path(sys.executable), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_our_engine_runs_the_same_ids_and_is_checked_likewise(bench: Bench, tiny_model: Callable[[str], Path]) -> None:
    result = run_ours(bench, "f32", "--dtype float32 --block-size 16", tiny_model("llama"))

    assert result.output_tokens == 14
    assert result.details["dtype"] == "float32"
    assert result.details["settings"]["cache"]["block_size"] == 16
    assert result.details["settings"]["threads"] == 1
    too_much = replace(bench, prompts=[replace(prompt, max_tokens=9) for prompt in bench.prompts])
    with pytest.raises(Failed, match="4 of 4 requests"):
        too_much.measured({"wall_seconds": 1, "output_lengths": [2, 3, 4, 5]}, Finished(0, "", "", 1, 1, 0))


def test_our_settings_have_names_and_some_a_form_of_the_model() -> None:
    assert parse_ours(["bf16=--dtype bfloat16", "w8a8@w8a8=--dtype bfloat16 --block-size 16", "plain="]) == {
        "bf16": Ours("--dtype bfloat16"),
        "w8a8": Ours("--dtype bfloat16 --block-size 16", catalog.W8A8),
        "plain": Ours(""),
    }
    assert parse_ours(["--dtype=bfloat16"]) == {"ours": Ours("--dtype=bfloat16")}
    with pytest.raises(ValueError, match="'a' is taken"):
        parse_ours(["a=--dtype bfloat16", "a=--dtype float32"])
    with pytest.raises(ValueError, match="there is no form 'gguf-q8_0'; write safetensors or w8a8"):
        parse_ours(["a@gguf-q8_0=--dtype bfloat16"])


def test_with_the_same_precision_a_peer_is_compared_with_the_setting_of_its_precision_only() -> None:
    ours = ["bf16", "w8a8"]
    bf16, w8a8, int8 = (select(name)[0][1] for name in ("vllm:best", "vllm:w8a8", "openvino:int8"))

    assert [opponents(setting, ours, True) for setting in (bf16, w8a8)] == [("bf16",), ("w8a8",)]
    assert opponents(w8a8, ours, False) == ("bf16", "w8a8")
    with pytest.raises(ValueError, match="none of ours is named int8"):
        opponents(int8, ours, True)


def test_peers_are_chosen_by_name_and_setting() -> None:
    def names(text: str) -> list[str]:
        return [f"{peer.name}:{setting.name}" for peer, setting in select(text)]

    assert names("vllm") == ["vllm:best", "vllm:default"]
    assert names("vllm:compiled, openvino:best,vllm:compiled") == ["vllm:compiled", "openvino:best"]
    assert names("transformers:best") == ["transformers-static:best", "transformers-continuous:best"]
    for unknown in ("sglang", "vllm:fastest"):
        with pytest.raises(ValueError, match=f"no peer or setting '{unknown}'"):
            select(unknown)


def test_every_peer_has_a_runner_and_a_best_and_a_default_setting() -> None:
    for peer in catalog.PEERS:
        assert (Path(catalog.__file__).parent / peer.runner).is_file()
        assert {"best", "default"} <= {setting.name for setting in peer.settings}
        for setting in peer.settings:
            json.dumps(dict(setting.options))


def test_a_warm_ups_prompts_share_no_prefix_with_the_timed_ones_but_still_share_their_own() -> None:
    prompts = [PeerPrompt("a", [0, 5, 6], 1), PeerPrompt("b", [7, 5, 6], 1), PeerPrompt("c", [7, 5, 8], 1)]

    warm = salted(prompts)

    assert all(w.token_ids[0] != p.token_ids[0] for w, p in zip(warm, prompts, strict=True))
    assert [w.token_ids[1:] for w in warm] == [p.token_ids[1:] for p in prompts]
    assert warm[1].token_ids[0] == warm[2].token_ids[0]
    assert all(token >= 0 for w in warm for token in w.token_ids)


def test_the_leader_of_a_shared_prefix_is_the_member_with_the_shortest_answer() -> None:
    shared, other = [1, 2, 3], [9, 9, 9]
    prompts = [
        PeerPrompt("a", [*shared, 4], 20),
        PeerPrompt("b", [*other, 4], 1),  # alone with its prefix
        PeerPrompt("c", [*shared, 5], 10),
        PeerPrompt("d", shared, 1),  # nothing behind the prefix: its last block would never be looked up
        PeerPrompt("e", [*shared, 6], 15),
    ]

    assert leaders(prompts, 3) == [2]
    assert leaders(prompts[:2], 3) == []


def test_prefixes_inside_a_shared_prefix_have_leaders_of_their_own() -> None:
    """Given two documents behind one system prompt, a prompt of each document leads, and none for the system prompt."""
    system, first, second = [1, 1], [2, 2], [3, 3]
    texts = [[*system, 8], [*system, *first, 8], [*system, *second, 8], [*system, *first, 9], [*system, *second, 9]]
    prompts = [PeerPrompt(str(i), text, 50 - i) for i, text in enumerate(texts)]

    assert leaders(prompts, 2) == [3, 4]


def test_processors_are_formatted_as_ranges() -> None:
    assert processor_list([0, 1]) == "0-1"
    assert processor_list([5, 0, 2, 3]) == "0,2-3,5"
