"""Peers compared: the required lengths of answers, ratios pair by pair, and the table."""

from __future__ import annotations

import pytest

from benchmarks.peers.outcomes import (
    Measured,
    Pair,
    Row,
    WrongCount,
    check_lengths,
    last_json,
    ratios,
    spread,
    table,
    verdict,
)


def measured(rate: float, rss: int = 2_000_000_000) -> Measured:
    return Measured(rate, 1000 / rate, 1000, rss, 0.04)


def pair(peer: float | None, **ours: float) -> Pair:
    return Pair(measured(peer) if peer else None, {name: measured(rate) for name, rate in ours.items()})


def peer(engine: str, setting: str, note: str, pairs: list[Pair], reason: str | None = None) -> Row:
    return Row(engine, setting, note, "bf16", ("bf16", "int8"), pairs, reason)


def test_the_result_is_the_last_line_of_json_that_is_one() -> None:
    """Engines print what they like around it, JSON among it."""
    stdout = 'loading\n{"wall_seconds": 1}\n{"wall_seconds": 2.5, "output_lengths": [3]}\n{"level": "info"}\n{broken\n'

    assert last_json(stdout) == {"wall_seconds": 2.5, "output_lengths": [3]}


@pytest.mark.parametrize("stdout", ["", "no JSON\n", '{"level": "info"}\n', '{"wall_seconds": \n'])
def test_output_without_a_result_is_no_result(stdout: str) -> None:
    with pytest.raises(ValueError, match="no result"):
        last_json(stdout)


def test_answers_of_the_requested_length_pass() -> None:
    check_lengths(["a", "b"], [3, 5], [3, 5])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([3, 4], "first b: asked for 5, made 4"),
        ([4, 4], "2 of 2 requests"),  # the requested sum, but wrong lengths
        ([3], "1 answers for 2 requests"),
        ([3, 5, 1], "3 answers for 2 requests"),
    ],
)
def test_any_other_number_of_tokens_is_refused(made: list[int], message: str) -> None:
    with pytest.raises(WrongCount, match=message):
        check_lengths(["a", "b"], [3, 5], made)


def test_ratios_are_taken_within_pairs_so_that_a_drift_of_the_machine_cancels() -> None:
    """Given a machine that halves its speed after the first pair, the ratio is the same in both."""
    row = peer("vllm", "best", "bf16", [pair(100, bf16=150), pair(50, bf16=75)])

    assert ratios(row, "bf16") == [1.5, 1.5]


def test_a_pair_whose_peer_failed_has_no_ratio() -> None:
    row = peer("vllm", "best", "bf16", [pair(100, bf16=150), pair(None, bf16=75)], "no result within 5 s")

    assert ratios(row, "bf16") == [1.5]


def test_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.25], 2) == "2.25 (1.00 to 3.00)"
    assert spread([1234.4], 0) == "1,234"
    assert spread([], 2) == "-"


def test_the_table_has_every_peer_with_its_reason_where_it_gave_nothing() -> None:
    rows = [
        peer("vllm", "best", "eager", [pair(100, bf16=150, int8=300), pair(50, bf16=100, int8=125)]),
        peer("openvino", "best", "fp16", [], "installing openvino: no space left"),
        peer(
            "llamacpp", "default", "Q8_0", [pair(20, bf16=100, int8=200), pair(None, bf16=90, int8=180)], "it crashed"
        ),
    ]

    lines = table(rows, {"bf16": "--dtype bfloat16", "int8": "--quantize int8"}).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    assert cells[0] == [
        "engine", "precision", "setting", "output tok/s", "bf16 / it", "int8 / it", "peak RSS", "runs", "others' cores",
    ]  # fmt: skip
    # Ours: every run of all pairs, also of those whose peer failed.
    assert cells[2] == ["tokenmill", "bf16", "`--dtype bfloat16`", "100 (90 to 150)", "-", "-", "2.0 GB", "4", "0.04 (0.04 to 0.04)"]  # fmt: skip  # noqa: E501
    assert cells[3][3] == "190 (125 to 300)"
    assert cells[4][:6] == [
        "vllm",
        "bf16",
        "best: eager",
        "75 (50 to 100)",
        "1.75 (1.50 to 2.00)",
        "2.75 (2.50 to 3.00)",
    ]
    assert cells[5][:7] == [
        "openvino",
        "bf16",
        "best: fp16",
        "no result: installing openvino: no space left",
        "-",
        "-",
        "-",
    ]
    assert cells[6][:6] == ["llamacpp", "bf16", "default: Q8_0; then it crashed", "20", "5.00", "10.00"]
    assert {len(line) for line in cells} == {9}


def test_the_verdict_is_against_the_peer_that_comes_nearest_in_its_own_pairs() -> None:
    """Given a peer with the higher rate only because the machine was faster then, the other one is the best peer."""
    rows = [
        peer("vllm", "default", "", [pair(60, bf16=120)]),
        peer("vllm", "best", "", [pair(100, bf16=150), pair(80, bf16=160), pair(90, bf16=90)]),
        peer("openvino", "best", "", [pair(200, bf16=600)]),
        peer("llamacpp", "best", "", [pair(None, bf16=150)], "it crashed"),
    ]

    assert verdict(rows, ["bf16"]) == ["bf16 / best peer (vllm best): 1.50 (1.00 to 2.00)"]
    assert verdict(rows[3:], ["bf16"]) == ["bf16: no peer gave a result"]
