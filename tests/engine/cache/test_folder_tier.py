"""A folder of blocks: found by later processes, bounded, and never wrong."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from engine.cache.block_tier import BlockKey, TierStats
from engine.cache.folder_tier import FolderTier
from engine.cache.prefix import HashChain, chain_digest

TOKENS = np.arange(8, dtype=np.int32).tobytes()
SIZE = 1000


def key(tokens: bytes = TOKENS, salt: bytes = b"one", group: int = 0) -> BlockKey:
    return BlockKey(group, HashChain(salt, None, chain_digest).of_block(0, tokens), tokens)


def numbered(number: int) -> BlockKey:
    return key(np.full(8, number, dtype=np.int32).tobytes())


def block(number: int = 1) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def open_tier(folder: Path, identity: str = "model", max_bytes: int = 1 << 20) -> FolderTier:
    return FolderTier(folder, identity, max_bytes)


def store(tier: FolderTier, name: BlockKey, data: np.ndarray) -> None:
    tier.store(name, len(data), lambda: data)


def stored(folder: Path, *keys: BlockKey, identity: str = "model", max_bytes: int = 1 << 20) -> None:
    tier = open_tier(folder, identity, max_bytes)
    for number, one in enumerate(keys):
        store(tier, one, block(number))
    tier.close()
    assert tier.stats().is_on


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_block_is_found_by_a_later_process(tmp_path: Path) -> None:
    stored(tmp_path / "a" / "b", key(), key(group=1))
    tier = open_tier(tmp_path / "a" / "b")
    assert tier.contains(key())
    found, other = tier.load(key()), tier.load(key(group=1))
    assert found is not None
    assert other is not None
    assert (found == block(0)).all()
    assert (other == block(1)).all()
    assert tier.stats() == TierStats(hits=2, bytes_read=2 * SIZE)
    assert tier.load(numbered(3)) is None
    assert not tier.contains(numbered(3))
    assert {path.stat().st_mode & 0o077 for path in files(tmp_path)} == {0}


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:20],
        lambda content: b"",
        lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
    ],
)
def test_a_damaged_block_is_removed_and_counted(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    stored(tmp_path, key())
    (file,) = files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    tier = open_tier(tmp_path)
    assert tier.load(key()) is None
    assert (tier.stats().rejected, tier.stats().hits, tier.stats().is_on) == (1, 0, True)
    assert not files(tmp_path)
    store(tier, key(), block(0))
    tier.close()
    assert open_tier(tmp_path).load(key()) is not None


@pytest.mark.parametrize("other", [key(salt=b"another"), numbered(7), key(group=1)])
def test_a_block_under_another_ones_name_is_rejected(tmp_path: Path, other: BlockKey) -> None:
    stored(tmp_path, other)
    (file,) = files(tmp_path)
    tier = open_tier(tmp_path)
    name = tier._path(key())
    name.parent.mkdir(exist_ok=True)
    file.rename(name)
    assert tier.load(key()) is None
    assert tier.stats().rejected == 1


def test_a_block_of_another_identity_is_not_found_and_under_its_folder_rejected(tmp_path: Path) -> None:
    stored(tmp_path, key(), identity="another model")
    tier = open_tier(tmp_path)
    assert not tier.contains(key())
    assert tier.load(key()) is None
    assert tier.stats() == TierStats()
    (file,) = files(tmp_path)
    own = tier._path(key())
    own.parent.mkdir(parents=True)
    file.rename(own)
    assert tier.load(key()) is None
    assert tier.stats().rejected == 1


def test_the_blocks_that_were_not_used_for_longest_are_removed(tmp_path: Path) -> None:
    most = 16 * (SIZE + 32)
    (tmp_path / "mine.txt").write_text("not a block")
    (tmp_path / ("a" * 32) / "bb").mkdir(parents=True)
    (tmp_path / ("a" * 32) / "bb" / "mine").write_text("nor this")
    stored(tmp_path, numbered(100), identity="another model", max_bytes=most)
    stored(tmp_path, *map(numbered, range(15)), max_bytes=most)
    tier = open_tier(tmp_path, max_bytes=most)
    assert tier.load(numbered(0)) is not None  # used last
    for number in range(15, 20):
        store(tier, numbered(number), block(number))
    tier.close()
    assert [number for number in range(20) if not tier.contains(numbered(number))] == [1, 2, 3, 4]
    assert not open_tier(tmp_path, "another model").contains(numbered(100))
    kept = files(tmp_path)
    assert sum(path.stat().st_size for path in kept if path.name not in ("mine.txt", "mine")) <= most
    assert {"mine.txt", "mine"} <= {path.name for path in kept}


def test_two_processes_share_a_folder_and_its_size(tmp_path: Path) -> None:
    most = 32 * (SIZE + 32)
    one, other = open_tier(tmp_path, max_bytes=most), open_tier(tmp_path, max_bytes=most)
    for number in range(40):
        store(one, numbered(number), block(number))
        store(other, numbered(100 + number), block(number))
        store(other, numbered(number), block(number))  # stored once
    one.close()
    other.close()
    size = sum(path.stat().st_size for path in files(tmp_path))
    assert size <= most * (1 + 2 / 16)
    assert one.stats().is_on
    assert other.stats().is_on
    assert one.load(numbered(139)) is not None
    assert other.load(numbered(39)) is not None


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    stored(tmp_path, key())
    (file,) = files(tmp_path)
    old, new = (file.with_name(f".{file.name}.{digit}{digit}.tmp") for digit in "ab")
    for path, age in ((old, 7200.0), (new, 0.0)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    stored(tmp_path, numbered(2))
    assert not old.exists()
    assert new.exists()


def test_a_discarded_block_is_gone_even_if_it_is_being_written(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(20):
        store(tier, numbered(number), block())
        tier.discard(numbered(number))
    tier.close()
    assert not files(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_folder_that_can_not_be_written_switches_the_tier_off_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    stored(tmp_path, key())
    tier = open_tier(tmp_path)
    write = os.open

    def fail(path: str, flags: int, mode: int = 0o777, **how: int) -> int:
        if flags & os.O_CREAT and code == errno.EROFS:
            raise OSError(code, os.strerror(code))
        file = write(path, flags, mode, **how)
        if flags & os.O_CREAT:
            os.close(file)
            file = write("/dev/full", os.O_WRONLY)
        return file

    monkeypatch.setattr(os, "open", fail)
    with capture_logs() as logs:
        for number in range(3):
            store(tier, numbered(number), block())
        tier.close()
    (warning,) = logs
    assert warning["event"] == "the second tier of the prefix cache is off: its folder can't be used"
    assert os.strerror(code) in warning["error"]
    assert not tier.stats().is_on
    assert not tier.contains(key())
    assert tier.load(key()) is None
    assert not tier.is_busy
    assert len(files(tmp_path)) == 1, "no temporary file is left"


def test_a_folder_that_can_not_be_made_switches_the_tier_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with capture_logs() as logs:
        tier = open_tier(tmp_path / "file")
        store(tier, key(), block())
        tier.close()
    assert len(logs) == 1
    assert tier.stats() == TierStats(is_on=False)


def test_a_block_larger_than_the_folder_switches_the_tier_off(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_bytes=SIZE)
    with capture_logs() as logs:
        store(tier, key(), block())
        tier.close()
    assert "larger than the tier" in logs[0]["error"]
    assert not tier.stats().is_on
