"""The uniforms behind the draws: published test vectors, uniform bits, and independence along every argument."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare, kstest

from engine.sampling.philox import fold_seed, philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(
    counter: tuple[int, int, int, int], key: int, expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.array([word, word], dtype=np.uint64) for word in counter)
    words = philox4x32((c0, c1, c2, c3), np.array([key, key], dtype=np.uint64))
    assert words.shape == (4, 2)
    assert tuple(words[:, 0].tolist()) == tuple(words[:, 1].tolist()) == expected


def along(argument: str, count: int, start: int = 0) -> NDArray[np.float64]:
    """Uniforms for consecutive values of one argument, the others fixed."""
    values = {name: np.full(count, 7, dtype=np.int64) for name in ("seed", "choice", "position")}
    values[argument] = np.arange(start, start + count, dtype=np.int64)
    return uniforms(values["seed"].astype(np.uint64), values["choice"], values["position"])


@pytest.mark.parametrize("argument", ["seed", "choice", "position"])
def test_uniforms_are_uniform_and_uncorrelated_along_each_argument(argument: str) -> None:
    u = along(argument, 200_000)
    assert u.min() >= 0
    assert u.max() < 1
    assert kstest(u, "uniform").pvalue > 1e-3
    cells = np.floor(u[:-1] * 16).astype(int) * 16 + np.floor(u[1:] * 16).astype(int)
    assert chisquare(np.bincount(cells[::2], minlength=256)).pvalue > 1e-3  # neighbours, without overlap
    for lag in (1, 2, 3, 64, 1024):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4 / np.sqrt(len(u))


@pytest.mark.parametrize(("first", "second"), [("seed", "choice"), ("seed", "position"), ("choice", "position")])
def test_swapping_two_arguments_gives_unrelated_uniforms(first: str, second: str) -> None:
    a, b = along(first, 100_000, start=1000), along(second, 100_000, start=1000)
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(a))
    assert len(np.intersect1d(a, b)) == 0


def test_every_bit_is_fair_and_flips_with_any_input_bit() -> None:
    count = 20_000
    base = np.random.default_rng(0).integers(0, 2**31, count)
    bits = (uniforms(base.astype(np.uint64), base[::-1], base // 3) * 2.0**53).astype(np.uint64)
    tolerance = 5 / (2 * np.sqrt(count))
    for bit in range(53):
        assert abs(((bits >> np.uint64(bit)) & np.uint64(1)).mean() - 0.5) < tolerance
    for flip in (1, 1 << 13, 1 << 30):
        for changed in ((base ^ flip, base[::-1], base // 3), (base, base[::-1] ^ flip, base // 3)):
            other = (uniforms(changed[0].astype(np.uint64), *changed[1:]) * 2.0**53).astype(np.uint64)
            flipped = np.bitwise_count(bits ^ other) if hasattr(np, "bitwise_count") else _popcount(bits ^ other)
            assert abs(flipped.mean() / 53 - 0.5) < 0.01


def _popcount(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.unpackbits(values.view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1)


def test_seeds_of_any_size_and_sign_fold_to_different_64_bits() -> None:
    seeds = [
        0,
        1,
        -1,
        2**31,
        2**32,
        2**63,
        -(2**63),
        2**64 - 2,
        2**64,
        2**64 + 1,
        -(2**64),
        2**200,
        -(2**200),
        2**200 + 1,
    ]
    folded = [fold_seed(seed) for seed in seeds]
    assert all(0 <= value < 2**64 for value in folded)
    # -2**63 and 2**63 are the same 64 bits; all others differ
    assert len(set(folded)) == len(seeds) - 1
    assert folded == [fold_seed(seed) for seed in seeds]


def test_one_uniform_does_not_depend_on_the_other_requested_ones() -> None:
    positions = np.arange(50)
    together = uniforms(np.full(50, 3, dtype=np.uint64), np.zeros(50, dtype=np.int64), positions)
    for position in (0, 17, 49):
        alone = uniforms(
            np.array([3], dtype=np.uint64), np.zeros(1, dtype=np.int64), positions[position : position + 1]
        )
        assert alone[0] == together[position]
